"""Page-table arithmetic on the device.

`flashinfer_indices` sums page counts in one program, then fills the flat array by output place, see
`ragged_kernel`.
"""

# mypy: ignore-errors
# Device code: parameters are pointers and constexprs that Python's types do not describe.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.kv_index.configs import IndexConfig, config_of, lanes
from specdec_kernels.kv_index.ragged_kernel import owning_row
from specdec_kernels.kv_index.types import FlashAttentionIndices, FlashInferIndices
from specdec_kernels.launch import launch


@triton.jit
def page_slot(table_ptr, request, position, live, ROW_PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr):
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
    tl.store(slots_ptr + place, page_slot(table_ptr, request, position, wanted, ROW_PAGES, PAGE_SIZE), mask=in_out)


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
    before = (batch * 0).to(tl.int64)
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
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_out = place < capacity
    low = owning_row(indptr_ptr, place, batch, in_out, 1, 0)
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
    launch(
        _page_counts_kernel, (1,), lengths, out.indptr, out.last_page_len, batch, capacity,
        num_warps=config.num_warps, ROW_PAGES=row_pages, PAGE_SIZE=page_size, BLOCK=lanes(batch, config.scan_block),
    )  # fmt: skip
    launch(
        _flat_pages_kernel, (triton.cdiv(capacity, block),), page_table, out.indptr, out.indices, batch,
        capacity, num_warps=config.num_warps, ROW_PAGES=row_pages, BLOCK=block,
    )  # fmt: skip
    return out


def flash_attention_table(page_table: torch.Tensor, lengths: torch.Tensor, page_size: int) -> FlashAttentionIndices:
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


def _flat_plan(tensor: torch.Tensor, total: int) -> tuple[IndexConfig, int]:
    """Config of the chip and lanes a program for a flat output of `total` places."""
    config = config_of(tensor)
    return config, lanes(total, config.flat_block)
