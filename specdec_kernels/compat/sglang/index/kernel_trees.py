"""Parents from candidate ids, and mask words in other layouts.

A parent is looked up by comparing a block of nodes with every block of nodes. The flat mask layouts start each request
where the one before ends. One program sums the sizes once; then every program owns rows (or bytes) of one place and
writes each cell once. Programs past the last row clear what lies between the total and the capacity. All places are
int64: N * sum(L) passes 2^31 at long contexts.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.compat.sglang.index.configs import IndexConfig, config_of
from specdec_kernels.compat.sglang.index.reference import low_bits, packed_dtype
from specdec_kernels.compat.sglang.index.types import ExportedMask
from specdec_kernels.kv_index.kernel import running_sums
from specdec_kernels.launch import lanes, launch
from specdec_kernels.tree.types import UNUSED_PARENT, WORD_BITS, mask_words

_WORD_BITS = tl.constexpr(WORD_BITS)
_UNUSED_PARENT = tl.constexpr(UNUSED_PARENT)
_BYTE_BITS = 8
_MASK_CELLS = 1024  # cells of a row that a program writes at once


@triton.jit(do_not_specialize=["batch", "rows", "topk"])
def _candidate_parents_kernel(
    selected_ptr,  # [B, N - 1] int64
    parent_list_ptr,  # [B, rows] int64
    parents_ptr,  # [B, N] int32
    batch,
    rows,
    topk,
    NODES: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B))[:, None]
    node = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    live = (request < batch) & (node < NODES)
    entries = selected_ptr + request.to(tl.int64) * (NODES - 1) - 1
    candidate = tl.load(entries + node, mask=live & (node > 0), other=-1)
    history_row = candidate // topk
    readable = live & (candidate >= topk) & (history_row < rows)
    place = request.to(tl.int64) * rows + history_row
    wanted = tl.load(parent_list_ptr + place, mask=readable, other=-1)

    found = tl.full((BLOCK_B, BLOCK_N), NODES, tl.int32)
    for start in range(0, NODES, BLOCK_N):
        other = (start + tl.arange(0, BLOCK_N))[None, :]
        id_of = tl.load(entries + other, mask=(request < batch) & (other > 0) & (other < NODES), other=-1)
        is_parent = (id_of[:, None, :] == wanted[:, :, None]) & readable[:, :, None] & (other > 0)[:, None, :]
        found = tl.minimum(found, tl.min(tl.where(is_parent, other[:, None, :], NODES), 2))
    parent = tl.where(found < NODES, found, _UNUSED_PARENT)
    parent = tl.where(candidate < topk, 0, parent)
    parent = tl.where(node == 0, -1, parent)
    tl.store(parents_ptr + request.to(tl.int64) * NODES + node, parent, mask=live)


@triton.jit
def _clear_tail(cells_ptr, total, capacity, program, programs, BLOCK_C: tl.constexpr):
    """Zero [total, capacity), a share of it in each of `programs`."""
    lane = tl.arange(0, BLOCK_C)
    for start in range(total + program.to(tl.int64) * BLOCK_C, capacity, programs * BLOCK_C):
        tl.store(cells_ptr + start + lane, (lane * 0).to(tl.uint8), mask=start + lane < capacity)


@triton.jit
def sees(words_ptr, row, column, live, WORDS: tl.constexpr):
    """Bit `column` < N of mask row `row`, 0 for a negative column and where not `live`."""
    inside = live & (column >= 0)
    word = tl.load(words_ptr + row * WORDS + column // _WORD_BITS, mask=inside, other=0)
    return (word >> (column % _WORD_BITS)) & inside.to(tl.int64)


@triton.jit(do_not_specialize=["rows", "capacity", "row_programs"])
def _cells_kernel(
    words_ptr,  # [B, N, WORDS] int64
    lengths_ptr,  # [B] int64, or None without a prefix
    offsets_ptr,  # [B + 1] int64, or None without a prefix
    cells_ptr,  # [capacity] uint8
    rows,
    capacity,
    row_programs,
    NODES: tl.constexpr,
    WORDS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program, split = tl.program_id(0), tl.program_id(1)
    if program < row_programs:
        row = (program * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        live = row < rows
        if lengths_ptr is not None:
            length = tl.maximum(tl.load(lengths_ptr + row // NODES, mask=live, other=0), 0)
            request_start = tl.load(offsets_ptr + row // NODES, mask=live, other=0)
            start = request_start + row % NODES * (length + NODES)
        else:
            length = row * 0
            start = row * NODES
        width = tl.where(live, tl.minimum(length + NODES, capacity - start), 0)
        for first in range((split * BLOCK_C).to(tl.int64), tl.max(width, 0), SPLITS * BLOCK_C):
            column = (first + tl.arange(0, BLOCK_C))[None, :]
            drafted = column - length[:, None]
            there = column < width[:, None]
            seen = sees(words_ptr, row[:, None], drafted, there, WORDS)
            cell = tl.where(drafted < 0, 1, seen).to(tl.uint8)
            tl.store(cells_ptr + start[:, None] + column, cell, mask=there)
    elif offsets_ptr is not None:
        total = tl.load(offsets_ptr + rows // NODES)
        _clear_tail(
            cells_ptr, total, capacity, (program - row_programs) * SPLITS + split,
            (tl.num_programs(0) - row_programs) * SPLITS, BLOCK_C,
        )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "capacity"])
def _bytes_kernel(
    words_ptr,  # [B, N, WORDS] int64
    lengths_ptr,  # [B] int64
    offsets_ptr,  # [B + 1] int64
    bytes_ptr,  # [capacity] uint8
    batch,
    capacity,
    NODES: tl.constexpr,
    WORDS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if request < batch:
        length = tl.maximum(tl.load(lengths_ptr + request), 0)
        start = tl.load(offsets_ptr + request)
        size = tl.minimum(tl.load(offsets_ptr + request + 1), capacity) - start
        width = length + NODES
        for first in range((split * BLOCK_C).to(tl.int64), size, SPLITS * BLOCK_C):
            element = first + tl.arange(0, BLOCK_C)
            node = element * 8 // width
            column = element * 8 - node * width
            value = column * 0
            for bit in tl.static_range(8):
                live = node < NODES
                drafted = column - length
                seen = sees(words_ptr, request * NODES + node, drafted, live, WORDS)
                value |= tl.where(live & (drafted < 0), 1, seen) << bit
                column += 1
                wraps = column == width
                node += wraps.to(tl.int64)
                column = tl.where(wraps, 0, column)
            tl.store(bytes_ptr + start + element, value.to(tl.uint8), mask=element < size)
    else:
        total = tl.load(offsets_ptr + batch)
        _clear_tail(
            bytes_ptr, total, capacity, (request - batch) * SPLITS + split,
            (tl.num_programs(0) - batch) * SPLITS, BLOCK_C,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _pack_kernel(
    words_ptr,  # [B, N, 1] int64
    bytes_ptr,  # [B, N, BYTES] uint8
    rows,
    BYTES: tl.constexpr,
    LOW_BITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    place = tl.arange(0, BYTES)[None, :]
    word = tl.load(words_ptr + row, mask=row < rows, other=0)
    value = ((word & LOW_BITS) >> (place * 8).to(tl.int64)) & 255
    tl.store(bytes_ptr + row * BYTES + place, value.to(tl.uint8), mask=row < rows)


def parents_from_candidates(selected: torch.Tensor, parent_list: torch.Tensor, topk: int) -> torch.Tensor:
    """See `specdec_kernels.compat.sglang.index.parents_from_candidates`."""
    batch, drafts = selected.shape
    parents = torch.empty(batch, drafts + 1, dtype=torch.int32, device=selected.device)
    config = config_of(selected)
    block_n = lanes(drafts + 1, config.pair_nodes)
    block_b = min(triton.next_power_of_2(max(batch, 1)), config.pair_requests)
    grid = (triton.cdiv(batch, block_b), triton.cdiv(drafts + 1, block_n))
    launch(
        _candidate_parents_kernel, grid, selected, parent_list, parents, batch, parent_list.shape[1], topk,
        num_warps=config.num_warps, NODES=drafts + 1, BLOCK_B=block_b, BLOCK_N=block_n,
    )  # fmt: skip
    return parents


def export_mask(mask: torch.Tensor, lengths: torch.Tensor, form: str, capacity: int | None) -> ExportedMask:
    """See `specdec_kernels.compat.sglang.index.export_mask`."""
    if form == "packed":
        return ExportedMask(_packed(mask), None)
    batch, num_nodes = mask.shape[:2]
    config = config_of(mask)
    if form == "query":
        cells = torch.empty(batch, num_nodes, num_nodes, dtype=torch.uint8, device=mask.device)
        _launch_cells(config, mask, None, None, cells)
        return ExportedMask(cells.view(torch.bool), None)
    cells = torch.empty(capacity, dtype=torch.uint8, device=mask.device)
    offsets = torch.empty(batch + 1, dtype=torch.int64, device=mask.device)
    unit = _BYTE_BITS if form == "flashinfer" else 1
    running_sums(lengths, offsets, scale=num_nodes, add=num_nodes * num_nodes, unit=unit)
    if form == "full":
        _launch_cells(config, mask, lengths, offsets, cells)
        return ExportedMask(cells.view(torch.bool), offsets)
    launch(
        _bytes_kernel, (batch + config.tail_programs, config.mask_splits), mask, lengths, offsets, cells, batch,
        cells.numel(), NODES=num_nodes, WORDS=mask_words(num_nodes), SPLITS=config.mask_splits,
        BLOCK_C=_MASK_CELLS, num_warps=config.num_warps,
    )  # fmt: skip
    return ExportedMask(cells, offsets)


def _launch_cells(
    config: IndexConfig,
    mask: torch.Tensor,
    lengths: torch.Tensor | None,
    offsets: torch.Tensor | None,
    cells: torch.Tensor,
) -> None:
    """A byte a cell; without `lengths` there is no prefix, rows follow each other and nothing is left over."""
    batch, num_nodes = mask.shape[:2]
    rows = batch * num_nodes
    block_c = _MASK_CELLS if lengths is not None else lanes(num_nodes)
    splits = config.mask_splits if lengths is not None else 1
    block_r = lanes(rows, config.mask_rows)
    row_programs = triton.cdiv(rows, block_r)
    tail_programs = config.tail_programs if lengths is not None else 0
    launch(
        _cells_kernel, (row_programs + tail_programs, splits), mask, lengths, offsets, cells, rows,
        cells.numel(), row_programs, NODES=num_nodes, WORDS=mask_words(num_nodes), SPLITS=splits,
        BLOCK_R=block_r, BLOCK_C=block_c, num_warps=config.num_warps,
    )  # fmt: skip


def _packed(mask: torch.Tensor) -> torch.Tensor:
    """[B, N] of the smallest unsigned type; words and types are little-endian, so their first bytes agree."""
    batch, num_nodes = mask.shape[:2]
    dtype = packed_dtype(num_nodes)
    values = torch.empty(batch, num_nodes, dtype.itemsize, dtype=torch.uint8, device=mask.device)
    rows = batch * num_nodes
    launch(
        _pack_kernel, (triton.cdiv(rows, _MASK_CELLS),), mask, values, rows,
        BYTES=dtype.itemsize, LOW_BITS=low_bits(num_nodes), BLOCK_R=_MASK_CELLS,
    )  # fmt: skip
    return values.view(dtype)[:, :, 0]
