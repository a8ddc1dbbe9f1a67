"""Routing: a program takes the logits of a few rows whole. Experts are chosen in rounds of (largest, lowest expert).

Rows so few that no expert can have two items are one program, which writes the schedule too: the place of an assignment
is the number of assignments of lower experts, and of the same expert in rows before.

Choices are compared as integers that order as the floats do, so that an expert that was chosen, or whose group was
not, ranks after one with -inf.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.experts.configs import FEW_ROWS, ROUTE, row_tile_of
from specdec_kernels.experts.kernel_schedule import empty_schedule, schedule_experts
from specdec_kernels.experts.types import ExpertSchedule, Routed, Routing
from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.pdl import begin
from specdec_kernels.sampling.device import finite, sort_key, usable

_TAKEN = tl.constexpr(-(1 << 31))  # below the key of -inf
_NO_LANE = tl.constexpr((1 << 31) - 1)


@triton.jit
def _first_largest(key, lane):
    """[T]: the lowest lane with the largest key of each row."""
    return tl.min(tl.where(key == tl.max(key, 1)[:, None], lane[None, :], _NO_LANE), 1)


@triton.jit
def _group_scores(
    choice, expert, GROUPS: tl.constexpr, SIZE: tl.constexpr, TWO_BEST: tl.constexpr, BLOCK_G: tl.constexpr
):
    """[T, BLOCK_G] keys of the groups' scores."""
    group = tl.arange(0, BLOCK_G)
    keys = tl.zeros([choice.shape[0], BLOCK_G], tl.int32) + _TAKEN
    for own in tl.range(0, GROUPS):
        member = tl.where((expert // SIZE == own)[None, :], choice, float("-inf"))
        score = tl.max(member, 1)
        if TWO_BEST:
            first = _first_largest(sort_key(member, 0), expert)
            score += tl.max(tl.where(expert[None, :] == first[:, None], float("-inf"), member), 1)
        keys = tl.where(group[None, :] == own, sort_key(score, 0)[:, None], keys)
    return keys


@triton.jit
def _in_best_groups(
    choice, expert, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, TWO_BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """[T, BLOCK_E]: whether the expert's group is among the KEPT best."""
    keys = _group_scores(choice, expert, GROUPS, SIZE, TWO_BEST, BLOCK_G)
    group = tl.arange(0, BLOCK_G)
    kept = choice != choice  # false
    for _ in tl.range(0, KEPT):
        best = _first_largest(keys, group)
        kept = kept | ((expert // SIZE)[None, :] == best[:, None])
        keys = tl.where(group[None, :] == best[:, None], _TAKEN, keys)
    return kept


@triton.jit
def _scores(logit, bias_ptr, expert, inside, SIGMOID: tl.constexpr):
    """(scores, choice) [T, BLOCK_E]."""
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
        choice = score
        if bias_ptr is not None:
            choice += tl.load(bias_ptr + expert, mask=inside, other=0.0)[None, :]
    else:
        exponential = tl.exp(logit - finite(tl.max(logit, 1))[:, None])
        score = exponential / tl.maximum(tl.sum(exponential, 1), 1.0)[:, None]
        choice = logit
    return score, choice


@triton.jit
def _ranks(key, expert, TOPK: tl.constexpr):
    """[T, BLOCK_E]: the place of each of the first TOPK experts in falling order of `key`, TOPK for the others."""
    rank = tl.zeros_like(key) + TOPK
    for place in tl.range(0, TOPK):
        taken = expert[None, :] == _first_largest(key, expert)[:, None]
        rank = tl.where(taken, place, rank)
        key = tl.where(taken, _TAKEN, key)
    return rank


@triton.jit
def _weights(value, chosen, OF_CHOSEN: tl.constexpr, RENORMALISE: tl.constexpr):
    """[T, BLOCK_E]: the weights of the `chosen` experts of scores, or of logits if OF_CHOSEN."""
    # No products with masks: -inf times zero would not be a number.
    if OF_CHOSEN:
        value = tl.where(chosen, value, float("-inf"))
        value = tl.exp(value - finite(tl.max(value, 1))[:, None])
        value /= tl.maximum(tl.sum(value, 1), 1.0)[:, None]
    if RENORMALISE:
        value /= (tl.sum(tl.where(chosen, value, 0.0), 1) + 1e-20)[:, None]
    return value


@triton.jit
def _write_schedule(
    order_ptr, starts_ptr, items_ptr, num_items_ptr, num_touched_ptr, chosen, rank, row, idle, capacity,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The schedule of rows so few that an expert has one item: `chosen` [T, BLOCK_E], and `idle` [T] without expert."""
    expert = tl.arange(0, BLOCK_E)
    took = chosen.to(tl.int32)
    counts = tl.sum(took, 0)
    start, total = tl.cumsum(counts, 0) - counts, tl.sum(counts, 0)
    assignment = row[:, None] * TOPK + rank
    before, idle_before = 0 * took, 0 * row
    if took.shape[0] > 1:
        before, idle_before = tl.cumsum(took, 0) - took, tl.cumsum(idle.to(tl.int32), 0) - idle.to(tl.int32)
    tl.store(order_ptr + start[None, :] + before, assignment, mask=chosen)
    last = total + idle_before[:, None] * TOPK + rank
    tl.store(order_ptr + last, assignment, mask=idle[:, None] & (rank < TOPK))
    tl.store(starts_ptr + expert, start, mask=expert < EXPERTS)
    tl.store(starts_ptr + EXPERTS, total)
    used = counts > 0
    touched = tl.sum(used.to(tl.int32), 0)
    tl.store(num_items_ptr, touched)
    tl.store(num_touched_ptr, touched)
    entry = items_ptr + (tl.cumsum(used.to(tl.int32), 0) - used.to(tl.int32)) * 3
    tl.store(entry, expert, mask=used)
    tl.store(entry + 1, start, mask=used)
    tl.store(entry + 2, start + counts, mask=used)
    for first in tl.range(0, capacity, BLOCK_E):
        rest = first + expert
        entry, here = items_ptr + rest * 3, (rest >= touched) & (rest < capacity)
        tl.store(entry, EXPERTS + 0 * rest, mask=here)
        tl.store(entry + 1, 0 * rest, mask=here)
        tl.store(entry + 2, 0 * rest, mask=here)


@triton.jit(do_not_specialize=["rows", "scale", "capacity"])
def _route_kernel(
    logits_ptr,  # [rows, EXPERTS]
    bias_ptr,  # [EXPERTS] float32, or None
    is_real_ptr,  # [rows] bool, or None
    out,  # Routed, written
    schedule,  # ExpertSchedule without its row tile, written, or None
    rows,
    capacity,
    scale,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    TWO_BEST: tl.constexpr,
    SIGMOID: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SCHEDULED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    row, expert = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
    there, inside = row < rows, expert < EXPERTS
    begin(PDL)
    at = row.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    logit = tl.load(logits_ptr + at, mask=there[:, None] & inside[None, :], other=float("-inf"))
    narrow = logit.dtype
    real = there
    if is_real_ptr is not None:
        real = tl.load(is_real_ptr + row, mask=there, other=0) != 0
    logit = usable(logit.to(tl.float32))
    score, choice = _scores(logit, bias_ptr, expert, inside, SIGMOID)
    key = tl.where(inside[None, :], sort_key(choice, 0), _TAKEN)
    if KEPT_GROUPS < GROUPS:
        choice = tl.where(inside[None, :], choice, float("-inf"))
        kept = _in_best_groups(choice, expert, GROUPS, EXPERTS // GROUPS, KEPT_GROUPS, TWO_BEST, BLOCK_G)
        key = tl.where(kept, key, _TAKEN)
    rank = _ranks(key, expert, TOPK)
    chosen = rank < TOPK
    weight = _weights(logit if OF_CHOSEN else score, chosen, OF_CHOSEN, RENORMALISE)
    weight = (weight * scale).to(narrow).to(tl.float32)
    at = row.to(tl.int64)[:, None] * TOPK + rank
    tl.store(out.experts + at, tl.where(real[:, None], expert[None, :], EXPERTS), mask=there[:, None] & chosen)
    tl.store(out.weights + at, tl.where(real[:, None], weight, 0.0), mask=there[:, None] & chosen)
    if SCHEDULED:
        idle = there & (real == 0)
        # Field by field, and not asked whether it is None: Triton 3.6 can do neither with a field of None.
        _write_schedule(
            schedule.order, schedule.starts, schedule.items, schedule.num_items, schedule.num_touched,
            chosen & real[:, None], rank, row, idle, capacity, EXPERTS, TOPK, BLOCK_E,
        )  # fmt: skip


def _empty(logits: Tensor, routing: Routing) -> Routed:
    shape, device = (logits.shape[0], routing.topk), logits.device
    return Routed(*(torch.empty(shape, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32)))


def _launch(
    logits: Tensor,
    routing: Routing,
    correction_bias: Tensor | None,
    is_real: Tensor | None,
    out: Routed,
    schedule: ExpertSchedule | None,
    block_rows: int,
) -> None:
    """Programs of `block_rows` rows; one, which has all rows, where it writes a schedule."""
    rows, experts = logits.shape
    capacity = 0 if schedule is None else schedule.items.shape[0]
    launch(
        _route_kernel,
        (triton.cdiv(rows, block_rows) if schedule is None else 1,),
        *(logits, correction_bias, is_real, out, schedule and schedule._replace(row_tile=None)),
        *(rows, capacity, float(routing.scale)),
        num_warps=max(1, min(8, block_rows * experts // 128)),
        EXPERTS=experts,
        TOPK=routing.topk,
        GROUPS=routing.groups,
        KEPT_GROUPS=routing.topk_groups,
        TWO_BEST=routing.group_score == "two_best",
        SIGMOID=routing.scoring == "sigmoid",
        OF_CHOSEN=routing.scoring == "softmax_of_chosen",
        RENORMALISE=routing.renormalise,
        SCHEDULED=schedule is not None,
        BLOCK_T=block_rows,
        BLOCK_E=lanes(experts),
        BLOCK_G=lanes(routing.groups),
    )


def route_experts(
    logits: Tensor, routing: Routing, correction_bias: Tensor | None = None, is_real: Tensor | None = None
) -> Routed:
    out, block_rows = _empty(logits, routing), min(ROUTE[current_chip(logits)].rows, lanes(logits.shape[0]))
    _launch(logits, routing, correction_bias, is_real, out, None, block_rows)
    return out


def route_and_schedule(
    logits: Tensor, routing: Routing, correction_bias: Tensor | None = None, is_real: Tensor | None = None
) -> tuple[Routed, ExpertSchedule]:
    rows, experts = logits.shape
    if rows > FEW_ROWS:
        routed = route_experts(logits, routing, correction_bias, is_real)
        return routed, schedule_experts(routed.experts, experts, row_tile_of(routed.experts, experts))
    routed = _empty(logits, routing)
    schedule = empty_schedule(routed.experts, experts, row_tile_of(routed.experts, experts))
    _launch(logits, routing, correction_bias, is_real, routed, schedule, 1 if rows == 1 else lanes(rows))
    return routed, schedule
