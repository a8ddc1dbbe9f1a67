"""Draft locations and the KV indices of branches on the device, one lane per output entry.

Branches of a draft and queries of a verified chain are sequences: a prefix, then drafts. Their lengths are summed for
all steps in one launch; in the next every entry finds its sequence by bisection. Index arrays of a captured graph have
room for the longest contexts: a program goes on from block to block only as far as there is something to write, so the
time follows the tokens that there are.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.compat.sglang.index.configs import config_of
from specdec_kernels.compat.sglang.index.kernel_tables import places_to_visit, table_entry
from specdec_kernels.compat.sglang.index.reference import INT32_MAX
from specdec_kernels.compat.sglang.index.types import DraftSlots, SequenceIndices
from specdec_kernels.kv_index.kernel import owning_row, running_sums
from specdec_kernels.launch import lanes, launch


@triton.jit
def _branch_start(length, branch, STEPS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Position of the first draft of a branch, as `reference._branch_start`."""
    pages = (length % PAGE_SIZE + STEPS + PAGE_SIZE - 1) // PAGE_SIZE
    return length + branch * pages * PAGE_SIZE


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
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < batch * TOPK * STEPS
    step, sequence = place // (batch * TOPK), place % (batch * TOPK)
    request, branch = sequence // TOPK, sequence % TOPK
    row = tl.load(rows_ptr + request, mask=live, other=-1)
    length = tl.load(lengths_ptr + request, mask=live, other=0).to(tl.int64)
    position = _branch_start(length, branch, STEPS, PAGE_SIZE) + step
    tl.store(slots_ptr + place, table_entry(table_ptr, row, position, live, num_rows, width, -1), mask=live)
    if PAGE_SIZE > 1 and TOPK > 1:
        TAILS: tl.constexpr = (TOPK - 1) * (PAGE_SIZE - 1)
        live = place < batch * TAILS
        request = place // TAILS
        branch, offset = place % TAILS // (PAGE_SIZE - 1) + 1, place % (PAGE_SIZE - 1)
        row = tl.load(rows_ptr + request, mask=live, other=-1)
        length = tl.load(lengths_ptr + request, mask=live, other=0).to(tl.int64)
        tail = length % PAGE_SIZE
        copied = live & (offset < tail)
        copy = _branch_start(length, branch, STEPS, PAGE_SIZE) - tail + offset
        source = table_entry(table_ptr, row, length - tail + offset, copied, num_rows, width, -1)
        tl.store(source_ptr + place, source, mask=live)
        tl.store(target_ptr + place, table_entry(table_ptr, row, copy, copied, num_rows, width, -1), mask=live)


@triton.jit(
    do_not_specialize=["sequences", "num_rows", "width", "capacity", "limit", "indptr_stride", "indices_stride"]
)
def _sequence_indices_kernel(
    table_ptr,  # [num_rows, width] int32
    rows_ptr,  # [sequences / REPEAT] int
    lengths_ptr,  # [sequences / REPEAT] int
    indptr_ptr,  # [steps, >= sequences + 1] int
    indices_ptr,  # [steps, capacity] int
    sequences,
    num_rows,
    width,
    capacity,
    limit,
    sink,
    indptr_stride,
    indices_stride,
    REPEAT: tl.constexpr,  # sequences per request
    STEPS: tl.constexpr,  # of a branch, 0 where all sequences of a request begin at its length
    PAGE_SIZE: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    step = tl.program_id(1).to(tl.int64)
    indptr_ptr += step * indptr_stride
    indices_ptr += step * indices_stride
    end = places_to_visit(capacity, tl.load(indptr_ptr + sequences), FILL)
    for first in range(tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        place = (first + tl.arange(0, BLOCK)).to(tl.int64)
        live = place < capacity
        sequence = owning_row(indptr_ptr, place, sequences, live)
        owned = live & (sequence < sequences)
        column = place - tl.load(indptr_ptr + sequence, mask=owned, other=0)
        request, branch = sequence // REPEAT, sequence % REPEAT
        length = tl.maximum(tl.load(lengths_ptr + request, mask=owned, other=0).to(tl.int64), 0)
        prefix = tl.minimum(length, limit)
        early = tl.where(column < sink, column, column + length - prefix)
        late = _branch_start(length, branch, STEPS, PAGE_SIZE) + column - prefix
        position = tl.where(column < prefix, early, late)
        row = tl.load(rows_ptr + request, mask=owned, other=-1)
        slot = table_entry(table_ptr, row, position, owned, num_rows, width, 0)
        tl.store(indices_ptr + place, slot.to(indices_ptr.dtype.element_ty), mask=live if FILL else owned)


def draft_slots(
    table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, topk: int, num_steps: int, page_size: int
) -> DraftSlots:
    """See `specdec_kernels.compat.sglang.index.draft_slots`."""
    batch, tails = rows.shape[0], (topk - 1, page_size - 1)
    shapes = ((num_steps, batch * topk), (batch, *tails), (batch, *tails))
    found = DraftSlots(*(torch.empty(shape, dtype=torch.int64, device=table.device) for shape in shapes))
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
    window: int | None,
    sink: int,
    out: SequenceIndices | None,
) -> SequenceIndices:
    """See `specdec_kernels.compat.sglang.index.draft_kv_indices`."""
    found = out or _empty(table, (num_steps,), rows.shape[0] * topk, capacity)
    limit = INT32_MAX if window is None else sink + window
    running_sums(lengths, found.indptr, capacity=capacity, limit=limit, repeat=topk, add=1)
    _list_sequences(table, rows, lengths, found, limit, sink, out is None, topk, num_steps, page_size)
    return found


def verify_decode_indices(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    factor: int,
    capacity: int,
    out: SequenceIndices | None,
) -> SequenceIndices:
    """See `specdec_kernels.compat.sglang.index.verify_decode_indices`."""
    found = out or _empty(table, (), rows.shape[0] * factor, capacity)
    running_sums(lengths, found.indptr, capacity=capacity, repeat=factor, add=1, growth=1)
    _list_sequences(table, rows, lengths, found, INT32_MAX, 0, out is None, factor, num_steps=0, page_size=1)
    return found


def _empty(table: torch.Tensor, steps: tuple[int, ...], sequences: int, capacity: int) -> SequenceIndices:
    shapes = ((*steps, sequences + 1), (*steps, capacity))
    return SequenceIndices(*(torch.empty(shape, dtype=torch.int32, device=table.device) for shape in shapes))


def _list_sequences(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    found: SequenceIndices,
    limit: int,
    sink: int,
    fill: bool,
    repeat: int,
    num_steps: int,
    page_size: int,
) -> None:
    """Write `found.indices`, of one step or, with a leading axis, of several; `found.indptr` is written already."""
    indptr, indices = (part if part.dim() == 2 else part[None] for part in found)
    steps, capacity = indices.shape
    config = config_of(table)
    block = lanes(capacity, config.flat_block)
    launch(
        _sequence_indices_kernel, (min(triton.cdiv(capacity, block), config.max_programs), steps), table, rows,
        lengths, indptr, indices, rows.shape[0] * repeat, *table.shape, capacity, limit, sink, indptr.stride(0),
        indices.stride(0), num_warps=config.num_warps, REPEAT=repeat, STEPS=num_steps, PAGE_SIZE=page_size, FILL=fill,
        BLOCK=block,
    )  # fmt: skip
