"""Acceptance on the device: token selection of every node, then a walk down the tree.

The target token of every node is chosen by the sampling family, over the whole device, because its rows are
independent. The walk takes one warp per request, which loads the tree at once and follows it in registers. Each step
looks at one node, which either joins the path or gives way to its next sibling, so a walk has at most N - 1 steps even
where links are malformed. The path is kept in registers and stored once: two stores to one address by different threads
of a program would not be ordered.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.overlap import let_next_kernel_start, overlapped, wait_for_kernel_ahead
from specdec_kernels.sampling.kernel import select
from specdec_kernels.sampling.types import SamplingTensors
from specdec_kernels.tree.types import TreeLinks
from specdec_kernels.verify.configs import ACCEPTANCE
from specdec_kernels.verify.device import empty_outcome, entry, store_outcome
from specdec_kernels.verify.kernel_rejection import accept_drawn
from specdec_kernels.verify.types import DRAWN_RULES, Accepted

_MIN_LANES = 32  # a whole warp, whose sum of integers is one instruction
_LINK_BITS = tl.constexpr(16)
_LINK = tl.constexpr((1 << 16) - 1)
_LAST = tl.constexpr((1 << 31) - 1)


@triton.jit
def _looking(candidate, target, count, in_batch, DEPTH: tl.constexpr):
    """Whether there is a node to look at. A target below 0 is none, and ends the walk."""
    return in_batch & (target >= 0) & (count < DEPTH) & (candidate >= 0)


@triton.jit
def _narrow(token, other):
    """Tokens as int32, and `other` for what is none."""
    return tl.where((token >= 0) & (token <= _LAST), token, other).to(tl.int32)


@triton.jit
def _within(link, NODES: tl.constexpr):
    """Node that a link leads to, counted from 1; 0 where it leads to none."""
    return tl.where((link >= 0) & (link < NODES), link + 1, 0)


@triton.jit(do_not_specialize=["batch"])
def _walk_kernel(
    tokens_ptr,  # [B, N] int64
    first_child_ptr,  # [B, N] int32
    next_sibling_ptr,  # [B, N] int32
    targets_ptr,  # [B, N] int64
    usable_ptr,  # [B, N] bool, or None: where the target is >= 0
    logprobs_ptr,  # [B, N] float32 of the targets, or None
    lengths_ptr,  # [B] int64
    out_tokens_ptr,  # [B, DEPTH + 1] int64
    out_count_ptr,  # [B] int32
    out_nodes_ptr,  # [B, DEPTH + 1] int32
    out_bonus_ptr,  # [B] int64
    out_lengths_ptr,  # [B] int64
    out_valid_ptr,  # [B] bool
    out_logprobs_ptr,  # [B, DEPTH + 1] float32, or None
    batch,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tl.static_assert(NODES <= _LINK)
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    column = tl.arange(0, BLOCK_D)[None, :]
    node = tl.arange(0, BLOCK_N)[None, :]
    in_batch = request < batch
    row = request.to(tl.int64) * NODES
    place, live = row[:, None] + node, in_batch[:, None] & (node < NODES)
    if usable_ptr is None:
        wait_for_kernel_ahead(OVERLAP)
    tokens = tl.load(tokens_ptr + place, mask=live, other=-1)
    children = tl.load(first_child_ptr + place, mask=live, other=-1)
    siblings = tl.load(next_sibling_ptr + place, mask=live, other=-1)
    length = tl.load(lengths_ptr + request, mask=in_batch, other=0)
    # In 32 bits, so that an entry of a row is found by one sum of a warp; the two links of a node share one number.
    drafts = _narrow(tokens, -2)
    links = (_within(children, NODES) << _LINK_BITS) | _within(siblings, NODES)
    if usable_ptr is not None:
        # The kernel ahead chose the targets. It began when all before it had ended: what they wrote is read by now.
        wait_for_kernel_ahead(OVERLAP)
    let_next_kernel_start(OVERLAP)
    targets = tl.load(targets_ptr + place, mask=live, other=-1)
    if usable_ptr is not None:
        targets = tl.where(tl.load(usable_ptr + place, mask=live, other=0) != 0, targets, -1)
    targets = _narrow(targets, -1)

    count = tl.zeros((BLOCK_B,), tl.int32)
    path = tl.where(column == 0, 0, -1) + tl.zeros((BLOCK_B, BLOCK_D), tl.int32)
    emitted = tl.full((BLOCK_B, BLOCK_D), -1, tl.int32)
    root = request * 0
    target = entry(targets, node, root)
    candidate = (entry(links, node, root) >> _LINK_BITS & _LINK) - 1
    looking = _looking(candidate, target, count, in_batch, DEPTH)
    if NODES > 1:  # else the loop folds to code that Triton 3.6 cannot lay out
        step = 1
        while (tl.max(looking.to(tl.int32), 0) > 0) & (step < NODES):
            drafted, link = entry(drafts, node, candidate), entry(links, node, candidate)
            of_candidate = entry(targets, node, candidate)
            hit = looking & (drafted == target)
            emitted = tl.where(hit[:, None] & (column == count[:, None]), drafted[:, None], emitted)
            count += hit.to(tl.int32)
            path = tl.where(hit[:, None] & (column == count[:, None]), candidate[:, None], path)
            target = tl.where(hit, of_candidate, target)
            onward = tl.where(hit, link >> _LINK_BITS & _LINK, link & _LINK) - 1
            candidate = tl.where(looking, onward, candidate)
            looking = _looking(candidate, target, count, in_batch, DEPTH)
            step += 1

    usable = target >= 0
    target = tl.where(usable, target, 0)
    emitted = tl.where(column == count[:, None], target[:, None], emitted).to(tl.int64)
    store_outcome(
        out_tokens_ptr, out_count_ptr, out_nodes_ptr, out_bonus_ptr, out_lengths_ptr, out_valid_ptr, length,
        request, in_batch, column, emitted, path, count, target.to(tl.int64), usable, DEPTH,
    )  # fmt: skip
    if logprobs_ptr is not None:
        in_out = in_batch[:, None] & (column <= DEPTH)
        logprob = tl.load(logprobs_ptr + row[:, None] + path, mask=in_out & (path >= 0), other=0.0)
        tl.store(out_logprobs_ptr + request.to(tl.int64)[:, None] * (DEPTH + 1) + column, logprob, mask=in_out)


def accept(
    rule: str,
    tokens: torch.Tensor,
    tree: TreeLinks,
    values: torch.Tensor,
    lengths: torch.Tensor,
    max_depth: int,
    sampling: SamplingTensors,
    *,
    uniforms: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    draft_rows: torch.Tensor | None,
    probabilities: bool,
    return_logprobs: bool,
) -> Accepted:
    """See `specdec_kernels.verify.accept`; `values` are logits, or with `probabilities` target probabilities."""
    if rule in DRAWN_RULES and sampling.temperature is not None:
        return accept_drawn(
            rule, tokens, tree, values, lengths, max_depth, sampling, uniforms=uniforms, draft_probs=draft_probs,
            draft_rows=draft_rows, probabilities=probabilities, return_logprobs=return_logprobs,
        )  # fmt: skip
    found = select(
        values.flatten(0, 1), sampling, tree.positions, uniforms, per_request=tokens.shape[1],
        probabilities=probabilities, want_logprobs=return_logprobs,
    )  # fmt: skip
    return _walk(tokens, tree, found.tokens, found.valid, found.logprobs, lengths, max_depth)


def accept_targets(
    tokens: torch.Tensor, tree: TreeLinks, targets: torch.Tensor, lengths: torch.Tensor, max_depth: int
) -> Accepted:
    """See `specdec_kernels.verify.accept_targets`."""
    return _walk(tokens, tree, targets, None, None, lengths, max_depth)


def _walk(
    tokens: torch.Tensor,
    tree: TreeLinks,
    targets: torch.Tensor,
    usable: torch.Tensor | None,
    logprobs: torch.Tensor | None,
    lengths: torch.Tensor,
    max_depth: int,
) -> Accepted:
    """Follow `targets` ([B * N] or [B, N]) down the trees."""
    batch, num_nodes = tokens.shape
    accepted = empty_outcome(batch, max_depth, tokens.device, with_logprobs=logprobs is not None)
    config = ACCEPTANCE[current_chip(tokens)]
    block_b = min(triton.next_power_of_2(max(batch, 1)), config.max_requests)
    launch(
        _walk_kernel, (triton.cdiv(batch, block_b),), tokens, tree.first_child, tree.next_sibling, targets, usable,
        logprobs, lengths, *accepted, batch, num_warps=1, NODES=num_nodes, DEPTH=max_depth, BLOCK_B=block_b,
        BLOCK_N=max(_MIN_LANES, lanes(num_nodes)), BLOCK_D=lanes(max_depth + 1), **overlapped(current_chip(tokens)),
    )  # fmt: skip
    return accepted
