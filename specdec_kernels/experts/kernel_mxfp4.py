"""Products with a weight in MXFP4 (OCP Microscaling Formats 1.0): codes of 4 bits, read as they are stored.

    weight[row, k] = value(code[row, k]) * 2^(scale[row, k // 32] - 127)        value: E2M1, one of +-{0, .5, .. 4, 6}

A code's exponent and mantissa bits, moved to where float32 has them, are its value times 2^-126, zero and 0.5 included.
Two exact multiplications give the weight, which bfloat16 holds exactly too; float16 rounds it.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

_UNBIASED = tl.constexpr(2.0**126)


@triton.jit
def _power_of_two(scale):
    """2^(scale - 127) of uint8; the least is subnormal."""
    bits = scale.to(tl.int32)
    return tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)


@triton.jit
def _dequantised(codes, scales, DTYPE: tl.constexpr):
    """[C, 32 G] in DTYPE, of codes [C, G, 16] uint8, the even element in the low half of a byte, and scales [C, G]."""
    COLUMNS: tl.constexpr = codes.shape[0]
    INNER: tl.constexpr = 32 * codes.shape[1]
    byte = codes.to(tl.int32)
    factor = _power_of_two(scales)[:, :, None]
    low = (((byte & 7) << 22) | ((byte & 8) << 28)).to(tl.float32, bitcast=True)
    high = (((byte & 0x70) << 18) | ((byte & 0x80) << 24)).to(tl.float32, bitcast=True)
    low = (low * _UNBIASED * factor).to(DTYPE)
    high = (high * _UNBIASED * factor).to(DTYPE)
    return tl.reshape(tl.join(low, high), (COLUMNS, INNER))


@triton.jit
def mxfp4_partial_sum(of, scale_ptr, code_stride, scale_stride, k_first, k_end, TILE: tl.constexpr):
    """As `projection.kernel.partial_sum`; `of.weight` are codes with rows of `code_stride` bytes, `scale_ptr` scales
    with rows of `scale_stride`. k_first and k_end are multiples of 32."""
    group, byte, lane = tl.arange(0, TILE.BLOCK_K // 32), tl.arange(0, 16), tl.arange(0, TILE.BLOCK_K)
    weight_row = of.weight_row.to(tl.int64)
    codes_at = of.weight + weight_row[:, None, None] * code_stride + k_first // 2
    codes_at += group[None, :, None] * 16 + byte[None, None, :]
    scales_at = scale_ptr + weight_row[:, None] * scale_stride + k_first // 32 + group[None, :]
    x_at = of.x + of.row.to(tl.int64)[None, :] * of.K + k_first + lane[:, None]
    here = (of.row < of.rows)[None, :]
    acc = tl.full([TILE.COLUMNS, TILE.ROWS], 0.0, tl.float32)
    for first in tl.range(k_first, k_end, TILE.BLOCK_K):
        if TILE.EVEN_K:
            codes = tl.load(codes_at, eviction_policy="evict_first")
            scales = tl.load(scales_at, eviction_policy="evict_first")
            x = tl.load(x_at, mask=here, other=0.0)
        else:
            inside = first + group * 32 < k_end
            codes = tl.load(codes_at, mask=inside[None, :, None], other=0, eviction_policy="evict_first")
            # Not masked: rows of scales are padded to whole steps, and a mask by group is none by words.
            scales = tl.load(scales_at, eviction_policy="evict_first")
            x = tl.load(x_at, mask=(first + lane < k_end)[:, None] & here, other=0.0)
        acc = tl.dot(_dequantised(codes, scales, x.dtype), x, acc, input_precision="ieee")
        codes_at += TILE.BLOCK_K // 2
        scales_at += TILE.BLOCK_K // 32
        x_at += TILE.BLOCK_K
    return acc
