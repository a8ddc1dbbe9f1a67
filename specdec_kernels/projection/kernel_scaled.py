"""Products of few rows with a weight of float8 codes, which are read once, as bytes.

    acc[column, row] += scale[column, group] * sum_k code[column, k] x[row, k]    for each group of the inner dimension

Codes are widened to the type of x, which is exact, so only the sums round. A group of 128 is one product from zeros,
multiplied by its scale as it is added; where a row of the weight has one scale, it multiplies the sum of a split. The
steps along the inner dimension depend on the shape of the weight alone: a row has the same bits among any others.

With `float8_x` x is rounded to codes too, each group of 128 numbers of a row by a scale of its own, and both are
multiplied as codes where the chip can (sm_90, sm_100). Few rows are rounded by every program that reads them; more rows
once, by a kernel before the product. Both have the same bits.

An e4m3 code has the sign, four bits of the exponent and three of the mantissa of a number. At these places of a wider
type they are the number times a power of two, also where they are a subnormal: 2^-120 in bfloat16 and float32, whose
exponents have eight bits, and 2^-8 in float16.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.kv_write.kernel import to_e4m3
from specdec_kernels.launch import current_chip, launch
from specdec_kernels.pdl import launch_dependents, wait_for_predecessor
from specdec_kernels.projection import kernel_scaled_hopper
from specdec_kernels.projection.configs import ROUNDED_APART_ROWS, LinearConfig
from specdec_kernels.projection.device import Operands, Tile, finish, weight_at, weight_rows, work_of, x_at
from specdec_kernels.projection.rounding import multiplies_codes, rounded, rounded_rows
from specdec_kernels.projection.types import GROUP, Product, ScaledWeight

_GROUP = tl.constexpr(GROUP)
_TORCH_ROWS = 16  # a multiple of which torch multiplies
_TWO_120 = tl.constexpr(2.0**120)
# Four codes in a register to two registers of two numbers: the bytes spread to the upper halves, the seven bits below
# the sign moved to their places, a product with the power of two.
_SPREAD = tl.constexpr(
    "{ .reg .b32 low, high, sign, factor, zero; mov.b32 zero, 0x80008000; "
    "prmt.b32 low, $2, 0, 0x1404; prmt.b32 high, $2, 0, 0x3424; "
)
_TO_BFLOAT16 = tl.constexpr(
    _SPREAD.value + "mov.b32 factor, 0x7B807B80; "
    "and.b32 sign, low, zero; shr.b32 low, low, 4; and.b32 low, low, 0x07F007F0; or.b32 low, low, sign; "
    "and.b32 sign, high, zero; shr.b32 high, high, 4; and.b32 high, high, 0x07F007F0; or.b32 high, high, sign; "
    "fma.rn.bf16x2 $0, low, factor, zero; fma.rn.bf16x2 $1, high, factor, zero; }"
)
_TO_FLOAT16 = tl.constexpr(
    _SPREAD.value + "mov.b32 factor, 0x5C005C00; "
    "and.b32 sign, low, zero; shr.b32 low, low, 1; and.b32 low, low, 0x3F803F80; or.b32 low, low, sign; "
    "and.b32 sign, high, zero; shr.b32 high, high, 1; and.b32 high, high, 0x3F803F80; or.b32 high, high, sign; "
    "fma.rn.f16x2 $0, low, factor, zero; fma.rn.f16x2 $1, high, factor, zero; }"
)


@triton.jit
def widened(codes, like, NVIDIA: tl.constexpr):
    """Numbers of e4m3 codes (uint8) in the type of `like`, exact for every finite code."""
    if like.dtype == tl.float32:
        bits = codes.to(tl.uint32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * _TWO_120
    elif NVIDIA:
        return tl.inline_asm_elementwise(
            _TO_BFLOAT16 if like.dtype == tl.bfloat16 else _TO_FLOAT16, "=r,=r,r", [codes], like.dtype, True, 4
        )
    else:
        bits = codes.to(tl.uint16)
        if like.dtype == tl.bfloat16:
            bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 4)
            return bits.to(tl.bfloat16, bitcast=True) * _TWO_120
        else:
            bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
            return bits.to(tl.float16, bitcast=True) * 256.0


class Scales(NamedTuple):
    """Where a program reads its scales."""

    rows: Any  # [COLUMNS]: of each row of the weight
    first: Any  # of the first half of the rows, which is one group
    second: Any
    x: Any  # [groups, M] of x, if APART


class Scaling(NamedTuple):
    """Compile-time properties of the scales. GROUP_ROWS: rows of the weight that have one. BY_ROW: each row has one for
    all groups. HALVES: each half of a program's rows has one. FLOAT8_X: x is rounded to codes; APART: before the
    product. CODES: the chip multiplies codes."""

    GROUP_ROWS: Any
    BY_ROW: Any
    HALVES: Any
    NVIDIA: Any
    FLOAT8_X: Any
    APART: Any
    CODES: Any


@triton.jit
def scales_of(
    scale_ptr, x_scale_ptr, weight_row, tile, OUTER, groups, SCALING: tl.constexpr, COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Where a program's scales begin; a gated tile holds rows of two places."""
    GROUP_ROWS: tl.constexpr = SCALING.GROUP_ROWS
    HALF: tl.constexpr = COLUMNS // 2
    first = tile * (HALF if GATED else COLUMNS)
    second = tl.minimum(first + (OUTER // 2 if GATED else HALF), OUTER - 1)
    return Scales(
        scale_ptr + (weight_row // GROUP_ROWS).to(tl.int64) * groups,
        scale_ptr + (first // GROUP_ROWS).to(tl.int64) * groups,
        scale_ptr + (second // GROUP_ROWS).to(tl.int64) * groups,
        x_scale_ptr,
    )


@triton.jit
def _scale_at(scales, group, COLUMNS: tl.constexpr, HALVES: tl.constexpr):
    """[COLUMNS] float32: the scales of one group of the inner dimension."""
    if HALVES:
        return tl.where(
            tl.arange(0, COLUMNS) < COLUMNS // 2, tl.load(scales.first + group), tl.load(scales.second + group)
        )
    else:
        return tl.load(scales.rows + group)


@triton.jit
def _x_of(x, scales, of, group, SCALING: tl.constexpr):
    """A group of x as the product takes it, and what its sums are multiplied by, [ROWS]."""
    if SCALING.APART:
        numbers, scale = x, tl.load(scales.x + group * of.rows + of.row, mask=of.row < of.rows, other=0.0)
    else:
        wide, scale = rounded(x, 0)
        numbers = wide.to(tl.float8e4nv) if SCALING.CODES else widened(to_e4m3(wide), x, SCALING.NVIDIA)
    return numbers, scale


@triton.jit
def scaled_sum(of, scales, k_first, k_end, TILE: tl.constexpr, SCALING: tl.constexpr):
    """[COLUMNS, ROWS] float32: the sum over k_first to k_end. No step is in two groups."""
    lane = tl.arange(0, TILE.BLOCK_K)
    weight = weight_at(of, k_first, lane)
    x = x_at(of, k_first, lane)
    here = (of.row < of.rows)[None, :]
    acc = tl.full([TILE.COLUMNS, TILE.ROWS], 0.0, tl.float32)
    following = _scale_at(scales, 0 if SCALING.BY_ROW else k_first // _GROUP, TILE.COLUMNS, SCALING.HALVES)
    for first in tl.range(k_first, k_end, TILE.BLOCK_K):
        if TILE.EVEN_K:
            codes = tl.load(weight, eviction_policy="evict_first")
            other = tl.load(x, mask=here, other=0.0)
        else:
            inside = first + lane < k_end
            codes = tl.load(weight, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            other = tl.load(x, mask=inside[:, None] & here, other=0.0)
        if SCALING.FLOAT8_X:
            other, x_scale = _x_of(other, scales, of, first // _GROUP, SCALING)
        numbers = codes if SCALING.CODES else widened(codes, other, SCALING.NVIDIA)
        if SCALING.BY_ROW and not SCALING.FLOAT8_X:
            acc = tl.dot(numbers, other, acc, input_precision="ieee")
        else:
            part = tl.dot(numbers, other, input_precision="ieee")
            if SCALING.FLOAT8_X:
                part *= x_scale[None, :]
            if SCALING.BY_ROW:
                acc += part
            else:
                scale = following
                # Requested a step ahead: it is not among the loads that the compiler moves ahead, those of the product.
                group = tl.minimum(first + TILE.BLOCK_K, of.K - 1) // _GROUP
                following = _scale_at(scales, group, TILE.COLUMNS, SCALING.HALVES)
                acc = tl.fma(part, tl.broadcast_to(scale[:, None], part.shape), acc)
        weight += TILE.BLOCK_K
        x += TILE.BLOCK_K
    return acc * following[:, None] if SCALING.BY_ROW else acc


@triton.jit(do_not_specialize=["rows", "splits"])
def _scaled_linear_kernel(
    x_ptr,  # [rows, K], codes if APART
    x_scale_ptr,  # [groups, rows] float32 if APART, else anything
    weight_ptr,  # [OUTER, K]: uint8, or float8 if CODES
    scale_ptr,  # [ceil(OUTER / GROUP_ROWS), groups] float32
    results,  # Results, written
    rows,
    OUTER,
    K,
    groups,
    splits,
    split_length,
    TILE: tl.constexpr,  # Tile
    SCALING: tl.constexpr,  # Scaling
    GATED: tl.constexpr,
    IN_ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * TILE.ROWS + tl.arange(0, TILE.ROWS)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    weight_row = weight_rows(tile, OUTER, TILE.COLUMNS, GATED)
    of = Operands(x_ptr, weight_ptr, weight_row, row, rows, K)
    scales = scales_of(scale_ptr, x_scale_ptr, weight_row, tile, OUTER, groups, SCALING, TILE.COLUMNS, GATED)
    k_first = split * split_length
    wait_for_predecessor(PDL)
    acc = scaled_sum(of, scales, k_first, tl.minimum(K, k_first + split_length), TILE, SCALING)
    if IN_ORDER:
        for later in tl.range(1, splits):
            k_first = later * split_length
            acc += scaled_sum(of, scales, k_first, tl.minimum(K, k_first + split_length), TILE, SCALING)
    launch_dependents(PDL)
    finish(results, acc, of, tile, split, splits, OUTER, TILE, GATED)


def scaling_of(weight: ScaledWeight, chip: str, half: int, is_gated: bool, is_apart: bool = False) -> Scaling:
    """For tiles of twice `half` rows of the weight."""
    outer, inner = weight.shape[-2:]
    return Scaling(
        GROUP_ROWS=weight.group_rows,
        BY_ROW=weight.group_rows == 1 and weight.group_inner >= inner,
        HALVES=weight.group_rows % half == 0 and not (is_gated and outer // 2 % half),
        NVIDIA=chip.startswith("sm"),
        FLOAT8_X=weight.float8_x,
        APART=is_apart,
        CODES=weight.float8_x and multiplies_codes(chip),
    )


def numbers_of(weight: ScaledWeight, chip: str) -> Tensor:
    """The codes as a kernel takes them: float8 where the chip multiplies them, else bytes."""
    return weight.codes.view(torch.float8_e4m3fn) if weight.float8_x and multiplies_codes(chip) else weight.codes


def torch_takes(product: Product) -> bool:
    """Whether torch multiplies the codes of x and the weight, whose bits of a row depend on the number of rows."""
    weight = product.weight
    assert isinstance(weight, ScaledWeight)
    is_block = weight.group_rows == weight.group_inner == GROUP and not any(size % GROUP for size in weight.shape)
    x = product.x
    return weight.float8_x and is_block and x.dtype == torch.bfloat16 and x.is_cuda and current_chip(x) == "sm90"


def by_torch(product: Product, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """The product of more rows than the kernel takes."""
    weight = product.weight
    assert isinstance(weight, ScaledWeight)
    codes, scales = rounded_rows(product.x, _TORCH_ROWS)
    dtype = torch.float32 if bias is not None else out_dtype or product.x.dtype
    result = F.scaled_mm(
        *(codes, weight.codes.view(torch.float8_e4m3fn).t()),
        *(scales.t(), F.ScalingType.BlockWise1x128, weight.scales.t(), F.ScalingType.BlockWise128x128),
        output_dtype=dtype,
    )
    if bias is not None:
        result = (result + bias.float()).to(out_dtype or product.x.dtype)
    return result[: product.rows].view(product.shape)


def launch_scaled(product: Product, bias: Tensor | None, out: Tensor, is_gated: bool, config: LinearConfig) -> None:
    """`kernel.launch_linear` for a `ScaledWeight`."""
    x, weight, _ = product
    assert isinstance(weight, ScaledWeight)
    outer, inner = weight.shape
    if config.ring and kernel_scaled_hopper.takes(product, config):
        kernel_scaled_hopper.launch_hopper(product, bias, out, is_gated, config)
        return
    chip = current_chip(x)
    grid, results = work_of(product, bias, out, is_gated, config)
    apart = weight.float8_x and multiplies_codes(chip) and product.rows > ROUNDED_APART_ROWS
    numbers, x_scales = rounded_rows(x) if apart else (x, weight.scales)
    launch(
        _scaled_linear_kernel,
        grid,
        *(numbers, x_scales, numbers_of(weight, chip), weight.scales, results),
        *(product.rows, outer, inner, weight.scales.shape[1], config.splits, config.split_length(inner)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        TILE=Tile.of(config, inner),
        SCALING=scaling_of(weight, chip, config.columns // 2, is_gated, apart),
        GATED=is_gated,
        IN_ORDER=config.in_order,
    )
