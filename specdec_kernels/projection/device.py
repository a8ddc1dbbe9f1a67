"""What the kernels of products share: places of operands, sums of splits, results, and the programs of a launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.activation.kernel import gated
from specdec_kernels.projection.configs import LinearConfig
from specdec_kernels.projection.types import Product

_FEWEST_TICKETS = 1 << 16


@triton.jit
def weight_rows(tile, OUTER, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """The weight's rows of a column tile, [COLUMNS]: past the last one the last again. A gated tile holds rows of
    the gate in its first half and the same rows of up in its second."""
    lane = tl.arange(0, COLUMNS)
    if GATED:
        HALF: tl.constexpr = COLUMNS // 2
        row = tl.minimum(tile * HALF + lane % HALF, OUTER // 2 - 1) + (lane // HALF) * (OUTER // 2)
    else:
        row = tl.minimum(tile * COLUMNS + lane, OUTER - 1)
    return row


class Operands(NamedTuple):
    """What a program multiplies."""

    x: Any  # [M, K]
    weight: Any  # [OUTER, K]
    weight_row: Any  # [COLUMNS]
    row: Any  # [ROWS]
    rows: Any  # M
    K: Any


class Tile(NamedTuple):
    """Compile-time sizes of a program. EVEN_K: every split is a whole number of steps."""

    ROWS: Any
    COLUMNS: Any
    BLOCK_K: Any
    EVEN_K: Any

    @classmethod
    def of(cls, config: LinearConfig, inner: int) -> Tile:
        return cls(config.rows, config.columns, config.block_k, inner % config.block_k == 0)


class Results(NamedTuple):
    """Where a program writes; `part` and `ticket` are None where the sums of splits are not added here."""

    out: Any  # [rows, OUTER], or [rows, OUTER / 2] if GATED; [splits, rows, OUTER] float32 if not added here
    bias: Any  # [OUTER] or None
    part: Any  # [tiles, splits, COLUMNS, ROWS] float32
    ticket: Any  # [tiles] int32 zeros, left as zeros


@triton.jit
def weight_at(of, k_first, lane):
    return of.weight + of.weight_row.to(tl.int64)[:, None] * of.K + k_first + lane[None, :]


@triton.jit
def x_at(of, k_first, lane):
    return of.x + of.row.to(tl.int64)[None, :] * of.K + k_first + lane[:, None]


@triton.jit
def arrived(ticket_ptr, splits):
    """Whether all splits of a tile have written their partial sums, now that this one has."""
    tl.debug_barrier()  # all threads have stored before one of them raises the counter
    return tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == splits - 1


@triton.jit
def sum_of_splits(at, splits, SIZE: tl.constexpr):
    """The partial sums, SIZE numbers apart, added in order. Read past the first-level cache, which does not see what
    other processors write."""
    total = tl.load(at, cache_modifier=".cg")
    for split in tl.range(1, splits):
        total += tl.load(at + split * SIZE, cache_modifier=".cg")
    return total


@triton.jit
def _write(out_ptr, bias_ptr, acc, of, tile, OUTER, TILE: tl.constexpr, GATED: tl.constexpr):
    """Bias, rounding, and the activation if GATED."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + of.weight_row).to(tl.float32)[:, None]
    narrow = acc.to(out_ptr.dtype.element_ty)
    if GATED:
        HALF: tl.constexpr = TILE.COLUMNS // 2
        pairs = tl.permute(tl.reshape(narrow.to(tl.float32), (2, HALF, TILE.ROWS)), (1, 2, 0))
        gate, up = tl.split(pairs)
        narrow = gated(gate, up, out_ptr.dtype.element_ty)
        width = OUTER // 2
        column = tile * HALF + tl.arange(0, HALF)
    else:
        width = OUTER
        column = tile * TILE.COLUMNS + tl.arange(0, TILE.COLUMNS)
    at = out_ptr + of.row.to(tl.int64)[None, :] * width + column[:, None]
    tl.store(at, narrow, mask=(column < width)[:, None] & (of.row < of.rows)[None, :])


@triton.jit
def finish(results, acc, of, tile, split, splits, OUTER, TILE: tl.constexpr, GATED: tl.constexpr):
    """Write `acc`, the sum of a split, or the result if this is the last split of its tile to arrive."""
    if results.ticket is None:  # all splits, or one of those that the next kernel adds
        out_ptr = results.out + split.to(tl.int64) * of.rows * OUTER
        _write(out_ptr, results.bias, acc, of, tile, OUTER, TILE, GATED)
    else:
        place = tl.program_id(0) * tl.num_programs(1) + tile
        SIZE: tl.constexpr = TILE.COLUMNS * TILE.ROWS
        lane = tl.arange(0, TILE.COLUMNS)[:, None] * TILE.ROWS + tl.arange(0, TILE.ROWS)[None, :]
        at = results.part + place.to(tl.int64) * splits * SIZE + lane
        tl.store(at + split * SIZE, acc)
        if arrived(results.ticket + place, splits):
            total = sum_of_splits(at, splits, SIZE)
            tl.store(results.ticket + place, 0)
            _write(results.out, results.bias, total, of, tile, OUTER, TILE, GATED)


_tickets_of: dict[torch.device, Tensor] = {}


def tickets(device: torch.device, tiles: int) -> Tensor:
    """Zeros that every launch leaves as zeros. Launches that share them must be ordered, as on one stream.

    Raises:
        RuntimeError: the first use on the device is inside a graph capture, where the zeros would not be written.
    """
    found = _tickets_of.get(device)
    if found is None or found.shape[0] < tiles:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("linear: call it once outside of a graph capture first, its counters must be zeroed")
        found = torch.zeros(max(tiles, _FEWEST_TICKETS), dtype=torch.int32, device=device)
        _tickets_of[device] = found
    return found


def work_of(
    product: Product, bias: Tensor | None, out: Tensor, is_gated: bool, config: LinearConfig
) -> tuple[tuple[int, int, int], Results]:
    """The programs of a launch, and where they write; arguments as of `launch_linear`."""
    x, outer = product.x, product.weight.shape[0]
    columns, width = (config.columns // 2, outer // 2) if is_gated else (config.columns, outer)
    row_blocks, tiles = -(-product.rows // config.rows), -(-width // columns)
    grid = (row_blocks, tiles, 1 if config.in_order else config.splits)
    if config.splits == 1 or out.ndim != x.ndim or config.in_order:
        return grid, Results(out, bias, None, None)
    part_shape = (row_blocks * tiles, config.splits, config.columns, config.rows)
    part = torch.empty(part_shape, dtype=torch.float32, device=x.device)
    return grid, Results(out, bias, part, tickets(x.device, row_blocks * tiles))
