"""Rounding of activations to e4m3 codes: each group of 128 numbers of a row by a scale of its own."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.kv_write.kernel import to_e4m3
from specdec_kernels.launch import current_chip, launch
from specdec_kernels.pdl import launch_dependents, wait_for_predecessor
from specdec_kernels.projection.types import GROUP, LARGEST_CODE, LEAST_MAGNITUDE

_GROUP = tl.constexpr(GROUP)
_LARGEST = tl.constexpr(LARGEST_CODE)
_LEAST = tl.constexpr(LEAST_MAGNITUDE)
_GROUPS_OF_A_PROGRAM = 16  # 16 numbers a thread


def multiplies_codes(chip: str) -> bool:
    return chip in ("sm90", "sm100")


@triton.jit
def rounded(x, AXIS: tl.constexpr):
    """x, whose groups lie along AXIS, in float32 between -448 and 448, and its scales, from the largest magnitudes."""
    wide = x.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), AXIS), _LEAST)
    return wide * tl.expand_dims(tl.div_rn(_LARGEST, largest), AXIS), tl.div_rn(largest, _LARGEST)


@triton.jit(do_not_specialize=["rows"])
def _round_rows_kernel(
    x_ptr,  # [rows, K]
    code_ptr,  # [written, K] float8, or uint8 unless CODES
    scale_ptr,  # [groups, written] float32
    rows,
    K,
    GROUPS: tl.constexpr,
    CODES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Several groups of a row a program; rows past the last one take it again."""
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    launch_dependents(PDL)
    wait_for_predecessor(PDL)
    x_ptr += tl.minimum(row, rows - 1).to(tl.int64) * K
    wide, scale = rounded(tl.load(x_ptr + at, mask=at < K, other=0.0), 1)
    tl.store(code_ptr + row.to(tl.int64) * K + at, wide.to(tl.float8e4nv) if CODES else to_e4m3(wide), mask=at < K)
    tl.store(scale_ptr + group * tl.num_programs(0) + row, scale, mask=group * _GROUP < K)


def rounded_rows(x: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Codes [rows, K] of x [..., K] and scales [ceil(K / 128), rows] float32, as the product rounds x by itself; the
    last row again up to a multiple of rows. Codes are float8_e4m3fn where the chip multiplies them, else uint8."""
    inner, chip = x.shape[-1], current_chip(x)
    groups, rows = -(-inner // GROUP), x.numel() // inner
    written = -(-rows // multiple) * multiple
    dtype = torch.float8_e4m3fn if multiplies_codes(chip) else torch.uint8
    codes = torch.empty((written, inner), dtype=dtype, device=x.device)
    scales = torch.empty((groups, written), dtype=torch.float32, device=x.device)
    launch(
        _round_rows_kernel,
        (written, -(-groups // _GROUPS_OF_A_PROGRAM)),
        *(x, codes, scales, rows, inner),
        num_warps=4,
        GROUPS=_GROUPS_OF_A_PROGRAM,
        CODES=multiplies_codes(chip),
    )
    return codes, scales
