"""Draft locations and per-branch KV indices on the device, one lane an output entry.

The sums over requests that place a branch are linear in the sum of (kept) prefix lengths: branch t of request
b begins in step s at T C_b + b T (s + 1) + t (l_b + s + 1), C the exclusive sums of l. So C is summed once
for all steps and branches, and the bisection runs over requests, not over branches. Query q of a chain of F
begins at F C_b + b F (F + 1) / 2 + q (l_b + 1) + q (q - 1) / 2 in the same way. Index arrays of a captured
graph have room for the longest contexts; a program goes on from block to block only as far as there is
something to write, so time follows the tokens that there are.
"""

# mypy: ignore-errors
# Device code: parameters are pointers and constexprs that Python's types do not describe.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.kv_index.configs import config_of, lanes
from specdec_kernels.kv_index.ragged_kernel import owning_row, places_to_visit, row_offsets, table_entry
from specdec_kernels.kv_index.types import DraftSlots, SequenceIndices, StepIndices
from specdec_kernels.launch import launch


@triton.jit
def _branch_start(
    length, branch, TOPK: tl.constexpr, STEPS: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGED: tl.constexpr
):
    """Position of the first draft of a branch, as `reference._branch_start`."""
    pages = (length % PAGE_SIZE + STEPS + PAGE_SIZE - 1) // PAGE_SIZE
    span = pages * PAGE_SIZE if PAGED else length * 0 + STEPS
    return length + branch * span


@triton.jit(do_not_specialize=["batch", "num_rows", "width"])
def _draft_slots_kernel(
    table_ptr,  # [num_rows, width] int32
    rows_ptr,  # [B] int
    lengths_ptr,  # [B] int
    slots_ptr,  # [STEPS, B * TOPK] int64
    source_ptr,  # [B, TOPK - 1, PAGE_SIZE - 1] int64
    target_ptr,  # [B, TOPK - 1, PAGE_SIZE - 1] int64
    batch,
    num_rows,
    width,
    TOPK: tl.constexpr,
    STEPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    PAGED: tl.constexpr = PAGE_SIZE > 1 and TOPK > 1
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < batch * TOPK * STEPS
    step, sequence = place // (batch * TOPK), place % (batch * TOPK)
    request, branch = sequence // TOPK, sequence % TOPK
    row = tl.load(rows_ptr + request, mask=live, other=-1)
    length = tl.load(lengths_ptr + request, mask=live, other=0).to(tl.int64)
    position = _branch_start(length, branch, TOPK, STEPS, PAGE_SIZE, PAGED) + step
    tl.store(slots_ptr + place, table_entry(table_ptr, row, position, live, num_rows, width, -1), mask=live)
    if PAGED:
        TAILS: tl.constexpr = (TOPK - 1) * (PAGE_SIZE - 1)
        live = place < batch * TAILS
        request = place // TAILS
        branch, offset = place % TAILS // (PAGE_SIZE - 1) + 1, place % (PAGE_SIZE - 1)
        row = tl.load(rows_ptr + request, mask=live, other=-1)
        length = tl.load(lengths_ptr + request, mask=live, other=0).to(tl.int64)
        tail = length % PAGE_SIZE
        copied = live & (offset < tail)
        copy = _branch_start(length, branch, TOPK, STEPS, PAGE_SIZE, PAGED) - tail + offset
        source = table_entry(table_ptr, row, length - tail + offset, copied, num_rows, width, -1)
        tl.store(source_ptr + place, source, mask=live)
        tl.store(target_ptr + place, table_entry(table_ptr, row, copy, copied, num_rows, width, -1), mask=live)


@triton.jit(do_not_specialize=["batch", "num_rows", "width", "capacity", "limit", "indptr_stride", "indices_stride"])
def _draft_kv_indices_kernel(
    table_ptr,  # [num_rows, width] int32
    rows_ptr,  # [B] int
    lengths_ptr,  # [B] int
    offsets_ptr,  # [B + 1] int32, sums of min(L, limit)
    indptr_ptr,  # [STEPS, >= B * TOPK + 1] int
    indices_ptr,  # [STEPS, capacity] int
    batch,
    num_rows,
    width,
    capacity,
    limit,
    sink,
    indptr_stride,
    indices_stride,
    TOPK: tl.constexpr,
    STEPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    step = tl.program_id(1).to(tl.int64)
    indptr_ptr += step * indptr_stride
    indices_ptr += step * indices_stride
    used = tl.load(offsets_ptr + batch).to(tl.int64) * TOPK + batch * TOPK * (step + 1)
    end = places_to_visit(capacity, used, batch * TOPK + 1, FILL)
    for first in range(tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        place = (first + tl.arange(0, BLOCK)).to(tl.int64)
        listed = place <= batch * TOPK
        request = place // TOPK
        prefix = _kept_prefix(lengths_ptr, request, listed & (request < batch), limit)
        before = tl.load(offsets_ptr + request, mask=listed, other=0).to(tl.int64)
        begin = before * TOPK + place % TOPK * prefix + place * (step + 1)
        begin = tl.minimum(begin, capacity).to(indptr_ptr.dtype.element_ty)
        tl.store(indptr_ptr + place, begin, mask=listed)
        _list_branches(
            table_ptr, rows_ptr, lengths_ptr, offsets_ptr, indices_ptr, place, step + 1, batch, num_rows, width,
            capacity, limit, sink, TOPK, STEPS, PAGE_SIZE, FILL,
        )  # fmt: skip


@triton.jit
def _list_branches(
    table_ptr,
    rows_ptr,
    lengths_ptr,
    offsets_ptr,
    indices_ptr,
    place,  # of the step's indices
    drafts,  # that a branch has in this step
    batch,
    num_rows,
    width,
    capacity,
    limit,
    sink,
    TOPK: tl.constexpr,
    STEPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FILL: tl.constexpr,
):
    """Slots of the branches at the given places."""
    PAGED: tl.constexpr = PAGE_SIZE > 1 and TOPK > 1
    live = place < capacity
    request = owning_row(offsets_ptr, place, batch, live, TOPK, TOPK * drafts)
    owned = live & (request < batch)
    before = tl.load(offsets_ptr + request, mask=owned, other=0).to(tl.int64)
    rest = place - before * TOPK - request.to(tl.int64) * TOPK * drafts
    prefix = _kept_prefix(lengths_ptr, request, owned, limit)
    length = tl.maximum(tl.load(lengths_ptr + request, mask=owned, other=0).to(tl.int64), 0)
    branch, column = rest // (prefix + drafts), rest % (prefix + drafts)
    early = tl.where(column < sink, column, column + length - prefix)
    late = _branch_start(length, branch, TOPK, STEPS, PAGE_SIZE, PAGED) + column - prefix
    position = tl.where(column < prefix, early, late)
    row = tl.load(rows_ptr + request, mask=owned, other=-1)
    slot = table_entry(table_ptr, row, position, owned, num_rows, width, 0)
    tl.store(indices_ptr + place, slot.to(indices_ptr.dtype.element_ty), mask=live if FILL else owned)


@triton.jit
def _kept_prefix(lengths_ptr, request, live, limit):
    """Prefix tokens that a request's branches attend to."""
    length = tl.load(lengths_ptr + request, mask=live, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(length, 0), limit)


@triton.jit(do_not_specialize=["batch", "num_rows", "width", "capacity"])
def _verify_decode_kernel(
    table_ptr,  # [num_rows, width] int32
    rows_ptr,  # [B] int
    lengths_ptr,  # [B] int
    offsets_ptr,  # [B + 1] int32, sums of L
    indptr_ptr,  # [>= B * FACTOR + 1] int
    indices_ptr,  # [capacity] int
    batch,
    num_rows,
    width,
    capacity,
    FACTOR: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    DRAFTS: tl.constexpr = FACTOR * (FACTOR + 1) // 2
    used = tl.load(offsets_ptr + batch).to(tl.int64) * FACTOR + batch * DRAFTS
    end = places_to_visit(capacity, used, batch * FACTOR + 1, FILL)
    for first in range(tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        place = (first + tl.arange(0, BLOCK)).to(tl.int64)
        listed = place <= batch * FACTOR
        request, query = place // FACTOR, place % FACTOR
        length = tl.load(lengths_ptr + request, mask=listed & (request < batch), other=0).to(tl.int64)
        before = tl.load(offsets_ptr + request, mask=listed, other=0).to(tl.int64)
        begin = before * FACTOR + request * DRAFTS + _query_start(query, tl.maximum(length, 0))
        begin = tl.minimum(begin, capacity).to(indptr_ptr.dtype.element_ty)
        tl.store(indptr_ptr + place, begin, mask=listed)

        live = place < capacity
        owner = owning_row(offsets_ptr, place, batch, live, FACTOR, DRAFTS)
        owned = live & (owner < batch)
        before = tl.load(offsets_ptr + owner, mask=owned, other=0).to(tl.int64)
        rest = place - before * FACTOR - owner.to(tl.int64) * DRAFTS
        length = tl.maximum(tl.load(lengths_ptr + owner, mask=owned, other=0).to(tl.int64), 0)
        query = rest * 0
        for later in range(1, FACTOR):
            query += (rest >= _query_start(later, length)).to(tl.int64)
        row = tl.load(rows_ptr + owner, mask=owned, other=-1)
        slot = table_entry(table_ptr, row, rest - _query_start(query, length), owned, num_rows, width, 0)
        tl.store(indices_ptr + place, slot.to(indices_ptr.dtype.element_ty), mask=live if FILL else owned)


@triton.jit
def _query_start(query, length):
    """Entries of a request before its query: sum of (length + 1 + i) for i < query."""
    return query * (length + 1) + query * (query - 1) // 2


def draft_slots(
    table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, topk: int, num_steps: int, page_size: int
) -> DraftSlots:
    """See `specdec_kernels.kv_index.draft_slots`."""
    batch, tails = rows.shape[0], (topk - 1, page_size - 1)

    def slots(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int64, device=table.device)

    found = DraftSlots(slots(num_steps, batch * topk), slots(batch, *tails), slots(batch, *tails))
    config = config_of(table)
    total = max(found.slots.numel(), found.source.numel())
    block = lanes(total, config.flat_block)
    launch(
        _draft_slots_kernel, (triton.cdiv(total, block),), table, rows, lengths, *found, batch, *table.shape,
        num_warps=config.num_warps, TOPK=topk, STEPS=num_steps, PAGE_SIZE=page_size, BLOCK=block,
    )  # fmt: skip
    return found


def draft_kv_indices(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    num_steps: int,
    page_size: int,
    capacity: int,
    *,
    window: int | None = None,
    sink: int = 0,
    out: StepIndices | None = None,
) -> StepIndices:
    """See `specdec_kernels.kv_index.draft_kv_indices`."""
    batch = rows.shape[0]
    limit = 2**31 - 1 if window is None else sink + window
    offsets = row_offsets(lengths, limit=limit)
    found = out
    if found is None:
        shapes = ((num_steps, batch * topk + 1), (num_steps, capacity))
        found = StepIndices(*(torch.empty(s, dtype=torch.int32, device=table.device) for s in shapes))
    config = config_of(table)
    total = max(capacity, batch * topk + 1)
    block = lanes(total, config.flat_block)
    programs = min(triton.cdiv(total, block), config.max_programs)
    launch(
        _draft_kv_indices_kernel, (programs, num_steps), table, rows, lengths, offsets, *found, batch,
        *table.shape, capacity, limit, sink, found.indptr.stride(0), found.indices.stride(0),
        num_warps=config.num_warps, TOPK=topk, STEPS=num_steps, PAGE_SIZE=page_size, FILL=out is None,
        BLOCK=block,
    )  # fmt: skip
    return found


def verify_decode_indices(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    factor: int,
    capacity: int,
    *,
    out: SequenceIndices | None = None,
) -> SequenceIndices:
    """See `specdec_kernels.kv_index.verify_decode_indices`."""
    batch = rows.shape[0]
    offsets = row_offsets(lengths)
    found = out
    if found is None:
        found = SequenceIndices(
            *(torch.empty(n, dtype=torch.int32, device=table.device) for n in (batch * factor + 1, capacity))
        )
    config = config_of(table)
    total = max(capacity, batch * factor + 1)
    block = lanes(total, config.flat_block)
    programs = min(triton.cdiv(total, block), config.max_programs)
    launch(
        _verify_decode_kernel, (programs,), table, rows, lengths, offsets, *found, batch, *table.shape, capacity,
        num_warps=config.num_warps, FACTOR=factor, FILL=out is None, BLOCK=block,
    )  # fmt: skip
    return found
