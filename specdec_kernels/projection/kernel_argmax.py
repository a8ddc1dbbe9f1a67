"""The largest column of each row of a product, found while the product is computed; the product is not written.

A program of the first kernel writes the largest logit of a tile of columns and its column. The second kernel takes the
largest of all tiles and, where the rows of the weight are divided among ranks, exchanges it in words that hold their
call, as in `all_reduce`. The places of two calls lie apart: a rank that has received a call from all others knows that
they have read the call before it.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.all_reduce.kernel import packed_word, received
from specdec_kernels.all_reduce.types import SLOTS, Exchange
from specdec_kernels.launch import launch
from specdec_kernels.pdl import begin, launch_dependents, wait_for_predecessor
from specdec_kernels.projection import reference
from specdec_kernels.projection.device import Operands, Tile, weight_rows
from specdec_kernels.projection.kernel import config_of, partial_sum, takes, with_later_splits
from specdec_kernels.projection.types import Product
from specdec_kernels.sampling.device import usable

_SLOTS = tl.constexpr(SLOTS)
_NO_COLUMN = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["rows", "tiles", "splits"])
def _argmax_kernel(
    x_ptr,  # [rows, K]
    weight_ptr,  # [OUTER, K]
    best_ptr,  # [rows, tiles] float32, largest logit of a tile
    column_ptr,  # [rows, tiles] int32, its lowest column
    rows,
    tiles,
    OUTER,
    K,
    splits,
    split_length,
    TILE: tl.constexpr,  # Tile
    IN_ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * TILE.ROWS + tl.arange(0, TILE.ROWS)
    tile = tl.program_id(1)
    weight_row = weight_rows(tile, OUTER, TILE.COLUMNS, False)
    of = Operands(x_ptr, weight_ptr, weight_row, row, rows, K)
    wait_for_predecessor(PDL)
    k_end = tl.minimum(K, split_length)
    acc = partial_sum(of, 0, k_end, TILE)
    if IN_ORDER:
        acc = with_later_splits(acc, of, splits, split_length, TILE)
    launch_dependents(PDL)
    logits = usable(acc.to(x_ptr.dtype.element_ty).to(tl.float32))
    best = tl.max(logits, 0)
    # Lanes past the last column repeat it, so they name a column that is there.
    lowest = tl.min(tl.where(logits == best[None, :], weight_row[:, None], _NO_COLUMN), 0)
    at = row.to(tl.int64) * tiles + tile
    tl.store(best_ptr + at, best, mask=row < rows)
    tl.store(column_ptr + at, lowest, mask=row < rows)


@triton.jit
def _largest_of_ranks(
    top,  # float32, largest logit of this rank's columns
    column,  # int32, its lowest column
    memory_ptr,
    offsets_ptr,  # [RANKS] int64
    row,
    capacity,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """(largest logit, lowest column) of all ranks' columns: two words for every other rank, two words of each."""
    lane = tl.arange(0, 2)
    slot_words = RANKS * capacity * 2
    own_ptr = memory_ptr + tl.load(offsets_ptr + RANK)
    counter_ptr = own_ptr + _SLOTS * slot_words + row
    call = (tl.load(counter_ptr) + 1).to(tl.int32)
    first = (call % _SLOTS) * slot_words
    word = packed_word(tl.where(lane == 0, top.to(tl.int32, bitcast=True), column), call)
    for other in tl.static_range(RANKS):
        if other != RANK:
            place = first + (RANK * capacity + row) * 2 + lane
            tl.store(memory_ptr + tl.load(offsets_ptr + other) + place, word)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            told = received(own_ptr + first + (rank * capacity + row) * 2 + lane, call, lane < 2)
            other_top = tl.sum(tl.where(lane == 0, told, 0), 0).to(tl.float32, bitcast=True)
            other_column = tl.sum(tl.where(lane == 1, told, 0), 0)
            wins = (other_top > top) | ((other_top == top) & (other_column < column))
            top = tl.where(wins, other_top, top)
            column = tl.where(wins, other_column, column)
    tl.store(counter_ptr, call.to(tl.int64))
    return top, column


@triton.jit(do_not_specialize=["tiles", "first_column", "capacity"])
def _argmax_of_tiles_kernel(
    best_ptr,  # [rows, tiles] float32
    column_ptr,  # [rows, tiles] int32
    out_ptr,  # [rows] int64
    memory_ptr,  # this rank's memory of an exchange, int64, or None
    offsets_ptr,  # [RANKS] int64, or None
    tiles,
    first_column,
    capacity,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    begin(PDL)
    best = tl.load(best_ptr + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    column = tl.load(column_ptr + row * tiles + tile, mask=tile < tiles, other=_NO_COLUMN)
    top = tl.max(best, 0)
    lowest = tl.min(tl.where(best == top, column, _NO_COLUMN), 0) + first_column
    if memory_ptr is not None:
        top, lowest = _largest_of_ranks(top, lowest, memory_ptr, offsets_ptr, row, capacity, RANK, RANKS)
    tl.store(out_ptr + row, tl.where(top > float("-inf"), lowest, -1).to(tl.int64))


def linear_argmax(product: Product, exchange: Exchange | None = None) -> Tensor:
    """The largest columns of logits with the bits of `linear`: a program adds all splits."""
    x, weight, _ = product
    if exchange is None and not takes(product):
        return reference.linear_argmax(product)
    outer, inner = weight.shape
    rows, config = product.rows, config_of(product)
    tiles = -(-outer // config.columns)
    best = torch.empty((rows, tiles), dtype=torch.float32, device=x.device)
    column = torch.empty((rows, tiles), dtype=torch.int32, device=x.device)
    launch(
        _argmax_kernel,
        (-(-rows // config.rows), tiles),
        *(x, weight, best, column, rows, tiles, outer, inner, config.splits, config.split_length(inner)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        TILE=Tile.of(config, inner),
        IN_ORDER=config.splits > 1,
    )
    out = torch.empty(x.shape[:-1], dtype=torch.int64, device=x.device)
    block = triton.next_power_of_2(tiles)
    memory, offsets, rank, capacity, _ = exchange or (None, None, 0, 0, 0)
    launch(
        _argmax_of_tiles_kernel,
        (rows,),
        *(best, column, out, memory, offsets, tiles, rank * outer, capacity),
        num_warps=max(1, min(8, block // 256)),
        BLOCK=block,
        RANK=rank,
        RANKS=1 if offsets is None else len(offsets),
    )
    return out
