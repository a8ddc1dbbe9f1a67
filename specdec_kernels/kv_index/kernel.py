"""Paged-KV index arithmetic on the device.

`flashinfer_indices` runs a running sum of page counts in one program, then fills the flat array by output
place: every lane finds its row by bisection of the sum, so stores are dense, every place is written, and no
row waits for another. `move_accepted` reads a request's whole path for a slice of the features before it
writes any of it; since source and target may be the same slot for different lanes, a barrier stands between.
Different programs of one request own different features, and different requests own different pages, so no
program reads what another writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specdec_kernels.kv_index.types import FlashAttentionIndices, FlashInferIndices
from specdec_kernels.launch import current_chip, launch


@dataclass(frozen=True)
class IndexConfig:
    flat_block: int  # lanes of a program over a flat output
    scan_block: int  # rows summed at once by the one scanning program
    move_requests: int  # requests a program moves
    move_budget: int  # elements a program holds while moving
    num_warps: int


_GPU = IndexConfig(flat_block=1024, scan_block=1024, move_requests=1, move_budget=4096, num_warps=4)
# The interpreter pays by the program, not by the lane.
_CONFIGS = {
    "sm80": _GPU,
    "sm90": _GPU,
    "sm100": _GPU,
    "gfx942": _GPU,
    "interpreter": IndexConfig(
        flat_block=1 << 18, scan_block=1 << 14, move_requests=1 << 10, move_budget=1 << 18, num_warps=1
    ),
}


@triton.jit
def _slot(table_ptr, request, position, live, ROW_PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Pool slot of each position, -1 where not `live`, outside the table or on a page that is not held."""
    inside = live & (position >= 0) & (position < ROW_PAGES * PAGE_SIZE)
    place = tl.where(inside, position, 0)
    page = tl.load(table_ptr + request.to(tl.int64) * ROW_PAGES + place // PAGE_SIZE, mask=inside, other=-1)
    return tl.where(page >= 0, page.to(tl.int64) * PAGE_SIZE + place % PAGE_SIZE, -1)


@triton.jit(do_not_specialize=["total", "width"])
def _token_slots_kernel(
    table_ptr,  # [B, ROW_PAGES] int32
    start_ptr,  # [B] int64
    counts_ptr,  # [B] int32
    slots_ptr,  # [B, width] int64
    total,  # B * width
    width,  # of a prefill it is the longest prompt: not a reason to compile again
    ROW_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_out = place < total
    request, column = place // width, place % width
    wanted = in_out & (column < tl.load(counts_ptr + request, mask=in_out, other=0))
    position = tl.load(start_ptr + request, mask=in_out, other=0) + column
    tl.store(
        slots_ptr + place, _slot(table_ptr, request, position, wanted, ROW_PAGES, PAGE_SIZE), mask=in_out
    )


@triton.jit(do_not_specialize=["batch", "capacity"])
def _page_counts_kernel(
    lengths_ptr,  # [B] int64
    indptr_ptr,  # [B + 1] int32
    last_page_len_ptr,  # [B] int32
    batch,
    capacity,
    ROW_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    tl.store(indptr_ptr + lane, lane * 0, mask=lane < 1)
    before = tl.zeros((1,), tl.int64)
    for start in range(0, batch, BLOCK):
        request = start + lane
        live = request < batch
        length = tl.load(lengths_ptr + request, mask=live, other=0)
        held = tl.minimum(tl.maximum(length, 0), ROW_PAGES * PAGE_SIZE)
        pages = (held + PAGE_SIZE - 1) // PAGE_SIZE
        ends = before + tl.cumsum(pages, 0)
        tl.store(indptr_ptr + 1 + request, tl.minimum(ends, capacity).to(tl.int32), mask=live)
        last_page_len = tl.where(held > 0, (tl.maximum(held, 1) - 1) % PAGE_SIZE + 1, 0)
        tl.store(last_page_len_ptr + request, last_page_len.to(tl.int32), mask=live)
        before += tl.sum(pages, 0)


@triton.jit(do_not_specialize=["batch", "capacity"])
def _flat_pages_kernel(
    table_ptr,  # [B, ROW_PAGES] int32
    indptr_ptr,  # [B + 1] int32
    indices_ptr,  # [capacity] int32
    batch,
    capacity,
    ROW_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_out = place < capacity
    # Invariant: indptr[low] <= place, and indptr[high] > place or high = batch.
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + batch
    span = batch
    while span > 0:
        middle = (low + high) // 2
        end = tl.load(indptr_ptr + middle + 1, mask=in_out & (low < high), other=0)
        past = (low < high) & (end <= place)
        high = tl.where(past | (low >= high), high, middle)
        low = tl.where(past, middle + 1, low)
        span = span // 2
    found = in_out & (low < batch)
    column = place - tl.load(indptr_ptr + low, mask=found, other=0)
    page = tl.load(table_ptr + low.to(tl.int64) * ROW_PAGES + column, mask=found, other=0)
    tl.store(indices_ptr + place, page, mask=in_out)


@triton.jit(do_not_specialize=["total"])
def _attention_table_kernel(
    table_ptr,  # [B, ROW_PAGES] int32
    lengths_ptr,  # [B] int64
    out_table_ptr,  # [B, ROW_PAGES] int32
    seqused_ptr,  # [B] int32
    total,  # B * max(ROW_PAGES, 1)
    ROW_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_out = place < total
    # A table without columns still has lengths to write: it is swept as if it had one.
    request, column = place // max(ROW_PAGES, 1), place % max(ROW_PAGES, 1)
    length = tl.load(lengths_ptr + request, mask=in_out, other=0)
    held = tl.minimum(tl.maximum(length, 0), ROW_PAGES * PAGE_SIZE)
    used = in_out & (column * PAGE_SIZE < held)
    page = tl.load(table_ptr + place, mask=used, other=0)
    tl.store(out_table_ptr + place, page, mask=in_out & (column < ROW_PAGES))
    tl.store(seqused_ptr + request, held.to(tl.int32), mask=in_out & (column == 0))


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
    source = _slot(table_ptr, request, length + node, moves, ROW_PAGES, PAGE_SIZE)
    target = _slot(table_ptr, request, length + step, moves, ROW_PAGES, PAGE_SIZE)
    moves = moves & (source >= 0) & (target >= 0)

    feature = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    within = ((feature // ROW).to(tl.int64) * plane_stride + feature % ROW)[None, :]
    live = moves[:, None] & (feature < PLANES * ROW)[None, :]
    values = tl.load(kv_ptr + source[:, None] * ROW + within, mask=live, other=0.0)
    tl.debug_barrier()
    tl.store(kv_ptr + target[:, None] * ROW + within, values, mask=live)


def token_slots(
    page_table: torch.Tensor, start: torch.Tensor, counts: torch.Tensor, width: int, page_size: int
) -> torch.Tensor:
    """See `specdec_kernels.kv_index.token_slots`."""
    batch, row_pages = page_table.shape
    slots = torch.empty(batch, width, dtype=torch.int64, device=page_table.device)
    total = batch * width
    config, block = _flat_plan(page_table, total)
    launch(
        _token_slots_kernel, (triton.cdiv(total, block),), page_table, start, counts, slots, total, width,
        num_warps=config.num_warps, ROW_PAGES=row_pages, PAGE_SIZE=page_size, BLOCK=block,
    )  # fmt: skip
    return slots


def flashinfer_indices(
    page_table: torch.Tensor, lengths: torch.Tensor, page_size: int, capacity: int | None = None
) -> FlashInferIndices:
    """See `specdec_kernels.kv_index.flashinfer_indices`."""
    batch, row_pages = page_table.shape
    capacity = batch * row_pages if capacity is None else capacity
    out = FlashInferIndices(
        *(torch.empty(n, dtype=torch.int32, device=page_table.device) for n in (batch + 1, capacity, batch))
    )
    config, block = _flat_plan(page_table, capacity)
    scan_block = min(triton.next_power_of_2(max(batch, 1)), config.scan_block)
    launch(
        _page_counts_kernel, (1,), lengths, out.indptr, out.last_page_len, batch, capacity,
        num_warps=config.num_warps, ROW_PAGES=row_pages, PAGE_SIZE=page_size, BLOCK=scan_block,
    )  # fmt: skip
    launch(
        _flat_pages_kernel, (triton.cdiv(capacity, block),), page_table, out.indptr, out.indices, batch,
        capacity, num_warps=config.num_warps, ROW_PAGES=row_pages, BLOCK=block,
    )  # fmt: skip
    return out


def flash_attention_table(
    page_table: torch.Tensor, lengths: torch.Tensor, page_size: int
) -> FlashAttentionIndices:
    """See `specdec_kernels.kv_index.flash_attention_table`."""
    batch, row_pages = page_table.shape
    out = FlashAttentionIndices(
        torch.empty_like(page_table), torch.empty(batch, dtype=torch.int32, device=page_table.device)
    )
    total = batch * max(row_pages, 1)
    config, block = _flat_plan(page_table, total)
    launch(
        _attention_table_kernel, (triton.cdiv(total, block),), page_table, lengths, *out, total,
        num_warps=config.num_warps, ROW_PAGES=row_pages, PAGE_SIZE=page_size, BLOCK=block,
    )  # fmt: skip
    return out


def move_accepted(
    kv: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor, nodes: torch.Tensor
) -> None:
    """See `specdec_kernels.kv_index.move_accepted`."""
    layers, _, pages, page_size, heads, dim = kv.shape
    batch, path = nodes.shape
    planes, row = layers * 2, heads * dim
    if kv.numel() == 0 or nodes.numel() == 0:
        return
    config = _CONFIGS[current_chip(kv)]
    block_j = triton.next_power_of_2(path)
    block_b = min(triton.next_power_of_2(batch), config.move_requests)
    fitting = max(16, config.move_budget // (block_b * block_j))
    block_f = min(triton.next_power_of_2(planes * row), triton.next_power_of_2(fitting))
    launch(
        _move_kernel, (triton.cdiv(batch, block_b), triton.cdiv(planes * row, block_f)), kv, page_table,
        lengths, nodes, batch, pages * page_size * row, num_warps=config.num_warps, PATH=path, PLANES=planes,
        ROW=row, ROW_PAGES=page_table.shape[1], PAGE_SIZE=page_size, BLOCK_B=block_b, BLOCK_J=block_j,
        BLOCK_F=block_f,
    )  # fmt: skip


def _flat_plan(tensor: torch.Tensor, total: int) -> tuple[IndexConfig, int]:
    """Config of the chip and lanes a program for a flat output of `total` places."""
    config = _CONFIGS[current_chip(tensor)]
    return config, min(triton.next_power_of_2(max(total, 1)), config.flat_block)
