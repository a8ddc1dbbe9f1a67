# mypy: ignore-errors
"""The k largest logits of a row over a split vocabulary, without a sort.

The first kernel reads the logits once: the largest logit of every tile, and of every strip of tiles its largest logit m
and s = sum exp(l - m). The second kernel runs one program per row. The k best tokens, in the order (logit
falling, id rising), lie in the k tiles whose best token comes first; these tiles are read again.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.pdl import begin
from specdec_kernels.sampling import device as d
from specdec_kernels.tree.configs import CONFIGS
from specdec_kernels.tree.kernel_selection import NO_SCORE
from specdec_kernels.tree.types import DraftTopk

_NO_TOKEN = tl.constexpr((1 << 31) - 1)
_MIN_LANES = 32  # a whole warp, whose integer maximum is one instruction


@triton.jit
def _tile_statistics(logit):
    """The largest of each tile and of all, and the sum of the weights of all."""
    tile_max = tl.max(logit, 1)
    top = tl.max(tile_max, 0)
    return tile_max, top, tl.sum(tl.exp2((logit - d.finite(top)) * d.LOG2E))


@triton.jit
def _topk_tiles_kernel(
    logits_ptr,  # [R, VOCAB], row stride row_stride
    tile_max_ptr,  # [R, TILES] float32
    strip_ptr,  # [2, R, strips] float32: maximum and sum
    row_stride,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    begin(PDL)
    logit = d.load_entries(logits_ptr, row, column, row_stride, column < VOCAB)
    tile_max, top, total = _tile_statistics(logit)
    # An infinity shows in the largest logit, and a NaN in the sum; replacing them in every entry would be slower.
    if ((top <= d.FLOAT32_MAX) & (total == total)) == 0:
        tile_max, top, total = _tile_statistics(d.usable(logit))
    tl.store(tile_max_ptr + row * TILES + tile, tile_max, mask=tile < TILES)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(strip_ptr + place, top)
    tl.store(strip_ptr + tl.num_programs(0) * tl.num_programs(1) + place, total)


@triton.jit
def _topk_merge_kernel(
    logits_ptr,  # [R, VOCAB], row stride row_stride
    tile_max_ptr,  # [R, TILES] float32
    strip_ptr,  # [2, R, STRIPS] float32: maximum and sum
    probs_ptr,  # [R, COUNT] float32
    tokens_ptr,  # [R, COUNT] int64
    row_stride,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    STRIPS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK_T)
    strip = tl.arange(0, BLOCK_S)
    begin(PDL)
    tile_max = tl.load(tile_max_ptr + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
    place = strip_ptr + row * STRIPS + strip
    strip_max = tl.load(place, mask=strip < STRIPS, other=float("-inf"))
    strip_sum = tl.load(place + tl.num_programs(0).to(tl.int64) * STRIPS, mask=strip < STRIPS, other=0.0)
    shift = d.finite(tl.max(strip_max, 0))
    total = tl.sum(strip_sum * tl.exp2((strip_max - shift) * d.LOG2E), 0)
    total = tl.where(total > 0, total, 1.0)

    # Lanes without a tile hold -inf, and come after the tiles that hold -inf.
    image = d.sort_key(tile_max, 0)
    lane = tl.arange(0, BLOCK_K)
    chosen = tl.full((BLOCK_K,), TILES, tl.int32)
    for rank in range(COUNT if COUNT < TILES else TILES):
        best = tl.max(image, 0)
        winner = tl.min(tl.where(image == best, tile, TILES), 0)  # among equals the lowest tile
        chosen = tl.where(lane == rank, winner, chosen)
        image = tl.where(tile == winner, NO_SCORE, image)
    column = tl.reshape(chosen[:, None] * TILE + tl.arange(0, TILE)[None, :], (BLOCK_K * TILE,))
    image = d.sort_key(d.load_values(logits_ptr, row, column, row_stride, column < VOCAB), 0)
    token = lane * 0
    key = lane * 0
    for rank in range(COUNT):
        best = tl.max(image, 0)
        winner = tl.min(tl.where(image == best, column, _NO_TOKEN), 0)
        token = tl.where(lane == rank, winner, token)
        key = tl.where(lane == rank, best, key)
        image = tl.where(column == winner, NO_SCORE, image)
    logit = d.key_value(key, 0)
    prob = tl.exp2((logit - shift) * d.LOG2E) / total
    prob = tl.where(logit > float("-inf"), prob, 0.0)
    tl.store(probs_ptr + row * COUNT + lane, prob, mask=lane < COUNT)
    tl.store(tokens_ptr + row * COUNT + lane, token.to(tl.int64), mask=lane < COUNT)


def draft_topk(logits: Tensor, k: int) -> DraftTopk:
    rows, vocab = logits.shape
    config = CONFIGS[current_chip(logits)]
    tiles = triton.cdiv(vocab, config.topk_tile)
    all_tiles = max(_MIN_LANES, triton.next_power_of_2(tiles))
    block_t = min(all_tiles, config.topk_tiles)
    strips = triton.cdiv(tiles, block_t)
    out = partial(torch.empty, dtype=torch.float32, device=logits.device)
    tile_max, strip = out(rows * tiles), out(2 * rows * strips)
    result = DraftTopk(out(rows, k), out(rows, k, dtype=torch.int64))
    sizes = dict(VOCAB=vocab, TILES=tiles, TILE=config.topk_tile)
    launch(
        _topk_tiles_kernel, (rows, strips), logits, tile_max, strip, logits.stride(0),
        BLOCK_T=block_t, num_warps=config.topk_warps, **sizes,
    )  # fmt: skip
    launch(
        _topk_merge_kernel, (rows,), logits, tile_max, strip, *result, logits.stride(0), STRIPS=strips,
        COUNT=k, BLOCK_T=all_tiles, BLOCK_S=lanes(strips), BLOCK_K=lanes(k), num_warps=config.merge_warps, **sizes,
    )  # fmt: skip
    return result
