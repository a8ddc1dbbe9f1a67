"""The tile schedule: a stable counting sort by expert, built on the device.

Every program counts the ids of all experts and writes the rows and items of its own experts, so no program waits for
another. Two passes over at most a few thousand ids: the first counts, the second ranks.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.experts.configs import ROUTE
from specdec_kernels.experts.types import ExpertSchedule, max_items
from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.pdl import begin

_LEAST_IDS = 32
"""Triton 3.6 compiles no histogram of 16 elements."""


@triton.jit
def _load_ids(experts_ptr, place, count, EXPERTS: tl.constexpr):
    """Experts of assignments, EXPERTS for none, EXPERTS + 1 after the last assignment."""
    id = tl.load(experts_ptr + place, mask=place < count, other=0)
    id = tl.where((id >= 0) & (id < EXPERTS), id, EXPERTS)
    return tl.where(place < count, id, EXPERTS + 1)


@triton.jit
def _write_order(order_ptr, experts_ptr, own, start, count, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """The assignments of the experts `own` [OWN], each from its `start` on."""
    for first in tl.range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        mine = _load_ids(experts_ptr, place, count, EXPERTS)[:, None] == own[None, :]
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        at = start[None, :] + rank
        # An expert past the sentinel owns the lanes past the last assignment.
        mine = mine & (place < count)[:, None]
        tl.store(order_ptr + at, place[:, None] + 0 * at, mask=mine)
        start += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def _write_items(items_ptr, own, start, end, item, tiles, ROWS: tl.constexpr, ITEMS: tl.constexpr):
    """The items of the experts `own` [OWN], each from its number `item` on."""
    lane = tl.arange(0, ITEMS)[:, None]
    for first in tl.range(0, tl.max(tiles, 0), ITEMS):
        nth = first + lane
        entry = items_ptr + (item[None, :] + nth) * 3
        here = nth < tiles[None, :]
        row = start[None, :] + nth * ROWS
        tl.store(entry, own[None, :] + 0 * nth, mask=here)
        tl.store(entry + 1, row, mask=here)
        tl.store(entry + 2, tl.minimum(row + ROWS, end[None, :]), mask=here)


@triton.jit(do_not_specialize=["count", "capacity"])
def _schedule_kernel(
    experts_ptr,  # [count] int32
    schedule,  # ExpertSchedule without its row tile, written
    count,
    capacity,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    ITEMS: tl.constexpr,
    PDL: tl.constexpr,
):
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    bin = tl.arange(0, BINS)
    begin(PDL)
    counts = tl.zeros([BINS], tl.int32)
    for first in tl.range(0, count, BLOCK):
        counts += tl.histogram(_load_ids(experts_ptr, first + tl.arange(0, BLOCK), count, EXPERTS), BINS)
    tiles = tl.where(bin < EXPERTS, (counts + ROWS - 1) // ROWS, 0)
    before, mine = bin[:, None] < own[None, :], bin[:, None] == own[None, :]
    start = tl.sum(tl.where(before, counts[:, None], 0), 0)
    own_count = tl.sum(tl.where(mine, counts[:, None], 0), 0)
    own_tiles = tl.sum(tl.where(mine, tiles[:, None], 0), 0)
    item = tl.sum(tl.where(before, tiles[:, None], 0), 0)
    tl.store(schedule.starts + own, start, mask=own <= EXPERTS)
    total = tl.sum(tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(schedule.num_items, total)
        tl.store(schedule.num_touched, tl.sum(tl.where(bin < EXPERTS, (counts > 0).to(tl.int32), 0), 0))
    _write_order(schedule.order, experts_ptr, own, start, count, EXPERTS, BLOCK)
    _write_items(schedule.items, own, start, start + own_count, item, own_tiles, ROWS, ITEMS)
    lane = tl.arange(0, ITEMS)
    for first in tl.range(total + tl.program_id(0) * ITEMS, capacity, tl.num_programs(0) * ITEMS):
        entry, here = schedule.items + (first + lane) * 3, first + lane < capacity
        tl.store(entry, EXPERTS + 0 * lane, mask=here)
        tl.store(entry + 1, 0 * lane, mask=here)
        tl.store(entry + 2, 0 * lane, mask=here)


def empty_schedule(experts: Tensor, num_experts: int, row_tile: int) -> ExpertSchedule:
    """Of assignments [T, K], not written yet."""
    sizes = (experts.numel(),), (num_experts + 1,), (max_items(experts.numel(), num_experts, row_tile), 3), (1,), (1,)
    return ExpertSchedule(*(experts.new_empty(size) for size in sizes), row_tile)


def schedule_experts(experts: Tensor, num_experts: int, row_tile: int) -> ExpertSchedule:
    count, config = experts.numel(), ROUTE[current_chip(experts)]
    schedule = empty_schedule(experts, num_experts, row_tile)
    launch(
        _schedule_kernel,
        (triton.cdiv(num_experts + 1, config.experts),),
        *(experts, schedule._replace(row_tile=None), count, schedule.items.shape[0]),
        EXPERTS=num_experts,
        ROWS=row_tile,
        OWN=config.experts,
        BLOCK=lanes(max(count, _LEAST_IDS), config.ids),
        BINS=lanes(num_experts + 2),
        ITEMS=config.items,
    )
    return schedule
