"""The tile schedule of a forward, built on the device: no length is read back, and all layers use it.

    item    (request, tile of query rows, split of the keys); a request without rows has none
    order   requests, then splits, then tiles with the last first: tiles of one split run together and read
            its keys from the cache, and the last tile of a causal prefill has the most keys

So a captured graph whose `max_length` is the whole context launches no more programs than the chip holds. Each program
sums the counts of the requests before its own, which replaces a scan over programs.

The slots that each row of a tree sees, in the order of the text, are planned here too, from the bits of its mask: the
place of a slot among those seen is the number of bits below its own.
"""

# mypy: ignore-errors
# ruff: noqa: SIM108
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.attention.device import Splits, key_end, split_layout, used_rows
from specdec_kernels.attention.types import AttentionMetadata, TileSchedule, WorkShape
from specdec_kernels.launch import lanes, launch

_ITEMS = 256  # entries written at once
# Lists of all levels begin at a multiple of 16 bytes, so that attention is compiled for one alignment.
_ALIGNED = tl.constexpr(4)


# More than 16 run-time arguments: those that say how the keys of a request are split.
@triton.jit(do_not_specialize=[*Splits._fields, "batch", "capacity", "length_step", "width_step"])
def _plan_kernel(
    lengths_ptr,  # [B] int64
    q_lens_ptr,  # [B] int32 or None
    items_ptr,  # [levels, capacity, 3] int32
    offsets_ptr,  # [levels, >= B + 1] int32
    num_items_ptr,  # [levels, >= 1] int32
    batch,
    capacity,
    num_nodes,
    num_slots,
    split_tokens,
    first_splits,
    longest_split,
    max_splits,
    max_length,
    window,
    length_step,
    width_step,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
    SPLIT: tl.constexpr,
    FIXED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ITEMS: tl.constexpr,
):
    own, level = tl.program_id(0), tl.program_id(1)
    num_slots += level * width_step
    items_ptr += level.to(tl.int64) * capacity * 3
    offsets_ptr += level * (batch // _ALIGNED + 1) * _ALIGNED
    num_items_ptr += level * _ALIGNED
    requests = tl.arange(0, BLOCK_B)
    there = requests < batch
    length = tl.load(lengths_ptr + requests, mask=there, other=0).to(tl.int32) + level * length_step
    used = tl.where(there, used_rows(q_lens_ptr, requests, num_nodes, there), 0)
    if SPLIT:
        end = key_end(length, used, num_slots, max_length, ALL_SLOTS)
        sizes = Splits(num_nodes, num_slots, split_tokens, first_splits, longest_split, max_splits, max_length, window)
        _, _, _, splits = split_layout(length, end, sizes, FIXED)
        tiles = (used * GROUP + BLOCK_M - 1) // BLOCK_M
    else:
        # Without a merge the items write the zeros of unused rows too.
        tiles = tl.where(there, (num_nodes * GROUP + BLOCK_M - 1) // BLOCK_M, 0)
        splits = tl.where(there, 1, 0)
    items = tiles * splits
    total = tl.sum(items, 0)
    start = tl.sum(tl.where(requests < own, items, 0), 0)
    own_items = tl.sum(tl.where(requests == own, items, 0), 0)
    own_tiles = tl.maximum(tl.sum(tl.where(requests == own, tiles, 0), 0), 1)
    tl.store(offsets_ptr + own, tl.sum(tl.where(requests < own, splits, 0), 0))
    if own == 0:
        tl.store(offsets_ptr + batch, tl.sum(splits, 0))
        tl.store(num_items_ptr, total)

    lanes = tl.arange(0, ITEMS)
    for first in tl.range(0, own_items, ITEMS):
        index = first + lanes
        entry = items_ptr + (start + index) * 3
        tl.store(entry, own + lanes * 0, mask=index < own_items)
        tl.store(entry + 1, own_tiles - 1 - index % own_tiles, mask=index < own_items)
        tl.store(entry + 2, index // own_tiles, mask=index < own_items)
    for first in tl.range(total + own * ITEMS, capacity, tl.num_programs(0) * ITEMS):
        entry = items_ptr + (first + lanes) * 3
        for field in tl.static_range(3):
            tl.store(entry + field, lanes * 0, mask=first + lanes < capacity)


def plan_levels(
    metadata: AttentionMetadata, works: Sequence[WorkShape], length_step: int, width_step: int
) -> tuple[TileSchedule, ...]:
    """`works` are alike but for `num_slots` and `num_splits`, either all with several splits or none."""
    lengths, work, levels = metadata.lengths, works[0], len(works)
    aligned = _ALIGNED.value
    capacities = [each.batch * each.num_splits * each.row_tiles for each in works]
    capacity = triton.cdiv(max(capacities), aligned) * aligned
    items = lengths.new_empty((levels, capacity, 3), dtype=torch.int32)
    offsets = lengths.new_empty((levels, (work.batch // aligned + 1) * aligned), dtype=torch.int32)
    num_items = lengths.new_empty((levels, aligned), dtype=torch.int32)
    launch(
        _plan_kernel,
        (max(1, work.batch), levels),
        *(lengths, metadata.q_lens, items, offsets, num_items, work.batch, capacity, work.num_nodes, *work.sizes),
        *(length_step, width_step),
        GROUP=work.group,
        BLOCK_M=work.block_m,
        ALL_SLOTS=work.all_slots,
        SPLIT=work.num_splits > 1,
        FIXED=work.fixed_splits,
        BLOCK_B=max(2, triton.next_power_of_2(work.batch)),
        ITEMS=_ITEMS,
    )
    return tuple(
        TileSchedule(items[level, :used], offsets[level, : each.batch + 1], num_items[level, :1], each)
        for level, (used, each) in enumerate(zip(capacities, works, strict=True))
    )


@triton.jit(do_not_specialize=["most"])
def _paths_kernel(
    mask_ptr,  # [rows, WORDS] int64
    paths_ptr,  # [rows, most] int32
    most,
    WORDS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    words = tl.load(mask_ptr + row * WORDS + slot // 64, mask=slot < WORDS * 64, other=0)
    seen = ((words >> (slot % 64).to(tl.int64)) & 1).to(tl.int32)
    place = tl.cumsum(seen, 0) - 1
    count = tl.sum(seen, 0)
    tl.store(paths_ptr + row * most + place, slot, mask=(seen != 0) & (place < most))
    for first in tl.range(0, most, BLOCK):
        column = first + tl.arange(0, BLOCK)
        tl.store(paths_ptr + row * most + column, column * 0 - 1, mask=(column >= count) & (column < most))


def mask_paths(mask: Tensor, most: int) -> Tensor:
    batch, nodes, words = mask.shape
    paths = mask.new_empty((batch, nodes, most), dtype=torch.int32)
    launch(
        _paths_kernel,
        (batch * nodes,),
        *(mask, paths, most),
        num_warps=1,
        WORDS=words,
        SLOTS=triton.next_power_of_2(words * 64),
        BLOCK=lanes(most, 64),
    )
    return paths
