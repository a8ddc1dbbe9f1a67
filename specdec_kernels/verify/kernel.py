"""Acceptance on the device: token selection of every node, then a walk down the tree.

The target token of every node is chosen by the sampling family, over the whole device, because its rows are
independent. The walk loads the tree of a request at once and follows it in registers. Each step looks at one node,
which either joins the path or gives way to its next sibling, so a walk has at most N - 1 steps even where links are
malformed. The path is kept in registers and stored once: two stores to one address by different threads of a program
would not be ordered.

Where no filter needs more of the device, one program per request chooses the tokens of its nodes from the statistics
of their rows, a warp a row, and walks: two launches in all. Else, and for large trees, selection and the walk are
launches of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.overlap import let_next_kernel_start, overlapped, wait_for_kernel_ahead
from specdec_kernels.sampling.device import MIN_SCAN
from specdec_kernels.sampling.kernel import (
    chosen_tokens,
    log_normaliser,
    select,
    sources_of,
    statistics,
    token_logprob,
)
from specdec_kernels.sampling.types import TARGET_STREAM, SamplingTensors
from specdec_kernels.tree.types import TreeLinks
from specdec_kernels.verify.configs import ACCEPTANCE
from specdec_kernels.verify.device import empty_outcome, entry, store_outcome, wide_entry
from specdec_kernels.verify.kernel_rejection import accept_drawn
from specdec_kernels.verify.types import DRAWN_RULES, Accepted

_MOST_NODES = 64  # of a request whose tokens one program chooses


@triton.jit
def _looking(candidate, target, count, in_batch, NODES: tl.constexpr, DEPTH: tl.constexpr):
    """Whether there is a node to look at. A target below 0 is none, and ends the walk."""
    return in_batch & (target >= 0) & (count < DEPTH) & (candidate >= 0) & (candidate < NODES)


@triton.jit
def _followed(
    tokens_ptr, first_child_ptr, next_sibling_ptr, targets, request, in_batch,
    NODES: tl.constexpr, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Follow `targets` [B, BLOCK_N] int64, -1 where there is none: the tokens emitted and the nodes of the path
    [B, BLOCK_D], the number of drafts accepted, the bonus token, and whether there is one."""
    column, node = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_N)[None, :]
    place, live = request.to(tl.int64)[:, None] * NODES + node, in_batch[:, None] & (node < NODES)
    tokens = tl.load(tokens_ptr + place, mask=live, other=-1)
    children = tl.load(first_child_ptr + place, mask=live, other=-1)
    siblings = tl.load(next_sibling_ptr + place, mask=live, other=-1)
    count = request * 0
    path = tl.where(column == 0, 0, -1) + count[:, None]
    emitted = (path * 0 - 1).to(tl.int64)
    root = request * 0
    target = wide_entry(targets, node, root)
    candidate = entry(children, node, root)
    looking = _looking(candidate, target, count, in_batch, NODES, DEPTH)
    if NODES > 1:  # else the loop folds to code that Triton 3.6 cannot lay out
        step = 1
        while (tl.max(looking.to(tl.int32), 0) > 0) & (step < NODES):
            drafted = wide_entry(tokens, node, candidate)
            hit = looking & (drafted == target)
            emitted = tl.where(hit[:, None] & (column == count[:, None]), drafted[:, None], emitted)
            count += hit.to(tl.int32)
            path = tl.where(hit[:, None] & (column == count[:, None]), candidate[:, None], path)
            target = tl.where(hit, wide_entry(targets, node, candidate), target)
            onward = tl.where(hit, entry(children, node, candidate), entry(siblings, node, candidate))
            candidate = tl.where(looking, onward, candidate)
            looking = _looking(candidate, target, count, in_batch, NODES, DEPTH)
            step += 1
    usable = target >= 0
    bonus = tl.where(usable, target, 0)
    return tl.where(column == count[:, None], bonus[:, None], emitted), path, count, bonus, usable


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
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    in_batch = request < batch
    column, node = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_N)[None, :]
    row = request.to(tl.int64) * NODES
    place, live = row[:, None] + node, in_batch[:, None] & (node < NODES)
    wait_for_kernel_ahead(OVERLAP)
    let_next_kernel_start(OVERLAP)
    targets = tl.load(targets_ptr + place, mask=live, other=-1)
    if usable_ptr is not None:
        targets = tl.where(tl.load(usable_ptr + place, mask=live, other=0) != 0, targets, -1)
    emitted, path, count, bonus, usable = _followed(
        tokens_ptr, first_child_ptr, next_sibling_ptr, targets, request, in_batch, NODES, DEPTH, BLOCK_N, BLOCK_D
    )
    store_outcome(
        out_tokens_ptr, out_count_ptr, out_nodes_ptr, out_bonus_ptr, out_lengths_ptr, out_valid_ptr, lengths_ptr,
        request, in_batch, column, emitted, path, count, bonus, usable, DEPTH,
    )  # fmt: skip
    if logprobs_ptr is not None:
        in_out = in_batch[:, None] & (column <= DEPTH)
        logprob = tl.load(logprobs_ptr + row[:, None] + path, mask=in_out & (path >= 0), other=0.0)
        tl.store(out_logprobs_ptr + request.to(tl.int64)[:, None] * (DEPTH + 1) + column, logprob, mask=in_out)


@triton.jit(do_not_specialize=["batch"])
def _accept_kernel(  # 20 run-time arguments: what selection reads, and what a walk reads and writes
    values_ptr,  # [B * N, VOCAB], row stride row_stride
    temperature_ptr,  # [B] float32, or None without SAMPLE
    seeds_ptr,  # [B] int64, or None
    positions_ptr,  # [B, N] int64, or None
    uniforms_ptr,  # [B, N] float64, or None
    groups_ptr,  # [0 or 1, B * N, GROUPS] float32, see `sampling.kernel`
    strips_ptr,  # [1 to 3, B * N, STRIPS] float32
    tokens_ptr,  # [B, N] int64
    first_child_ptr,  # [B, N] int32
    next_sibling_ptr,  # [B, N] int32
    lengths_ptr,  # [B] int64
    out_tokens_ptr,  # [B, DEPTH + 1] int64
    out_count_ptr,  # [B] int32
    out_nodes_ptr,  # [B, DEPTH + 1] int32
    out_bonus_ptr,  # [B] int64
    out_lengths_ptr,  # [B] int64
    out_valid_ptr,  # [B] bool
    out_logprobs_ptr,  # [B, DEPTH + 1] float32, or None
    batch,
    row_stride,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    STRIPS: tl.constexpr,
    SAMPLE: tl.constexpr,
    FILTER: tl.constexpr,
    NORMALISE: tl.constexpr,
    PROBS: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    node, column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)[None, :]
    in_row, row, rows = node < NODES, tl.program_id(0) * NODES + node, batch * NODES
    wait_for_kernel_ahead(OVERLAP)
    let_next_kernel_start(OVERLAP)
    token, valid, top, _, _ = chosen_tokens(
        values_ptr, temperature_ptr, seeds_ptr, positions_ptr, uniforms_ptr, groups_ptr, strips_ptr, None, None, None,
        None, None, row, row // NODES, in_row, rows, row_stride, VOCAB, GROUPS, STRIPS, SAMPLE, True, False, PROBS,
        STREAM, BLOCK_T, BLOCK_S, 0, WIDTH, 0,
    )  # fmt: skip
    request = tl.program_id(0) + tl.arange(0, 1)
    targets = tl.where(in_row & valid, token.to(tl.int64), -1)[None, :]
    emitted, path, count, bonus, usable = _followed(
        tokens_ptr, first_child_ptr, next_sibling_ptr, targets, request, request < batch, NODES, DEPTH, BLOCK_N, BLOCK_D
    )
    store_outcome(
        out_tokens_ptr, out_count_ptr, out_nodes_ptr, out_bonus_ptr, out_lengths_ptr, out_valid_ptr, lengths_ptr,
        request, request < batch, column, emitted, path, count, bonus, usable, DEPTH,
    )  # fmt: skip
    if NORMALISE:
        normaliser = log_normaliser(strips_ptr, row, in_row, rows, top, STRIPS, SAMPLE, PROBS, BLOCK_T)
        of_node = token_logprob(values_ptr, row, token, valid, in_row, normaliser, row_stride, PROBS)
        on_path = path[:, :, None] == node[None, None, :]
        logprob = tl.sum(tl.where(on_path, of_node[None, None, :], 0.0), 2)
        place = request.to(tl.int64)[:, None] * (DEPTH + 1) + column
        tl.store(out_logprobs_ptr + place, logprob, mask=column <= DEPTH)


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
    if sampling.filtered and sampling.temperature is not None or tokens.shape[1] > _MOST_NODES:
        found = select(
            values.flatten(0, 1), sampling, tree.positions, uniforms, per_request=tokens.shape[1],
            probabilities=probabilities, want_logprobs=return_logprobs,
        )  # fmt: skip
        return _walk(tokens, tree, found.tokens, found.valid, found.logprobs, lengths, max_depth)
    return _choose_and_walk(
        tokens, tree, values.flatten(0, 1), lengths, max_depth, sampling, uniforms, probabilities, return_logprobs
    )


def _choose_and_walk(
    tokens: torch.Tensor,
    tree: TreeLinks,
    values: torch.Tensor,
    lengths: torch.Tensor,
    max_depth: int,
    sampling: SamplingTensors,
    uniforms: torch.Tensor | None,
    probabilities: bool,
    return_logprobs: bool,
) -> Accepted:
    """Without filters: choose the tokens of all nodes of a request, and follow them."""
    batch, num_nodes = tokens.shape
    stats = statistics(values, sampling, num_nodes, probabilities, return_logprobs)
    accepted = empty_outcome(batch, max_depth, tokens.device, with_logprobs=return_logprobs)
    block_n = lanes(num_nodes)
    warps = min(block_n, ACCEPTANCE[current_chip(tokens)].node_warps)
    launch(
        _accept_kernel, (batch,), values, sampling.temperature, *sources_of(sampling, tree.positions, uniforms),
        *stats[:2], tokens, tree.first_child, tree.next_sibling, lengths, *accepted, batch, values.stride(0),
        num_warps=warps, NODES=num_nodes, DEPTH=max_depth, STREAM=TARGET_STREAM, BLOCK_N=block_n,
        BLOCK_D=lanes(max_depth + 1), BLOCK_T=lanes(stats.strips.shape[2], least=MIN_SCAN), **stats.sizes,
    )  # fmt: skip
    return accepted


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
    block_b, block_n = min(triton.next_power_of_2(max(batch, 1)), config.max_requests), lanes(num_nodes)
    launch(
        _walk_kernel, (triton.cdiv(batch, block_b),), tokens, tree.first_child, tree.next_sibling, targets, usable,
        logprobs, lengths, *accepted, batch, num_warps=1, NODES=num_nodes, DEPTH=max_depth, BLOCK_B=block_b,
        BLOCK_N=block_n, BLOCK_D=lanes(max_depth + 1), **overlapped(current_chip(tokens)),
    )  # fmt: skip
    return accepted
