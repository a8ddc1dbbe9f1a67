"""Spans of token tables and KV indices of sequences, one lane per output entry.

Offsets of spans and sequences are summed in one launch; in the next every entry finds its owner by bisection. Index
arrays of a captured graph have room for the longest contexts: a program goes on from block to block only as far as
there is something to write, so the time follows the tokens in use.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.compat.sglang.configs import CONFIGS
from specdec_kernels.compat.sglang.types import Sequences, Spans
from specdec_kernels.kv_index.kernel import owning_row, running_sums
from specdec_kernels.launch import current_chip, lanes, launch


@triton.jit
def _table_entry(table_ptr, row, column, live, num_rows, width):
    """table[row, column] as int64, 0 where there is no such entry."""
    inside = live & (row >= 0) & (row < num_rows) & (column >= 0) & (column < width)
    place = tl.where(inside, row.to(tl.int64) * width + column, 0)
    return tl.load(table_ptr + place, mask=inside, other=0).to(tl.int64)


@triton.jit
def _branch_start(length, branch, STEPS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Position of the first draft of a branch, as `reference.branch_start`."""
    pages = (length % PAGE_SIZE + STEPS + PAGE_SIZE - 1) // PAGE_SIZE
    return length + branch * pages * PAGE_SIZE


@triton.jit(
    do_not_specialize=["sequences", "num_rows", "width", "capacity", "limit", "sink", "indptr_stride", "out_stride"]
)
def _gather_kernel(
    table_ptr,  # [num_rows, width] int, or None: an entry is its position
    rows_ptr,  # [sequences / REPEAT] int, or None
    lengths_ptr,  # [sequences / REPEAT] int: a prefix of this length, then drafts; of a span, its first position
    counts_ptr,  # [sequences] int: entries of each span, or None
    indptr_ptr,  # [steps, >= sequences + 1] int
    out_ptr,  # [steps, capacity] int
    sequences,
    num_rows,
    width,
    capacity,
    limit,  # prefix positions that are kept
    sink,  # of them at the beginning
    indptr_stride,
    out_stride,
    REPEAT: tl.constexpr,  # sequences per request
    STEPS: tl.constexpr,  # drafts of a branch, 0 where all sequences of a request continue at its length
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    step = tl.program_id(1).to(tl.int64)
    indptr_ptr += step * indptr_stride
    out_ptr += step * out_stride
    end = tl.minimum(tl.load(indptr_ptr + sequences).to(tl.int64), capacity).to(tl.int32)
    for first in range(tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        place = (first + tl.arange(0, BLOCK)).to(tl.int64)
        live = place < capacity
        sequence = owning_row(indptr_ptr, place, sequences, live)
        owned = live & (sequence < sequences)
        column = place - tl.load(indptr_ptr + sequence, mask=owned, other=0)
        if counts_ptr is not None:
            # Offsets of the caller may leave a span more room than it has entries.
            owned = owned & (column < tl.load(counts_ptr + sequence, mask=owned, other=0))
        request, branch = sequence // REPEAT, sequence % REPEAT
        length = tl.maximum(tl.load(lengths_ptr + request, mask=owned, other=0).to(tl.int64), 0)
        prefix = tl.minimum(length, limit)
        early = tl.where(column < sink, column, column + length - prefix)
        late = _branch_start(length, branch, STEPS, PAGE_SIZE) + column - prefix
        value = tl.where(column < prefix, early, late)
        if table_ptr is not None:
            row = tl.load(rows_ptr + request, mask=owned, other=-1)
            value = _table_entry(table_ptr, row, value, owned, num_rows, width)
        tl.store(out_ptr + place, value, mask=owned)


def read_spans(spans: Spans) -> None:
    offsets = spans.offsets
    if offsets is None:
        offsets = spans.counts.new_empty(spans.counts.shape[0] + 1, dtype=torch.int32)
        running_sums(spans.counts, offsets, capacity=spans.values.shape[0])
    lists = offsets[None], spans.values[None]
    _gather(Sequences(spans.table, spans.rows, spans.start, *lists, repeat=1, limit=0), spans.counts)


def list_sequences(sequences: Sequences) -> None:
    _, _, lengths, indptr, indices, repeat, growth, _, _, limit, _ = sequences
    sums = dict(capacity=indices.shape[1], limit=limit, repeat=repeat, add=1, growth=growth)
    running_sums(lengths, indptr, **sums)
    _gather(sequences)


def _gather(sequences: Sequences, counts: Tensor | None = None) -> None:
    table, rows, lengths, indptr, out, repeat, _, num_steps, page_size, limit, sink = sequences
    steps, capacity = out.shape
    config = CONFIGS[current_chip(out)]
    block = lanes(capacity, config.flat_block)
    launch(
        _gather_kernel, (min(triton.cdiv(capacity, block), config.max_programs), steps), table, rows, lengths, counts,
        indptr, out, lengths.shape[0] * repeat, *((0, 0) if table is None else table.shape), capacity, limit, sink,
        indptr.stride(0), out.stride(0), num_warps=config.num_warps, REPEAT=repeat, STEPS=num_steps,
        PAGE_SIZE=page_size, BLOCK=block,
    )  # fmt: skip
