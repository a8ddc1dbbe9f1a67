# mypy: ignore-errors
"""The k largest logits of a row over a split vocabulary, without a sort.

The first kernel reads the logits once. It finds of every tile of 512 the largest logit m_t, the first id that has it,
and s_t = sum exp((l - m_t) / T). The second kernel runs one program per row. The best tile's maximum is the next token;
that tile alone is read again (it is in the cache) for its largest entry after the taken one in the order (logit
falling, id rising). Lanes past the vocabulary are -inf of the highest ids, the last in that order, and k <= V never
reaches them. So k tokens cost k tiles. Tiles of about the square root of the vocabulary balance the search over tiles
with the search inside one. Z = sum_t s_t exp((m_t - max m) / T) turns logits into probabilities.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.sampling.device import key_value, sort_key, usable
from specdec_kernels.tree.configs import CONFIGS
from specdec_kernels.tree.kernel_selection import NO_SCORE
from specdec_kernels.tree.types import DraftTopk

_TILE = 512
_MIN_LANES = 32  # a whole warp, whose integer maximum is one instruction
_NO_TOKEN = tl.constexpr((1 << 31) - 1)


@triton.jit
def _load_logits(logits_ptr, row_offset, column, VOCAB: tl.constexpr):
    """Logits as float32 with NaN as -inf and +inf as the largest float32; -inf past the vocabulary."""
    logit = tl.load(logits_ptr + row_offset + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
    return usable(logit)


@triton.jit
def _divisor(temperature_ptr, row):
    """The row's temperature, 1 where there is none or it is not positive."""
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        divisor = tl.where(temperature > 0, temperature, 1.0)
    else:
        divisor = 1.0
    return divisor


@triton.jit
def _topk_tiles_kernel(
    logits_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R] float32, or None
    tile_max_ptr,  # [R, TILES] float32
    tile_token_ptr,  # [R, TILES] int32
    tile_sum_ptr,  # [R, TILES] float32
    row_stride,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    logit = _load_logits(logits_ptr, row * row_stride, column, VOCAB)
    top = tl.max(logit, 1)
    first = tl.min(tl.where(logit == top[:, None], column, _NO_TOKEN), 1)
    shift = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(tl.exp((logit - shift[:, None]) / _divisor(temperature_ptr, row)), 1)
    place = row * TILES + tile
    tl.store(tile_max_ptr + place, top, mask=tile < TILES)
    tl.store(tile_token_ptr + place, first, mask=tile < TILES)
    tl.store(tile_sum_ptr + place, total, mask=tile < TILES)


@triton.jit
def _topk_merge_kernel(
    logits_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R] float32, or None
    tile_max_ptr,  # [R, TILES] float32
    tile_token_ptr,  # [R, TILES] int32
    tile_sum_ptr,  # [R, TILES] float32
    probs_ptr,  # [R, COUNT] float32
    tokens_ptr,  # [R, COUNT] int64
    row_stride,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK_T)
    live = tile < TILES
    tile_max = tl.load(tile_max_ptr + row * TILES + tile, mask=live, other=float("-inf"))
    tile_sum = tl.load(tile_sum_ptr + row * TILES + tile, mask=live, other=0.0)
    next_token = tl.load(tile_token_ptr + row * TILES + tile, mask=live, other=_NO_TOKEN)
    divisor = _divisor(temperature_ptr, row)
    top = tl.max(tile_max, 0)
    shift = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(tile_sum * tl.exp((tile_max - shift) / divisor), 0)
    total = tl.where(total > 0, total, 1.0)

    next_image = tl.where(live, sort_key(tile_max, 0), NO_SCORE)
    one_hot = 1.0
    for rank in range(COUNT):
        image = tl.max(next_image, 0)
        token = tl.min(tl.where(next_image == image, next_token, _NO_TOKEN), 0)
        logit = key_value(image, 0)
        prob = tl.exp((logit - shift) / divisor) / total
        if temperature_ptr is not None:
            prob = tl.where(tl.load(temperature_ptr + row) > 0, prob, one_hot)
            one_hot = 0.0
        tl.store(probs_ptr + row * COUNT + rank, tl.where(logit > float("-inf"), prob, 0.0))
        tl.store(tokens_ptr + row * COUNT + rank, token.to(tl.int64))

        winner = token // TILE
        column = winner * TILE + tl.arange(0, TILE)
        other = sort_key(_load_logits(logits_ptr, row * row_stride, column, VOCAB), 0)
        after = (other < image) | ((other == image) & (column > token))
        other = tl.where(after, other, NO_SCORE)
        second = tl.max(other, 0)
        second_token = tl.min(tl.where(other == second, column, _NO_TOKEN), 0)
        next_image = tl.where(tile == winner, second, next_image)
        next_token = tl.where(tile == winner, second_token, next_token)


def draft_topk(logits: torch.Tensor, k: int, temperature: torch.Tensor | None = None) -> DraftTopk:
    """See `specdec_kernels.tree.draft_topk`."""
    rows, vocab = logits.shape
    config = CONFIGS[current_chip(logits)]
    tiles = triton.cdiv(vocab, _TILE)
    all_tiles = max(_MIN_LANES, triton.next_power_of_2(tiles))
    block_t = min(all_tiles, config.topk_tiles)

    def by_tile(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, tiles, dtype=dtype, device=logits.device)

    stats = (by_tile(torch.float32), by_tile(torch.int32), by_tile(torch.float32))
    result = DraftTopk(
        torch.empty(rows, k, dtype=torch.float32, device=logits.device),
        torch.empty(rows, k, dtype=torch.int64, device=logits.device),
    )
    sizes = dict(VOCAB=vocab, TILES=tiles, TILE=_TILE)
    launch(
        _topk_tiles_kernel, (rows, triton.cdiv(tiles, block_t)), logits, temperature, *stats, logits.stride(0),
        BLOCK_T=block_t, num_warps=config.topk_warps, **sizes,
    )  # fmt: skip
    launch(
        _topk_merge_kernel, (rows,), logits, temperature, *stats, *result, logits.stride(0),
        COUNT=k, BLOCK_T=all_tiles, num_warps=1, **sizes,
    )  # fmt: skip
    return result
