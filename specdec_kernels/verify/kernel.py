"""Verification along target tokens on the device: token selection of every node, then a traversal of the tree.

The sampling family selects the target token of every node. The traversal loads a tree at once and follows it in the
registers of one warp; it looks at N - 1 nodes at most, even where links are malformed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.pdl import launch_dependents, wait_for_predecessor
from specdec_kernels.sampling.kernel import select
from specdec_kernels.tree.types import TreeLinks
from specdec_kernels.verify.configs import ACCEPTANCE
from specdec_kernels.verify.device import empty_outcome, entry, store_outcome
from specdec_kernels.verify.kernel_rejection import accept_sampled
from specdec_kernels.verify.types import Accepted, Verification

_MIN_LANES = 32  # a whole warp, whose sum of integers is one instruction
_LINK_BITS = tl.constexpr(16)
_LINK = tl.constexpr((1 << 16) - 1)
_LAST = tl.constexpr((1 << 31) - 1)


@triton.jit
def _looking(candidate, target, count, in_batch, DEPTH: tl.constexpr):
    """Whether there is a node to look at. A target below 0 is none, and ends the path."""
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
def _follow_kernel(
    tokens_ptr,  # [B, N] int64
    tree,  # TreeLinks
    targets_ptr,  # [B, N] int64
    usable_ptr,  # [B, N] bool, or None: where the target is >= 0
    logprobs_ptr,  # [B, N] float32 of the targets, or None
    lengths_ptr,  # [B] int64
    accepted,  # Accepted, written
    batch,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    tl.static_assert(NODES <= _LINK)
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    column = tl.arange(0, BLOCK_D)[None, :]
    node = tl.arange(0, BLOCK_N)[None, :]
    in_batch = request < batch
    row = request.to(tl.int64) * NODES
    place = row[:, None] + node
    live = in_batch[:, None] & (node < NODES)
    if usable_ptr is None:
        wait_for_predecessor(PDL)  # any kernel may come before: it may write the tree
    # Else loaded before the wait: the predecessor `select` writes targets alone, and it began when every kernel before
    # it had ended, among them the producers of tokens, links and lengths.
    tokens = tl.load(tokens_ptr + place, mask=live, other=-1)
    children = tl.load(tree.first_child + place, mask=live, other=-1)
    siblings = tl.load(tree.next_sibling + place, mask=live, other=-1)
    length = tl.load(lengths_ptr + request, mask=in_batch, other=0)
    # In 32 bits, so that an entry of a row is found by one sum of a warp; the two links of a node share one number.
    drafts = _narrow(tokens, -2)
    links = (_within(children, NODES) << _LINK_BITS) | _within(siblings, NODES)
    if usable_ptr is not None:
        wait_for_predecessor(PDL)
    launch_dependents(PDL)
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
            drafted = entry(drafts, node, candidate)
            link = entry(links, node, candidate)
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
        accepted, length, request, in_batch, column, emitted, path, count, target.to(tl.int64), usable, DEPTH
    )  # fmt: skip
    if logprobs_ptr is not None:
        in_out = in_batch[:, None] & (column <= DEPTH)
        logprob = tl.load(logprobs_ptr + row[:, None] + path, mask=in_out & (path >= 0), other=0.0)
        tl.store(accepted.logprobs + request.to(tl.int64)[:, None] * (DEPTH + 1) + column, logprob, mask=in_out)


def accept(call: Verification) -> Accepted:
    if call.samples_drafts:
        return accept_sampled(call)
    found = select(
        call.values.flatten(0, 1), call.sampling, call.tree.positions, call.uniforms,
        per_request=call.tokens.shape[1], probabilities=call.probabilities, want_logprobs=call.return_logprobs,
    )  # fmt: skip
    chosen = found.tokens, call.lengths, call.max_depth, found.valid, found.logprobs
    return accept_targets(call.tokens, call.tree, *chosen)


def accept_targets(
    tokens: Tensor,
    tree: TreeLinks,
    targets: Tensor,
    lengths: Tensor,
    max_depth: int,
    usable: Tensor | None = None,
    logprobs: Tensor | None = None,
) -> Accepted:
    """Also of [B * N] targets, with those that are `usable`, and their `logprobs`."""
    batch, num_nodes = tokens.shape
    accepted = empty_outcome(batch, max_depth, tokens.device, with_logprobs=logprobs is not None)
    config = ACCEPTANCE[current_chip(tokens)]
    block_b = min(triton.next_power_of_2(max(batch, 1)), config.max_requests)
    launch(
        _follow_kernel, (triton.cdiv(batch, block_b),), tokens, tree, targets, usable, logprobs,
        lengths, accepted, batch, num_warps=1, NODES=num_nodes, DEPTH=max_depth, BLOCK_B=block_b,
        BLOCK_N=max(_MIN_LANES, lanes(num_nodes)), BLOCK_D=lanes(max_depth + 1),
    )  # fmt: skip
    return accepted
