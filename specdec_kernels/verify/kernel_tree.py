# mypy: ignore-errors
"""Kernels that judge drawn trees, `multi_round` and `without_replacement`; formulas in `reference`.

Nothing of the size of the vocabulary is written, because every residual at a node is max(p - c q, 0) with one number c:
c_1 = 0, and a rejection at residual mass s and draft mass m adds s / m to c. (A difference of the form
max(max(p - c q, 0) - d q, 0) is max(p - (c + d) q, 0). Under `without_replacement` m is what the rejected siblings have
left of q; they keep their place in q, because a rejected token has no residual at its c, nor at any larger one.)

1. judge, one program per node, all nodes at once: the child that is accepted there, if the walk comes by, and 1 / c.
2. follow, one program per request: the path along the accepted children, and the row whose residual is drawn from.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling.types import ACCEPT_STREAM
from specdec_kernels.tree.types import TreeLinks
from specdec_kernels.verify.configs import ACCEPTANCE
from specdec_kernels.verify.device import draft_prob, entry, target_prob

_ACCEPT = tl.constexpr(ACCEPT_STREAM)


@triton.jit
def _later(candidate, node, NODES: tl.constexpr):
    """Whether a link leads to a node behind `node`."""
    return (candidate > node) & (candidate < NODES)


@triton.jit
def _judging_uniform(seeds_ptr, positions_ptr, uniforms_ptr, request, candidate, asks, NODES: tl.constexpr):
    """[R] float64: the uniform that judges the candidate of each row."""
    if uniforms_ptr is not None:
        uniform = tl.load(uniforms_ptr + request * (NODES + 1) + candidate - 1, mask=asks, other=1.0)
    else:
        seed = tl.load(seeds_ptr + request, mask=asks, other=0)
        root = tl.load(positions_ptr + request.to(tl.int64) * NODES, mask=asks, other=0)
        uniform = d.philox_uniform(seed, root, _ACCEPT, candidate - 1)
    return uniform


@triton.jit
def _draft_mass(draft_ptr, draft_row, asks, VOCAB: tl.constexpr, BLOCK_V: tl.constexpr):
    """[R] float64: sum of q."""
    lane = tl.arange(0, BLOCK_V)[None, :]
    mass = tl.zeros((draft_row.shape[0], BLOCK_V), tl.float64)
    for start in range(0, VOCAB, BLOCK_V):
        live = asks[:, None] & (start + lane < VOCAB)
        mass += draft_prob(draft_ptr, draft_row[:, None], start + lane, live, VOCAB).to(tl.float64)
    return tl.sum(mass, 1)


@triton.jit
def _residual_mass(
    values_ptr, draft_ptr, distribution_ptr, temperature, row, draft_row, rate, rows, row_stride, asks,
    VOCAB: tl.constexpr, PROBS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """[R] float64: sum of max(p - rate q, 0)."""
    lane = tl.arange(0, BLOCK_V)[None, :]
    mass = tl.zeros((row.shape[0], BLOCK_V), tl.float64)
    for start in range(0, VOCAB, BLOCK_V):
        column = start + lane
        live = asks[:, None] & (column < VOCAB)
        p = target_prob(
            values_ptr, distribution_ptr, temperature[:, None], row[:, None], column, rows, row_stride, live, PROBS
        )  # fmt: skip
        q = draft_prob(draft_ptr, draft_row[:, None], column, live, VOCAB)
        mass += tl.where(live, tl.maximum(p.to(tl.float64) - rate[:, None] * q.to(tl.float64), 0.0), 0.0)
    return tl.sum(mass, 1)


@triton.jit(do_not_specialize=["batch"])
def _judge_children_kernel(
    tokens_ptr,  # [B, N] int64
    first_child_ptr,  # [B, N] int32
    next_sibling_ptr,  # [B, N] int32
    values_ptr,  # [B * N, VOCAB], row stride row_stride
    draft_ptr,  # [B, N - 1, VOCAB] float32
    distribution_ptr,  # [4, B * N] float32
    greedy_ptr,  # [B * N] int64
    valid_ptr,  # [B * N] bool
    temperature_ptr,  # [B] float32
    seeds_ptr,  # [B] int64, or None
    positions_ptr,  # [B, N] int64, or None
    uniforms_ptr,  # [B, N + 1] float64, or None
    chosen_ptr,  # [B, N] int32: the accepted child, -1 where there is none
    inverse_rate_ptr,  # [B, N] float32: 1 / c behind the rejected children, 0 where none was rejected
    batch,
    row_stride,
    NODES: tl.constexpr,
    VOCAB: tl.constexpr,
    WITHOUT_REPLACEMENT: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rows = row < batch * NODES
    request = row // NODES
    node, draft_row = row - request * NODES, row - request  # the last node of a request has no children
    temperature = tl.load(temperature_ptr + request, mask=in_rows, other=0.0)
    usable = tl.load(valid_ptr + row, mask=in_rows, other=0) != 0
    argmax = tl.load(greedy_ptr + row, mask=in_rows, other=-1)
    candidate = tl.load(first_child_ptr + row, mask=in_rows & usable, other=-1)
    looking = _later(candidate, node, NODES)
    chosen = tl.full((BLOCK_R,), -1, tl.int32)
    rate = tl.zeros((BLOCK_R,), tl.float64)
    if NODES > 1:
        drawing = looking & (temperature > 0)
        left, draft_left = rate + 1.0, _draft_mass(draft_ptr, draft_row, drawing, VOCAB, BLOCK_V)
        lane = tl.arange(0, BLOCK_N)[None, :]
        place = request.to(tl.int64)[:, None] * NODES + lane
        of_request = tl.load(tokens_ptr + place, mask=drawing[:, None] & (lane < NODES), other=-1)
        missed = tl.zeros((BLOCK_R, BLOCK_N), tl.int32)
        step = 1
        while (tl.max(looking.to(tl.int32), 0) > 0) & (step < NODES):
            token = tl.load(tokens_ptr + request.to(tl.int64) * NODES + candidate, mask=looking, other=-1)
            known = looking & drawing & (token >= 0) & (token < VOCAB)
            if WITHOUT_REPLACEMENT:
                known &= tl.max(tl.where(of_request == token[:, None], missed, 0), 1) == 0
            p = target_prob(
                values_ptr, distribution_ptr, temperature, row, token, batch * NODES, row_stride, known, PROBS
            )
            p = tl.where(known, p, 0.0).to(tl.float64)
            q = draft_prob(draft_ptr, draft_row, token, known, VOCAB).to(tl.float64)
            draft_left = tl.maximum(draft_left, q)  # true but for rounding
            uniform = _judging_uniform(seeds_ptr, positions_ptr, uniforms_ptr, request, candidate, looking, NODES)
            judged = known & (q > 0)
            accepts = judged & (uniform * q * left < (p - rate * q) * draft_left)
            hit = tl.where(drawing, accepts, looking & (token == argmax))
            misses = judged & (accepts == 0)
            if tl.max(misses.to(tl.int32), 0) > 0:
                raised = tl.where(misses, rate + left / tl.where(misses, draft_left, 1.0), rate)
                mass = _residual_mass(
                    values_ptr, draft_ptr, distribution_ptr, temperature, row, draft_row, raised, batch * NODES,
                    row_stride, misses, VOCAB, PROBS, BLOCK_V,
                )  # fmt: skip
                rate = tl.where(mass > 0, raised, rate)
                left = tl.where(mass > 0, mass, left)
                if WITHOUT_REPLACEMENT:
                    draft_left = tl.where(misses, draft_left - q, draft_left)
                    missed = tl.where(misses[:, None] & (lane == candidate[:, None]), 1, missed)
            chosen = tl.where(hit, candidate, chosen)
            looking = looking & (hit == 0)
            following = tl.load(next_sibling_ptr + request.to(tl.int64) * NODES + candidate, mask=looking, other=-1)
            candidate = tl.where(looking, following, candidate)
            looking = looking & _later(candidate, node, NODES)
            step += 1
    tl.store(chosen_ptr + row, chosen, mask=in_rows)
    inverse = tl.where(rate > 0, 1.0 / tl.where(rate > 0, rate, 1.0), 0.0)
    tl.store(inverse_rate_ptr + row, inverse.to(tl.float32), mask=in_rows)


@triton.jit(do_not_specialize=["batch"])
def _follow_kernel(
    chosen_ptr,  # [B, N] int32
    inverse_rate_ptr,  # [B, N] float32
    path_ptr,  # [B, DEPTH + 1] int32: nodes from the root on, -1 behind
    state_ptr,  # [2, B] int32: N where the residual of the last node is drawn from, else that node; that node
    batch,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    in_batch = request < batch
    node, column = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_D)[None, :]
    live = in_batch[:, None] & (node < NODES)
    row = request.to(tl.int64)[:, None] * NODES + node
    chosen = tl.load(chosen_ptr + row, mask=live, other=-1)
    end, count = request * 0, request * 0
    path = tl.where(column == 0, 0, -1) + tl.zeros((BLOCK_B, BLOCK_D), tl.int32)
    for _ in range(DEPTH):
        onward = entry(chosen, node, end)
        goes = in_batch & (onward >= 0)  # a leaf has no choice, so the walk stays where it ended
        count += goes.to(tl.int32)
        path = tl.where(goes[:, None] & (column == count[:, None]), onward[:, None], path)
        end = tl.where(goes, onward, end)
    inverse = tl.load(inverse_rate_ptr + request.to(tl.int64) * NODES + end, mask=in_batch, other=0.0)
    rejected = (inverse > 0) & (count < DEPTH)
    tl.store(state_ptr + request, tl.where(rejected, NODES, end), mask=in_batch)
    tl.store(state_ptr + batch + request, end, mask=in_batch)
    place = request.to(tl.int64)[:, None] * (DEPTH + 1) + column
    tl.store(path_ptr + place, path, mask=in_batch[:, None] & (column <= DEPTH))


def judge_tree(
    rule: str,
    tokens: torch.Tensor,
    tree: TreeLinks,
    rows_of_both: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    selected: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    sources: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    judged: torch.Tensor,
    state: torch.Tensor,
    max_depth: int,
    probabilities: bool,
) -> torch.Tensor:
    """Fill `judged` [B, N] (1 / c) and `state` [2, B] as the residual kernel reads them; the path [B, D + 1] int32."""
    (batch, num_nodes), values = tokens.shape, rows_of_both[0]
    vocab, config = values.shape[-1], ACCEPTANCE[current_chip(tokens)]
    out = partial(torch.empty, dtype=torch.int32, device=tokens.device)
    chosen, path = out(batch, num_nodes), out(batch, max_depth + 1)
    block_v, rows = min(max(triton.next_power_of_2(vocab), d.MIN_SCAN), config.pass_width), batch * num_nodes
    block_r = d.rows_per_program(rows, config.max_requests, block_v)
    launch(
        _judge_children_kernel, (triton.cdiv(rows, block_r),), tokens, tree.first_child, tree.next_sibling,
        *rows_of_both, *selected, *sources, chosen, judged, batch, values.stride(0), num_warps=config.strip_warps,
        NODES=num_nodes, VOCAB=vocab, WITHOUT_REPLACEMENT=rule == "without_replacement", PROBS=probabilities,
        BLOCK_R=block_r, BLOCK_N=lanes(num_nodes), BLOCK_V=block_v,
    )  # fmt: skip
    block_b = d.rows_per_program(batch, config.max_requests, lanes(num_nodes))
    launch(
        _follow_kernel, (triton.cdiv(batch, block_b),), chosen, judged, path, state, batch, num_warps=1,
        NODES=num_nodes, DEPTH=max_depth, BLOCK_B=block_b, BLOCK_N=lanes(num_nodes), BLOCK_D=lanes(max_depth + 1),
    )  # fmt: skip
    return path
