"""Codes of rows: each group of 128 numbers of a row is rounded to e4m3 by a scale of its own."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.kv_write.kernel import to_e4m3
from specdec_kernels.launch import current_chip
from specdec_kernels.norm.types import GROUP, LARGEST_CODE, LEAST_MAGNITUDE, Codes

_GROUP = tl.constexpr(GROUP)
_LARGEST = tl.constexpr(LARGEST_CODE)
_LEAST = tl.constexpr(LEAST_MAGNITUDE)


def multiplies_codes(chip: str) -> bool:
    return chip in ("sm90", "sm100")


@triton.jit
def rounded(x, AXIS: tl.constexpr):
    """x, whose groups lie along AXIS, in float32 between -448 and 448, and its scales, from the largest magnitudes."""
    wide = x.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), AXIS), _LEAST)
    return wide * tl.expand_dims(tl.div_rn(_LARGEST, largest), AXIS), tl.div_rn(largest, _LARGEST)


@triton.jit
def write_codes(code_ptr, scale_ptr, x, row, group, written, K, CODES: tl.constexpr):
    """Codes [written, K] and scales [groups, written] of groups of a row, x [GROUPS, 128]."""
    wide, scale = rounded(x, 1)
    at = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    codes = wide.to(tl.float8e4nv) if CODES else to_e4m3(wide)
    tl.store(code_ptr + row.to(tl.int64) * K + at, codes, mask=at < K)
    tl.store(scale_ptr + group * written + row, scale, mask=group * _GROUP < K)


def _dtype(chip: str) -> torch.dtype:
    return torch.float8_e4m3fn if multiplies_codes(chip) else torch.uint8


def code_arguments(codes: Codes | None, chip: str) -> tuple[Tensor | None, Tensor | None]:
    """Arguments of a kernel that calls `write_codes`, if it does."""
    return (None, None) if codes is None else (codes.numbers.view(_dtype(chip)), codes.scales)


def empty_codes(like: Tensor, inner: int, multiple: int = 1) -> Codes:
    """Memory for the codes of rows of `inner` numbers, as many as `like` has, up to a multiple of rows. Codes are
    float8_e4m3fn where the chip multiplies them, else uint8."""
    rows = -(-(like.numel() // like.shape[-1]) // multiple) * multiple
    return Codes(
        torch.empty((rows, inner), dtype=_dtype(current_chip(like)), device=like.device),
        torch.empty((-(-inner // GROUP), rows), dtype=torch.float32, device=like.device),
    )
