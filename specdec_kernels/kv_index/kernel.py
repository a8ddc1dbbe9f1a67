"""Page-table arithmetic and the move of accepted paths on the device.

Ragged results are filled by output place: one program sums the sizes of all requests, then every lane finds the owner
of its place by bisection. A move reads all its sources for a slice of the features before it writes any of them, and
programs own different features or different pages, so no program reads what another writes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.kv_index.types import (
    CHUNK_UNIT,
    INT64_MAX,
    FlashAttentionIndices,
    FlashInferChunks,
    FlashInferIndices,
    LevelSlots,
)
from specdec_kernels.launch import CHIPS, current_chip, lanes, launch


@dataclass(frozen=True)
class KvIndexConfig:
    flat_block: int = 512  # lanes of a program over a flat output
    scan_block: int = 2048  # entries summed at once by the one scanning program
    move_requests: int = 1  # requests that a program moves
    move_budget: int = 4096  # elements that a program holds while moving
    num_warps: int = 4


# In the interpreter, only the number of programs costs.
CONFIGS = dict.fromkeys(CHIPS, KvIndexConfig()) | {
    "interpreter": KvIndexConfig(1 << 12, 1 << 14, move_requests=1 << 10, move_budget=1 << 18, num_warps=1)
}


@triton.jit(do_not_specialize=["entries", "capacity", "limit", "stride"])
def _running_sums_kernel(
    counts_ptr,  # [entries / REPEAT] int
    sums_ptr,  # [programs, >= entries + 1] int
    entries,
    capacity,
    limit,
    stride,
    REPEAT: tl.constexpr,
    ADD: tl.constexpr,
    GROWTH: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    step = tl.program_id(0).to(tl.int64)
    sums_ptr += step * stride
    lane = tl.arange(0, BLOCK)
    tl.store(sums_ptr + lane, lane * 0, mask=lane < 1)
    before = step * 0
    for first in range(0, entries, BLOCK):
        entry = first + lane
        count = tl.load(counts_ptr + entry // REPEAT, mask=entry < entries, other=0).to(tl.int64)
        count = tl.minimum(tl.maximum(count, 0), limit)
        size = (count + ADD + step + GROWTH * (entry % REPEAT) + UNIT - 1) // UNIT
        ends = tl.minimum(before + tl.cumsum(size, 0), capacity)
        tl.store(sums_ptr + 1 + entry, ends, mask=entry < entries)
        before += tl.sum(size, 0)


@triton.jit
def owning_row(sums_ptr, place, rows, live):
    """Owner of each place: the first row with sums[row + 1] > place, `rows` where there is none."""
    # Invariant: rows below `low` end at or before the place, rows from `high` on end after it.
    low = (place * 0).to(tl.int32)
    high = low + rows
    span = rows
    while span > 0:
        middle = (low + high) // 2
        open_ = live & (low < high)
        past = open_ & (tl.load(sums_ptr + middle + 1, mask=open_, other=0) <= place)
        high = tl.where(past | (low >= high), high, middle)
        low = tl.where(past, middle + 1, low)
        span = span // 2
    return low


@triton.jit
def _page_slot(table_ptr, request, position, live, ROW_PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """KV slot of each position, -1 where not `live`, outside the table or on a page that is not held."""
    inside = live & (position >= 0) & (position < ROW_PAGES * PAGE_SIZE)
    place = tl.where(inside, position, 0)
    page = tl.load(table_ptr + request.to(tl.int64) * ROW_PAGES + place // PAGE_SIZE, mask=inside, other=-1)
    return tl.where(page >= 0, page.to(tl.int64) * PAGE_SIZE + place % PAGE_SIZE, -1)


@triton.jit
def _held(lengths_ptr, request, live, ROOM: tl.constexpr):
    """Tokens of a request that its row of the table, of `ROOM` tokens, has room for."""
    length = tl.load(lengths_ptr + request, mask=live, other=0)
    return tl.minimum(tl.maximum(length, 0), ROOM)


@triton.jit(do_not_specialize=["total", "width"])
def _token_slots_kernel(
    table_ptr,  # [B, ROW_PAGES] int32
    start_ptr,  # [B] int64
    counts_ptr,  # [B] int32
    slots_ptr,  # [B, width] int64
    total,  # B * width
    width,  # not specialised: in a prefill it is the longest prompt
    ROW_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_out = place < total
    request, column = place // width, place % width
    wanted = in_out & (column < tl.load(counts_ptr + request, mask=in_out, other=0))
    position = tl.load(start_ptr + request, mask=in_out, other=0) + column
    tl.store(slots_ptr + place, _page_slot(table_ptr, request, position, wanted, ROW_PAGES, PAGE_SIZE), mask=in_out)


@triton.jit(do_not_specialize=["batch", "total", "first"])
def _level_slots_kernel(
    table_ptr,  # [B, ROW_PAGES] int32
    lengths_ptr,  # [B] int64
    active_ptr,  # [B] int32
    levels,  # LevelSlots, written; levels begin at multiples of 16 bytes
    batch,
    total,  # levels * B * WIDTH
    first,
    WIDTH: tl.constexpr,
    ROW_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_out = place < total
    group, column = place // WIDTH, place % WIDTH
    level, request = group // batch, group % batch
    active = tl.load(active_ptr + request, mask=in_out, other=0)
    start = tl.load(lengths_ptr + request, mask=in_out, other=0) + first
    slot = _page_slot(table_ptr, request, start + level * WIDTH + column, in_out & (active > 0), ROW_PAGES, PAGE_SIZE)
    at = place + level * (batch * WIDTH % 2)
    tl.store(levels.slots + at, slot, mask=in_out)
    tl.store(levels.positions + at, start + level, mask=in_out)
    tl.store(levels.counts + request, active * WIDTH, mask=in_out & (level == 0) & (column == 0))


@triton.jit(do_not_specialize=["batch", "entries"])
def _flat_pages_kernel(
    table_ptr,  # [B, ROW_PAGES] int32
    lengths_ptr,  # [B] int64
    out,  # FlashInferIndices, whose `indptr` is given
    batch,
    entries,
    ROW_PAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = _held(lengths_ptr, place, place < batch, COLUMNS * PAGE_SIZE)
    last_page_len = tl.where(held > 0, (tl.maximum(held, 1) - 1) % PAGE_SIZE + 1, 0)
    tl.store(out.last_page_len + place, last_page_len.to(tl.int32), mask=place < batch)
    in_out = place < entries
    row = owning_row(out.indptr, place, batch, in_out)
    found = in_out & (row < batch)
    column = place - tl.load(out.indptr + row, mask=found, other=0)
    page = tl.load(table_ptr + row.to(tl.int64) * ROW_PAGES + column, mask=found & (column < ROW_PAGES), other=0)
    tl.store(out.indices + place, tl.maximum(page, 0), mask=in_out)


@triton.jit(do_not_specialize=["batch", "tiles", "rows", "limit"])
def _chunks_kernel(
    keys_ptr,  # [B] int64
    out,  # FlashInferChunks
    batch,
    tiles,
    rows,
    limit,
    MOST: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.arange(0, BLOCK_B)
    live = request < batch
    keys = tl.minimum(tl.load(keys_ptr + request, mask=live, other=0), limit).to(tl.int32)
    size = (tl.max(keys, 0) + MOST * UNIT - 1) // (MOST * UNIT) * UNIT
    tl.store(out.size + request, size + request * 0, mask=request < 1)
    chunks = (keys + size - 1) // size
    end = rows * tl.cumsum(chunks, 0)
    begin = end - rows * chunks
    tl.store(out.begins + request, begin, mask=live)
    tl.store(out.begins + request + 1, end, mask=request == batch - 1)
    tl.store(out.ends + request, request * 0, mask=request < 1)
    for row in range(1, rows + 1):
        tl.store(out.ends + request * rows + row, begin + row * chunks, mask=live)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        owner = tl.load(out.request + tile, mask=tile < tiles, other=-1)
        held = tl.minimum(tl.load(keys_ptr + owner, mask=owner >= 0, other=0), limit).to(tl.int32)
        runs = tl.load(out.chunk + tile, mask=tile < tiles, other=0) * size < held
        tl.store(out.runs + tile, runs.to(tl.uint8), mask=tile < tiles)


@triton.jit(do_not_specialize=["request_bytes", "nodes"])
def _packed_mask_kernel(
    mask_ptr,  # [B, nodes, WORDS] int64
    lengths_ptr,  # [B] int64
    keys_ptr,  # [B] int64
    depths_ptr,  # [B, SLOTS] int32, read if there is a window and SLOTS > 0
    row_depths_ptr,  # [B, nodes] int32, the same
    out_ptr,  # [B, request_bytes] uint8
    request_bytes,
    nodes,
    WORDS: tl.constexpr,
    SLOTS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    byte = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length, keys = tl.load(lengths_ptr + request).to(tl.int32), tl.load(keys_ptr + request).to(tl.int32)
    packed = tl.zeros([BLOCK], tl.int32)
    for bit in tl.static_range(8):
        row, slot = (byte * 8 + bit) // keys, (byte * 8 + bit) % keys - length
        used = row < nodes
        drafted = used & (slot >= 0) & (slot < 64 * WORDS)
        word = tl.load(mask_ptr + (request * nodes + row) * WORDS + slot // 64, mask=drafted, other=0)
        seen = used & ((slot < 0) | ((word >> (slot % 64)) & 1 != 0))
        if WINDOW is not None:
            at, key = row, slot
            if SLOTS > 0:
                at = tl.load(row_depths_ptr + request * nodes + row, mask=used, other=0)
                by_depth = tl.load(depths_ptr + request * SLOTS + slot, mask=drafted & (slot < SLOTS), other=0)
                key = tl.where(slot < 0, slot, by_depth)
            seen = seen & (at - key < WINDOW)
        packed = packed | (seen.to(tl.int32) << bit)
    tl.store(out_ptr + request * request_bytes + byte, packed.to(tl.uint8), mask=byte < request_bytes)


@triton.jit(do_not_specialize=["total"])
def _attention_table_kernel(
    table_ptr,  # [B, ROW_PAGES] int32
    lengths_ptr,  # [B] int64
    out,  # FlashAttentionIndices, written
    total,  # B * max(ROW_PAGES, 1)
    ROW_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_out = place < total
    # A table without columns still has lengths to write: as if it had one column.
    request, column = place // max(ROW_PAGES, 1), place % max(ROW_PAGES, 1)
    held = _held(lengths_ptr, request, in_out, ROW_PAGES * PAGE_SIZE)
    used = in_out & (column * PAGE_SIZE < held)
    page = tl.load(table_ptr + place, mask=used, other=0)
    tl.store(out.page_table + place, page, mask=in_out & (column < ROW_PAGES))
    tl.store(out.seqused_k + request, held.to(tl.int32), mask=in_out & (column == 0))


@triton.jit(do_not_specialize=["batch"])
def _move_kernel(
    kv_ptr,  # [PLANES, pages * PAGE_SIZE, ROW]: a plane is (layer, key or value), a row all heads
    table_ptr,  # [B, ROW_PAGES] int32
    lengths_ptr,  # [B] int64
    nodes_ptr,  # [B, PATH] int32
    batch,
    plane_stride,
    PATH: tl.constexpr,
    PLANES: tl.constexpr,
    ROW: tl.constexpr,
    ROW_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    entry = tl.arange(0, BLOCK_B * BLOCK_J)
    request, step = tl.program_id(0) * BLOCK_B + entry // BLOCK_J, entry % BLOCK_J
    on_path = (request < batch) & (step < PATH)
    node = tl.load(nodes_ptr + request.to(tl.int64) * PATH + step, mask=on_path, other=-1)
    length = tl.load(lengths_ptr + request, mask=on_path, other=0)
    moves = on_path & (node >= 0) & (node != step)
    source = _page_slot(table_ptr, request, length + node, moves, ROW_PAGES, PAGE_SIZE)
    target = _page_slot(table_ptr, request, length + step, moves, ROW_PAGES, PAGE_SIZE)
    moves = moves & (source >= 0) & (target >= 0)
    feature = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    within = ((feature // ROW).to(tl.int64) * plane_stride + feature % ROW)[None, :]
    live = moves[:, None] & (feature < PLANES * ROW)[None, :]
    values = tl.load(kv_ptr + source[:, None] * ROW + within, mask=live, other=0.0)
    tl.debug_barrier()  # one lane's target may be another lane's source
    tl.store(kv_ptr + target[:, None] * ROW + within, values, mask=live)


def running_sums(
    counts: Tensor,
    out: Tensor,
    *,
    capacity: int = INT64_MAX,
    limit: int = INT64_MAX,
    repeat: int = 1,
    add: int = 0,
    growth: int = 0,
    unit: int = 1,
) -> Tensor:
    """Exclusive sums of sequence sizes, then the total, into `out` [E + 1] or, per step, [steps, >= E + 1].

    Each count stands for `repeat` sequences. Sequence r of a count c has in step s the size
    ceil((min(max(c, 0), limit) + add + s + growth * r) / unit). No sum is larger than `capacity`.
    """
    entries, config = counts.shape[0] * repeat, CONFIGS[current_chip(counts)]
    steps, stride = (out.shape[0], out.stride(0)) if out.dim() == 2 else (1, 0)
    launch(
        _running_sums_kernel, (steps,), counts, out, entries, capacity, limit, stride, num_warps=config.num_warps,
        REPEAT=repeat, ADD=add, GROWTH=growth, UNIT=unit, BLOCK=lanes(entries, config.scan_block),
    )  # fmt: skip
    return out


def token_slots(page_table: Tensor, start: Tensor, counts: Tensor, width: int, page_size: int) -> Tensor:
    batch, row_pages = page_table.shape
    slots = torch.empty(batch, width, dtype=torch.int64, device=page_table.device)
    total, config = batch * width, CONFIGS[current_chip(page_table)]
    # One block for every width: prompts differ in length, and each block would be compiled.
    launch(
        _token_slots_kernel, (triton.cdiv(total, config.flat_block),), page_table, start, counts, slots, total, width,
        num_warps=config.num_warps, ROW_PAGES=row_pages, PAGE_SIZE=page_size, BLOCK=config.flat_block,
    )  # fmt: skip
    return slots


def level_slots(
    page_table: Tensor, lengths: Tensor, active: Tensor, levels: int, width: int, page_size: int, first: int
) -> LevelSlots:
    batch, row_pages = page_table.shape
    if levels == 0:
        nothing = lengths.new_empty(0, batch, width)
        return LevelSlots(nothing, nothing.clone(), active * width)
    # Each level is used by itself: all begin at a multiple of 16 bytes, so that kernels are compiled for one alignment.
    size = batch * width
    slots, positions = (
        lengths.new_empty(levels, size + size % 2)[:, :size].unflatten(1, (batch, width)) for _ in range(2)
    )
    found = LevelSlots(slots, positions, torch.empty_like(active))
    total, config = levels * size, CONFIGS[current_chip(page_table)]
    launch(
        _level_slots_kernel, (triton.cdiv(total, config.flat_block),), page_table, lengths, active, found, batch,
        total, first, num_warps=config.num_warps, WIDTH=width, ROW_PAGES=row_pages, PAGE_SIZE=page_size,
        BLOCK=config.flat_block,
    )  # fmt: skip
    return found


def flashinfer_indices(
    page_table: Tensor, lengths: Tensor, page_size: int, columns: int, out: FlashInferIndices
) -> None:
    batch, entries = page_table.shape[0], out.indices.shape[0]
    running_sums(lengths, out.indptr, limit=columns * page_size, unit=page_size)
    total, config = max(entries, batch), CONFIGS[current_chip(page_table)]
    block = lanes(total, config.flat_block)
    launch(
        _flat_pages_kernel, (triton.cdiv(total, block),), page_table, lengths, out, batch, entries,
        num_warps=config.num_warps, ROW_PAGES=page_table.shape[1], COLUMNS=columns, PAGE_SIZE=page_size, BLOCK=block,
    )  # fmt: skip


def flashinfer_chunks(keys: Tensor, most: int, out: FlashInferChunks, limit: int) -> None:
    batch, tiles, config = len(keys), len(out.request), CONFIGS[current_chip(keys)]
    launch(
        _chunks_kernel, (1,), keys, out, batch, tiles, (len(out.ends) - 1) // batch, limit,
        num_warps=config.num_warps, MOST=most, UNIT=CHUNK_UNIT, BLOCK_B=triton.next_power_of_2(batch),
        BLOCK=lanes(tiles, config.flat_block),
    )  # fmt: skip


def flashinfer_mask(
    mask: Tensor,
    lengths: Tensor,
    keys: Tensor,
    window: int | None,
    depths: Tensor | None,
    row_depths: Tensor | None,
    out: Tensor,
) -> None:
    (batch, nodes, words), request_bytes = mask.shape, out.shape[1]
    config = CONFIGS[current_chip(mask)]
    block = lanes(request_bytes, config.flat_block)
    launch(
        _packed_mask_kernel, (triton.cdiv(request_bytes, block), batch), mask, lengths, keys, depths, row_depths, out,
        request_bytes, nodes, num_warps=config.num_warps, WORDS=words,
        SLOTS=0 if depths is None else depths.shape[1], WINDOW=window, BLOCK=block,
    )  # fmt: skip


def flash_attention_table(page_table: Tensor, lengths: Tensor, page_size: int) -> FlashAttentionIndices:
    batch, row_pages = page_table.shape
    out = FlashAttentionIndices(
        torch.empty_like(page_table), torch.empty(batch, dtype=torch.int32, device=page_table.device)
    )
    total, config = batch * max(row_pages, 1), CONFIGS[current_chip(page_table)]
    block = lanes(total, config.flat_block)
    launch(
        _attention_table_kernel, (triton.cdiv(total, block),), page_table, lengths, out, total,
        num_warps=config.num_warps, ROW_PAGES=row_pages, PAGE_SIZE=page_size, BLOCK=block,
    )  # fmt: skip
    return out


def move_accepted(kv: Tensor, page_table: Tensor, lengths: Tensor, nodes: Tensor) -> None:
    layers, sides, pages, page_size, heads, dim = kv.shape
    batch, path = nodes.shape
    planes, row = layers * sides, heads * dim
    if kv.numel() == 0 or nodes.numel() == 0:
        return
    config = CONFIGS[current_chip(kv)]
    block_j = lanes(path)
    block_b = min(triton.next_power_of_2(batch), config.move_requests)
    block_f = lanes(planes * row, max(16, config.move_budget // (block_b * block_j)))
    launch(
        _move_kernel, (triton.cdiv(batch, block_b), triton.cdiv(planes * row, block_f)), kv, page_table,
        lengths, nodes, batch, pages * page_size * row, num_warps=config.num_warps, PATH=path, PLANES=planes,
        ROW=row, ROW_PAGES=page_table.shape[1], PAGE_SIZE=page_size, BLOCK_B=block_b, BLOCK_J=block_j,
        BLOCK_F=block_f,
    )  # fmt: skip
