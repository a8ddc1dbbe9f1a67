"""Argument checks that selection and acceptance share."""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_shape
from specdec_kernels.sampling.types import Filters


def expect_rows(name: str, values: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `values` is [R, V] of one of `dtypes` with V >= 1 contiguous."""
    expect_shape(name, values, (None, None))
    expect_dtype(name, values, *dtypes)
    expect_row_layout(name, values)


def expect_row_layout(name: str, values: torch.Tensor) -> None:
    """Raise ValueError unless the vocabulary is the contiguous dimension and not empty."""
    if values.shape[-1] < 1:
        raise ValueError(f"{name}: expected a vocabulary of at least 1, got shape {list(values.shape)}")
    if values.shape[-1] > 1 and values.stride(-1) != 1:
        raise ValueError(f"{name}: expected stride 1 in the vocabulary dimension, got strides {values.stride()}")


def expect_vectors(size: int, **vectors: tuple[torch.Tensor | None, torch.dtype]) -> None:
    """Raise ValueError unless each given vector is contiguous, of `size` entries and of its dtype."""
    for name, (tensor, dtype) in vectors.items():
        if tensor is not None:
            expect_shape(name, tensor, (size,))
            expect_dtype(name, tensor, dtype)
            expect_contiguous(**{name: tensor})


def check_filters(requests: int, filters: Filters) -> None:
    """Raise ValueError unless the filters are per-request vectors of their dtypes."""
    kinds = dict(top_k=torch.int32, top_p=torch.float32, min_p=torch.float32)
    expect_vectors(requests, **{name: (getattr(filters, name), kind) for name, kind in kinds.items()})


def check_sources(
    requests: int,
    rows: tuple[int, ...],
    temperature: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    uniforms: torch.Tensor | None,
    uniforms_shape: tuple[int, ...] | None = None,
) -> None:
    """Raise ValueError unless the sampling arguments fit `requests` keys and `rows` (a shape) of logits."""
    shapes = {
        "temperature": (temperature, (requests,), torch.float32),
        "seeds": (seeds, (requests,), torch.int64),
        "positions": (positions, rows, torch.int64),
        "uniforms": (uniforms, uniforms_shape or rows, torch.float32),
    }
    for name, (tensor, shape, dtype) in shapes.items():
        if tensor is not None:
            expect_shape(name, tensor, shape)
            expect_dtype(name, tensor, dtype)
            expect_contiguous(**{name: tensor})
    if temperature is not None and uniforms is None and (seeds is None or positions is None):
        raise ValueError("temperature: expected seeds and positions, or uniforms, to draw with; got neither")
