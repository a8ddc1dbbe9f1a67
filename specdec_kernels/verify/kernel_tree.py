# mypy: ignore-errors
"""Kernels that judge drawn trees; formulas in `reference_tree`.

Nothing of the size of the vocabulary is written, because every residual at a node is max(p - c q, 0) with one number c:
c_1 = 0, and a rejection at residual mass s, draft mass m and weight w adds s / (w m) to c (w = 1 from the root down).
(A difference of the form max(max(p - c q, 0) - d q, 0) is max(p - (c + d) q, 0). Without replacement m is what the
rejected siblings have left of q. They keep their place in q: a token that can be rejected has w p < q, hence no
residual at its c, nor at any larger one.) Under `k_seq` c is rho / m.

From the root down:
1. judge, one program per node, all nodes at once: the child that is accepted there, if the walk comes by, and 1 / c.
From the leaves up, whether a node is reached does not depend on what is below it, so that:
1. judge, a launch per level, one program per node: the weights of its children, then its own and 1 / c. Under
   `greedy_paths` one more pass gives the mass of q in each class, hence the factor q' / q, and one child is kept.
Both:
2. follow, one program per request: the path along the accepted children, and the row whose residual is drawn from.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling.types import ACCEPT_STREAM
from specdec_kernels.tree.types import TreeLinks
from specdec_kernels.verify.configs import ACCEPTANCE
from specdec_kernels.verify.device import (
    CLASSES,
    draft_prob,
    draft_row,
    entry,
    judging_uniforms,
    skewed_prob,
    target_prob,
    token_class,
)
from specdec_kernels.verify.types import BOTTOM_UP_RULES

_ACCEPT = tl.constexpr(ACCEPT_STREAM)
_CLASSES = tl.constexpr(CLASSES)
_RATE_STEPS = tl.constexpr(64)
_RATE_ERROR = tl.constexpr(2.0**-44)  # of rho, and of the equation that it solves


@triton.jit
def _later(candidate, node, NODES: tl.constexpr):
    """Whether a link leads to a node behind `node`."""
    return (candidate > node) & (candidate < NODES)


@triton.jit
def _next_sibling(next_sibling_ptr, request, candidate, looking, NODES: tl.constexpr):
    """The sibling behind each candidate, and whether there is one."""
    place = request.to(tl.int64) * NODES + candidate
    following = tl.load(next_sibling_ptr + place, mask=looking, other=-1)
    leads = looking & _later(following, candidate, NODES)
    return tl.where(leads, following, candidate), leads


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
def _draft_mass(draft_ptr, of_draft, asks, VOCAB: tl.constexpr, BLOCK_V: tl.constexpr):
    """[R] float64: sum of q."""
    lane = tl.arange(0, BLOCK_V)[None, :]
    mass = tl.zeros((of_draft.shape[0], BLOCK_V), tl.float64)
    for start in range(0, VOCAB, BLOCK_V):
        live = asks[:, None] & (start + lane < VOCAB)
        mass += draft_prob(draft_ptr, of_draft[:, None], start + lane, live, VOCAB).to(tl.float64)
    return tl.sum(mass, 1)


@triton.jit
def _residual_mass(
    values_ptr, draft_ptr, factors_ptr, distribution_ptr, temperature, row, of_draft, rate, rows, row_stride, asks,
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
        q = draft_prob(draft_ptr, of_draft[:, None], column, live, VOCAB)
        q = skewed_prob(factors_ptr, row[:, None], p, q, live)
        mass += tl.where(live, tl.maximum(p.to(tl.float64) - rate[:, None] * q.to(tl.float64), 0.0), 0.0)
    return tl.sum(mass, 1)


@triton.jit
def _probs_of(
    tokens_ptr, values_ptr, draft_ptr, distribution_ptr, temperature, request, candidate, row, of_draft, rows,
    row_stride, drawing, NODES: tl.constexpr, VOCAB: tl.constexpr, PROBS: tl.constexpr,
):  # fmt: skip
    """Token of each candidate, and its p and q in float64; both 0 where not `drawing`."""
    token = tl.load(tokens_ptr + request.to(tl.int64) * NODES + candidate)
    known = drawing & (token >= 0) & (token < VOCAB)
    p = target_prob(values_ptr, distribution_ptr, temperature, row, token, rows, row_stride, known, PROBS)
    q = draft_prob(draft_ptr, of_draft, token, known, VOCAB)
    return token, tl.where(known, p, 0.0).to(tl.float64), tl.where(known, q, 0.0).to(tl.float64)


@triton.jit
def _num_draws(
    tokens_ptr, next_sibling_ptr, draft_ptr, request, candidate, of_draft, looking,
    NODES: tl.constexpr, VOCAB: tl.constexpr,
):  # fmt: skip
    """[R] int32: how many of the candidate and the siblings behind it were drawn."""
    draws = candidate * 0
    step = 1
    while (tl.max(looking.to(tl.int32), 0) > 0) & (step < NODES):
        token = tl.load(tokens_ptr + request.to(tl.int64) * NODES + candidate, mask=looking, other=-1)
        known = looking & (token >= 0) & (token < VOCAB)
        draws += (known & (draft_prob(draft_ptr, of_draft, token, known, VOCAB) > 0)).to(tl.int32)
        candidate, looking = _next_sibling(next_sibling_ptr, request, candidate, looking, NODES)
        step += 1
    return draws


@triton.jit
def _surplus(mass, rho, draws):
    """r - (1 - (1 - r) / rho)^k with r = sum max(p - rho q, 0): falls in rho and is 0 at the rho of `k_seq`."""
    rejected = tl.maximum(1.0 - (1.0 - mass) / rho, 0.0)
    power = tl.exp(draws.to(tl.float64) * tl.log(tl.where(rejected > 0, rejected, 1.0)))
    return mass - tl.where(rejected > 0, power, 0.0)


@triton.jit
def _k_seq_rate(
    values_ptr, draft_ptr, distribution_ptr, temperature, row, of_draft, draft_mass, draws, rows, row_stride, asks,
    VOCAB: tl.constexpr, PROBS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """[R] float64: rho / m, by the Illinois form of regula falsi."""
    low = tl.zeros_like(draft_mass) + 1.0
    high = tl.maximum(draws, 1).to(tl.float64)
    inverse = 1.0 / tl.where(draft_mass > 0, draft_mass, 1.0)
    mass = _residual_mass(
        values_ptr, draft_ptr, None, distribution_ptr, temperature, row, of_draft, low * inverse, rows, row_stride,
        asks, VOCAB, PROBS, BLOCK_V,
    )  # fmt: skip
    above, rho = _surplus(mass, low, draws), low
    asks = asks & (draws > 1) & (above > _RATE_ERROR)
    mass = _residual_mass(
        values_ptr, draft_ptr, None, distribution_ptr, temperature, row, of_draft, high * inverse, rows, row_stride,
        asks, VOCAB, PROBS, BLOCK_V,
    )  # fmt: skip
    below, rho = _surplus(mass, high, draws), tl.where(asks, high, rho)
    asks = asks & (below < -_RATE_ERROR)
    side, step = draws * 0, 0
    while (tl.max(asks.to(tl.int32), 0) > 0) & (step < _RATE_STEPS):
        gap = above - below
        middle = tl.where(asks & (gap > 0), (high * above - low * below) / tl.where(gap > 0, gap, 1.0), high)
        rho = tl.where(asks, middle, rho)
        mass = _residual_mass(
            values_ptr, draft_ptr, None, distribution_ptr, temperature, row, of_draft, rho * inverse, rows, row_stride,
            asks, VOCAB, PROBS, BLOCK_V,
        )  # fmt: skip
        surplus = _surplus(mass, rho, draws)
        over = surplus > 0
        # An end that stays twice counts half, so that the other end moves as well.
        below = tl.where(over, tl.where(side > 0, below * 0.5, below), surplus)
        above = tl.where(over, surplus, tl.where(side < 0, above * 0.5, above))
        low, high = tl.where(over, rho, low), tl.where(over, high, rho)
        side = tl.where(over, 1, -1)
        asks = asks & (tl.abs(surplus) > _RATE_ERROR) & (high - low > _RATE_ERROR)
        step += 1
    return rho * inverse


@triton.jit(do_not_specialize=["batch"])
def _judge_children_kernel(  # 17 run-time arguments: two trees of links, two distributions, three sources of uniforms
    tokens_ptr,  # [B, N] int64
    first_child_ptr,  # [B, N] int32
    next_sibling_ptr,  # [B, N] int32
    values_ptr,  # [B * N, VOCAB], row stride row_stride
    draft_ptr,  # [B, DRAFT_ROWS, VOCAB] float32
    draft_rows_ptr,  # [B, N] int32, or None: node n has row n
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
    DRAFT_ROWS: tl.constexpr,
    VOCAB: tl.constexpr,
    WITHOUT_REPLACEMENT: tl.constexpr,
    K_SEQ: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rows = row < batch * NODES
    request = row // NODES
    node = row - request * NODES
    temperature = tl.load(temperature_ptr + request, mask=in_rows, other=0.0)
    usable = tl.load(valid_ptr + row, mask=in_rows, other=0) != 0
    argmax = tl.load(greedy_ptr + row, mask=in_rows, other=-1)
    candidate = tl.load(first_child_ptr + row, mask=in_rows & usable, other=-1)
    looking = _later(candidate, node, NODES)
    chosen = tl.full((BLOCK_R,), -1, tl.int32)
    rate = tl.zeros((BLOCK_R,), tl.float64)
    if NODES > 1:
        drawing = looking & (temperature > 0)
        of_draft = draft_row(draft_rows_ptr, request, node, drawing, NODES, DRAFT_ROWS)
        left, draft_left = rate + 1.0, _draft_mass(draft_ptr, of_draft, drawing, VOCAB, BLOCK_V)
        lane = tl.arange(0, BLOCK_N)[None, :]
        place = request.to(tl.int64)[:, None] * NODES + lane
        of_request = tl.load(tokens_ptr + place, mask=drawing[:, None] & (lane < NODES), other=-1)
        missed = tl.zeros((BLOCK_R, BLOCK_N), tl.int32)
        if K_SEQ:
            draws = _num_draws(
                tokens_ptr, next_sibling_ptr, draft_ptr, request, candidate, of_draft, drawing, NODES, VOCAB
            )
            k_seq_rate = _k_seq_rate(
                values_ptr, draft_ptr, distribution_ptr, temperature, row, of_draft, draft_left, draws, batch * NODES,
                row_stride, drawing & (draws > 0), VOCAB, PROBS, BLOCK_V,
            )  # fmt: skip
        step = 1
        while (tl.max(looking.to(tl.int32), 0) > 0) & (step < NODES):
            here = tl.where(looking, candidate, 0)
            token, p, q = _probs_of(
                tokens_ptr, values_ptr, draft_ptr, distribution_ptr, temperature, tl.where(in_rows, request, 0), here,
                row, of_draft, batch * NODES, row_stride, looking & drawing, NODES, VOCAB, PROBS,
            )  # fmt: skip
            judged = q > 0
            if WITHOUT_REPLACEMENT:
                judged &= tl.max(tl.where(of_request == token[:, None], missed, 0), 1) == 0
            draft_left = tl.maximum(draft_left, tl.where(judged, q, 0.0))  # true but for rounding
            uniform = _judging_uniform(seeds_ptr, positions_ptr, uniforms_ptr, request, candidate, looking, NODES)
            if K_SEQ:
                accepts = judged & (uniform * k_seq_rate * q < p)
            else:
                accepts = judged & (uniform * q * left < (p - rate * q) * draft_left)
            hit = tl.where(drawing, accepts, looking & (token == argmax))
            misses = judged & (accepts == 0)
            if K_SEQ:
                rate = tl.where(misses, k_seq_rate, rate)
            elif tl.max(misses.to(tl.int32), 0) > 0:
                raised = tl.where(misses, rate + left / tl.where(misses, draft_left, 1.0), rate)
                mass = _residual_mass(
                    values_ptr, draft_ptr, None, distribution_ptr, temperature, row, of_draft, raised, batch * NODES,
                    row_stride, misses, VOCAB, PROBS, BLOCK_V,
                )  # fmt: skip
                rate = tl.where(mass > 0, raised, rate)
                left = tl.where(mass > 0, mass, left)
                if WITHOUT_REPLACEMENT:
                    draft_left = tl.where(misses, draft_left - q, draft_left)
                    missed = tl.where(misses[:, None] & (lane == candidate[:, None]), 1, missed)
            chosen = tl.where(hit, candidate, chosen)
            candidate, looking = _next_sibling(next_sibling_ptr, request, candidate, looking & (hit == 0), NODES)
            step += 1
    tl.store(chosen_ptr + row, chosen, mask=in_rows)
    inverse = tl.where(rate > 0, 1.0 / tl.where(rate > 0, rate, 1.0), 0.0)
    tl.store(inverse_rate_ptr + row, inverse.to(tl.float32), mask=in_rows)


@triton.jit
def _class_masses(
    values_ptr, draft_ptr, distribution_ptr, temperature, row, of_draft, rows, row_stride, asks,
    VOCAB: tl.constexpr, PROBS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """[R, CLASSES] float64: mass of q by class."""
    # Summed over lanes once, at the end; a step takes few tokens, because each has an entry for every class.
    STEP: tl.constexpr = BLOCK_V if BLOCK_V < 512 else 512
    lane, kinds = tl.arange(0, STEP)[None, :], tl.arange(0, _CLASSES)[None, :, None]
    found = tl.zeros((row.shape[0], _CLASSES, STEP), tl.float64)
    for start in range(0, VOCAB, STEP):
        column = start + lane
        live = asks[:, None] & (column < VOCAB)
        p = target_prob(
            values_ptr, distribution_ptr, temperature[:, None], row[:, None], column, rows, row_stride, live, PROBS
        )  # fmt: skip
        q = draft_prob(draft_ptr, of_draft[:, None], column, live, VOCAB)
        kind = token_class(tl.where(live, p, 0.0), q)
        found += tl.where(kind[:, None, :] == kinds, q.to(tl.float64)[:, None, :], 0.0)
    return tl.sum(found, 2)


@triton.jit
def _keep_best_child(
    tokens_ptr, next_sibling_ptr, values_ptr, draft_ptr, factors_ptr, distribution_ptr, temperature, request, candidate,
    row, of_draft, draft_mass, rows, row_stride, drawing,
    NODES: tl.constexpr, VOCAB: tl.constexpr, PROBS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The first child of the highest class, and the factors q' / q of each class, stored. Rows that do not draw keep
    their first child."""
    kept, best, draws, looking = candidate, candidate * 0 - 1, candidate * 0, drawing
    step = 1
    while (tl.max(looking.to(tl.int32), 0) > 0) & (step < NODES):
        _, p, q = _probs_of(
            tokens_ptr, values_ptr, draft_ptr, distribution_ptr, temperature, request,
            tl.where(looking, candidate, 0), row, of_draft, rows, row_stride, looking, NODES, VOCAB, PROBS,
        )  # fmt: skip
        kind = token_class(p.to(tl.float32), q.to(tl.float32))
        better = (q > 0) & (kind > best)
        kept, best = tl.where(better, candidate, kept), tl.where(better, kind, best)
        draws += (q > 0).to(tl.int32)
        candidate, looking = _next_sibling(next_sibling_ptr, request, candidate, looking, NODES)
        step += 1
    kinds = tl.arange(0, _CLASSES)[None, :]
    asks = drawing & (draws > 0)
    mass = _class_masses(
        values_ptr, draft_ptr, distribution_ptr, temperature, row, of_draft, rows, row_stride, asks, VOCAB, PROBS,
        BLOCK_V,
    )  # fmt: skip
    mass /= tl.where(draft_mass > 0, draft_mass, 1.0)[:, None]
    up_to = tl.cumsum(mass, 1)
    before = tl.maximum(up_to - mass, 0.0)
    power, lower, times = up_to * 0.0 + 1.0, up_to * 0.0 + 1.0, 0
    while times < tl.max(draws, 0):
        power = tl.where(times < draws[:, None], power * up_to, power)
        lower = tl.where(times < draws[:, None], lower * before, lower)
        times += 1
    # Of q as it is recorded: q' = q / m times the share of the kept mass.
    scaled = mass * tl.where(draft_mass > 0, draft_mass, 1.0)[:, None]
    factor = tl.where(mass > 0, (power - lower) / tl.where(mass > 0, scaled, 1.0), 0.0)
    place = row.to(tl.int64)[:, None] * _CLASSES + kinds
    tl.store(factors_ptr + place, factor.to(tl.float32), mask=asks[:, None] & (kinds < _CLASSES))
    tl.debug_barrier()
    return kept


@triton.jit(do_not_specialize=["batch", "level"])
def _weigh_children_kernel(  # 17 run-time arguments: the tree, two distributions, and what each level leaves
    tokens_ptr,  # [B, N] int64
    first_child_ptr,  # [B, N] int32
    next_sibling_ptr,  # [B, N] int32
    values_ptr,  # [B * N, VOCAB], row stride row_stride
    draft_ptr,  # [B, DRAFT_ROWS, VOCAB] float32
    draft_rows_ptr,  # [B, N] int32, or None: node n has row n
    distribution_ptr,  # [4, B * N] float32
    greedy_ptr,  # [B * N] int64
    valid_ptr,  # [B * N] bool
    temperature_ptr,  # [B] float32
    factors_ptr,  # [B, N, CLASSES] float32, written: q' / q by class under `greedy_paths`, else None
    weights_ptr,  # [B, N] float64: w, of nodes deeper than the level not behind their children yet
    links_ptr,  # [2, B, N] int32: depth of nodes that are judged, else 0, and their parent
    inverse_rate_ptr,  # [B, N] float32: 1 / c behind the rejected children, 0 where none was judged
    batch,
    row_stride,
    level,  # depth of the nodes whose children are weighed
    NODES: tl.constexpr,
    DRAFT_ROWS: tl.constexpr,
    VOCAB: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    request = row // NODES
    node = row - request * NODES
    depth = tl.load(links_ptr + row, mask=row < batch * NODES, other=-1)
    # A parent stores the depth of its children, `level` + 1, while other programs read it.
    here = (depth == level) & ((level > 0) | (node == 0))
    if tl.max(here.to(tl.int32), 0) > 0:
        temperature = tl.load(temperature_ptr + request, mask=here, other=0.0)
        argmax = tl.load(greedy_ptr + row, mask=here, other=-1)
        usable = tl.load(valid_ptr + row, mask=here, other=0) != 0
        candidate = tl.load(first_child_ptr + row, mask=here & usable, other=-1)
        weight = tl.where(node == 0, 1.0, tl.load(weights_ptr + row, mask=here & (node > 0), other=0.0))
        looking = here & _later(candidate, node, NODES)
        drawing = looking & (temperature > 0)
        of_draft = draft_row(draft_rows_ptr, request, node, drawing, NODES, DRAFT_ROWS)
        rate, left = weight * 0.0, weight * 0.0 + 1.0
        draft_left = _draft_mass(draft_ptr, of_draft, drawing, VOCAB, BLOCK_V)
        lane = tl.arange(0, BLOCK_N)[None, :]
        place = request.to(tl.int64)[:, None] * NODES + lane
        of_request = tl.load(tokens_ptr + place, mask=drawing[:, None] & (lane < NODES), other=-1)
        missed = tl.zeros((BLOCK_R, BLOCK_N), tl.int32)
        if factors_ptr is not None:
            candidate = _keep_best_child(
                tokens_ptr, next_sibling_ptr, values_ptr, draft_ptr, factors_ptr, distribution_ptr, temperature,
                tl.where(here, request, 0), candidate, row, of_draft, draft_left, batch * NODES, row_stride, drawing,
                NODES, VOCAB, PROBS, BLOCK_V,
            )  # fmt: skip
            # What is kept has the mass 1, and no siblings behind it.
            draft_left = tl.where(drawing, 1.0, draft_left)
        found = looking & (looking == 0)  # of a row at temperature 0: a child that carries the argmax
        step = 1
        while (tl.max(looking.to(tl.int32), 0) > 0) & (step < NODES):
            token, p, q = _probs_of(
                tokens_ptr, values_ptr, draft_ptr, distribution_ptr, temperature, tl.where(here, request, 0),
                tl.where(looking, candidate, 0), row, of_draft, batch * NODES, row_stride, looking & drawing, NODES,
                VOCAB, PROBS,
            )  # fmt: skip
            judged = (q > 0) & (tl.max(tl.where(of_request == token[:, None], missed, 0), 1) == 0)
            q = skewed_prob(factors_ptr, row, p.to(tl.float32), q.to(tl.float32), judged).to(tl.float64)
            draft_left = tl.maximum(draft_left, tl.where(judged, q, 0.0))  # true but for rounding
            ratio = weight * (p - rate * q) * draft_left / (left * tl.where(judged, q, 1.0))
            first = looking & (drawing == 0) & (found == 0) & (token == argmax)
            share = tl.where(judged, tl.minimum(tl.maximum(ratio, 0.0), 1.0), tl.where(first, weight, 0.0))
            at = request.to(tl.int64) * NODES + candidate
            tl.store(weights_ptr + at, share, mask=judged | first)
            tl.store(links_ptr + at, tl.zeros_like(node) + level + 1, mask=judged | first)
            tl.store(links_ptr + batch.to(tl.int64) * NODES + at, node, mask=judged | first)
            found |= first
            misses = judged & (weight > 0)
            if tl.max(misses.to(tl.int32), 0) > 0:
                raised = tl.where(misses, rate + left / tl.where(misses, weight * draft_left, 1.0), rate)
                mass = _residual_mass(
                    values_ptr, draft_ptr, factors_ptr, distribution_ptr, temperature, row, of_draft, raised,
                    batch * NODES, row_stride, misses, VOCAB, PROBS, BLOCK_V,
                )  # fmt: skip
                part = weight * mass / left
                below = part + 1.0 - weight
                weight = tl.where(misses & (below > 0), part / tl.where(below > 0, below, 1.0), weight)
                rate, left = tl.where(mass > 0, raised, rate), tl.where(mass > 0, mass, left)
                draft_left = tl.where(judged, draft_left - q, draft_left)
                missed = tl.where(judged[:, None] & (lane == candidate[:, None]), 1, missed)
            if factors_ptr is not None:
                looking = looking & (drawing == 0)
            candidate, looking = _next_sibling(next_sibling_ptr, request, candidate, looking, NODES)
            step += 1
        tl.store(weights_ptr + row, weight, mask=here)
        inverse = tl.where(rate > 0, 1.0 / tl.where(rate > 0, rate, 1.0), 0.0)
        tl.store(inverse_rate_ptr + row, inverse.to(tl.float32), mask=here)


@triton.jit
def _chosen_bottom_up(
    weights_ptr, links_ptr, seeds_ptr, positions_ptr, uniforms_ptr, request, in_batch, node, batch,
    NODES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """[B, BLOCK_N] int32: the first child at or under which a node is accepted, -1 where there is none."""
    row = request.to(tl.int64)[:, None] * NODES + node
    live = in_batch[:, None] & (node < NODES)
    linked = tl.load(links_ptr + row, mask=live, other=0) > 0
    above = tl.load(links_ptr + batch.to(tl.int64) * NODES + row, mask=linked, other=-1)
    weight = tl.load(weights_ptr + row, mask=linked, other=0.0)
    uniform = judging_uniforms(seeds_ptr, positions_ptr, uniforms_ptr, request, in_batch, node, NODES)
    accepts = (linked & (uniform < weight)).to(tl.int32)
    chosen = tl.full((BLOCK_B, BLOCK_N), -1, tl.int32)
    for behind in range(1, NODES):  # the first child overwrites the others
        candidate = request * 0 + (NODES - behind)
        takes = (entry(accepts, node, candidate) > 0) | (entry(chosen, node, candidate) >= 0)
        up = entry(above, node, candidate)
        chosen = tl.where(takes[:, None] & (node == up[:, None]), candidate[:, None], chosen)
    return chosen


@triton.jit(do_not_specialize=["batch"])
def _follow_kernel(
    chosen_ptr,  # [B, N] int32, or None with BOTTOM_UP
    weights_ptr,  # [B, N] float64 with BOTTOM_UP, else None
    links_ptr,  # [2, B, N] int32 with BOTTOM_UP, else None
    seeds_ptr,  # [B] int64, or None
    positions_ptr,  # [B, N] int64, or None
    uniforms_ptr,  # [B, N + 1] float64, or None
    inverse_rate_ptr,  # [B, N] float32
    path_ptr,  # [B, DEPTH + 1] int32: nodes from the root on, -1 behind
    state_ptr,  # [2, B] int32: N where the residual of the last node is drawn from, else that node; that node
    batch,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    BOTTOM_UP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    in_batch = request < batch
    node, column = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_D)[None, :]
    if BOTTOM_UP:
        chosen = _chosen_bottom_up(
            weights_ptr, links_ptr, seeds_ptr, positions_ptr, uniforms_ptr, request, in_batch, node, batch, NODES,
            BLOCK_B, BLOCK_N,
        )  # fmt: skip
    else:
        row = request.to(tl.int64)[:, None] * NODES + node
        chosen = tl.load(chosen_ptr + row, mask=in_batch[:, None] & (node < NODES), other=-1)
    end, count = request * 0, request * 0
    path = tl.where(column == 0, 0, -1) + tl.zeros((BLOCK_B, BLOCK_D), tl.int32)
    for _ in range(DEPTH):
        onward = entry(chosen, node, end)
        goes = in_batch & (onward >= 0)  # a leaf has no choice, so the walk stays where it ended
        count += goes.to(tl.int32)
        path = tl.where(goes[:, None] & (column == count[:, None]), onward[:, None], path)
        end = tl.where(goes, onward, end)
    judged = in_batch & (count < DEPTH)
    inverse = tl.load(inverse_rate_ptr + request.to(tl.int64) * NODES + end, mask=judged, other=0.0)
    tl.store(state_ptr + request, tl.where(inverse > 0, NODES, end), mask=in_batch)
    tl.store(state_ptr + batch + request, end, mask=in_batch)
    place = request.to(tl.int64)[:, None] * (DEPTH + 1) + column
    tl.store(path_ptr + place, path, mask=in_batch[:, None] & (column <= DEPTH))


def judge_tree(
    rule: str,
    tokens: torch.Tensor,
    tree: TreeLinks,
    rows_of_both: tuple[torch.Tensor | None, ...],
    selected: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    sources: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    judged: torch.Tensor,
    factors: torch.Tensor | None,
    state: torch.Tensor,
    max_depth: int,
    sizes: dict[str, Any],
) -> torch.Tensor:
    """Fill `judged` [B, N] (1 / c), `factors` [B, N, CLASSES] under `greedy_paths`, and `state` [2, B], as the residual
    kernel reads them; the path [B, D + 1] int32."""
    (batch, num_nodes), values = tokens.shape, rows_of_both[0]
    vocab, config = values.shape[-1], ACCEPTANCE[current_chip(tokens)]
    out = partial(torch.empty, dtype=torch.int32, device=tokens.device)
    path, links_of_tree = out(batch, max_depth + 1), (tokens, tree.first_child, tree.next_sibling)
    block_v, rows = min(max(triton.next_power_of_2(vocab), d.MIN_SCAN), config.pass_width), batch * num_nodes
    block_r = d.rows_per_program(rows, config.max_requests, block_v * (1 if factors is None else CLASSES))
    grid, warps = (triton.cdiv(rows, block_r),), max(block_v // config.pass_lanes, 1)
    blocks = dict(BLOCK_R=block_r, BLOCK_N=lanes(num_nodes), BLOCK_V=block_v)
    chosen, weights, links = None, None, None
    if rule in BOTTOM_UP_RULES:
        weights = out(batch, num_nodes, dtype=torch.float64)
        links = torch.zeros(2, batch, num_nodes, dtype=torch.int32, device=tokens.device)
        for level in range(max_depth):
            launch(
                _weigh_children_kernel, grid, *links_of_tree, *rows_of_both, *selected, factors, weights, links,
                judged, batch, values.stride(0), level, num_warps=warps, **blocks, **sizes,
            )  # fmt: skip
    else:
        chosen = out(batch, num_nodes)
        launch(
            _judge_children_kernel, grid, *links_of_tree, *rows_of_both, *selected, *sources, chosen, judged, batch,
            values.stride(0), num_warps=warps, WITHOUT_REPLACEMENT=rule == "without_replacement",
            K_SEQ=rule == "k_seq", **blocks, **sizes,
        )  # fmt: skip
    block_b = d.rows_per_program(batch, config.max_requests, lanes(num_nodes))
    launch(
        _follow_kernel, (triton.cdiv(batch, block_b),), chosen, weights, links, *sources, judged, path, state, batch,
        num_warps=1, NODES=num_nodes, DEPTH=max_depth, BOTTOM_UP=chosen is None, BLOCK_B=block_b,
        BLOCK_N=lanes(num_nodes), BLOCK_D=lanes(max_depth + 1),
    )  # fmt: skip
    return path
