"""Rounding of rows to codes before a product, where the kernel that wrote them has not done it."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.norm.codes import code_arguments, empty_codes, multiplies_codes, write_codes
from specdec_kernels.norm.types import GROUP, Codes
from specdec_kernels.pdl import launch_dependents, pdl_options, wait_for_predecessor

_GROUP = tl.constexpr(GROUP)
_GROUPS_OF_A_PROGRAM = 16  # 16 numbers a thread


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
    x = tl.load(x_ptr + at, mask=at < K, other=0.0)
    write_codes(code_ptr, scale_ptr, x, row, group, tl.num_programs(0), K, CODES)


def round_rows(x: Tensor, codes: Codes) -> Codes:
    """Write the codes of x [..., K], as the product rounds x by itself; the last row again where there are more."""
    inner, chip = x.shape[-1], current_chip(x)
    launch(
        _round_rows_kernel,
        (codes.numbers.shape[0], -(-codes.scales.shape[0] // _GROUPS_OF_A_PROGRAM)),
        *(x, *code_arguments(codes, chip), x.numel() // inner, inner),
        num_warps=4,
        GROUPS=_GROUPS_OF_A_PROGRAM,
        CODES=multiplies_codes(chip),
        **pdl_options(chip),
    )
    return codes


def rounded_rows(x: Tensor, multiple: int = 1) -> Codes:
    """Codes of x [..., K]; the last row again up to a multiple of rows."""
    return round_rows(x, empty_codes(x, x.shape[-1], multiple))
