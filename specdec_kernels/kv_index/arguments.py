"""Checks that the index builders share."""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape


def check_table(page_table: torch.Tensor, page_size: int, **per_request: torch.Tensor) -> None:
    """A page table with one row a request, and [B] int64 tensors."""
    expect_shape("page_table", page_table, (None, None))
    expect_dtype("page_table", page_table, torch.int32)
    expect_contiguous(page_table=page_table)
    for name, tensor in per_request.items():
        expect_shape(name, tensor, (page_table.shape[0],))
        expect_dtype(name, tensor, torch.int64)
        expect_contiguous(**{name: tensor})
    expect_same_device(page_table=page_table, **per_request)
    check_at_least("page_size", page_size, 1)


def check_token_table(
    table: torch.Tensor, rows: torch.Tensor, *dtypes: torch.dtype, **per_request: torch.Tensor
) -> None:
    """A token table (int32, or one of `dtypes`) with rows named by `rows`, and integers of one entry a request."""
    expect_shape("table", table, (None, None))
    expect_dtype("table", table, torch.int32, *dtypes)
    expect_contiguous(table=table)
    check_requests(rows=rows, **per_request)
    expect_same_device(table=table, rows=rows)


def check_requests(**per_request: torch.Tensor) -> None:
    """Integer tensors [B] of one batch, device and unit stride."""
    batch = next(iter(per_request.values())).shape[0] if per_request else 0
    for name, tensor in per_request.items():
        expect_shape(name, tensor, (batch,))
        expect_dtype(name, tensor, torch.int32, torch.int64)
        expect_contiguous(**{name: tensor})
    expect_same_device(**per_request)


def check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def check_out(name: str, out: torch.Tensor | None, like: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """A tensor that is written in place: integers of `shape`, unit stride in the last axis."""
    if out is None:
        return
    expect_shape(name, out, shape)
    expect_dtype(name, out, torch.int32, torch.int64)
    expect_same_device(input=like, **{name: out})
    if out.numel() and out.stride(-1) != 1:
        raise ValueError(f"{name}: expected unit stride in the last axis, got strides {out.stride()}")
