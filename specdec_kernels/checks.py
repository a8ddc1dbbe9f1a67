"""Argument checks of the public functions: every message names the argument, the expected and the actual value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def expect_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    """Raise ValueError unless `tensor` has `shape`; None stands for any size in that place."""
    actual = tuple(tensor.shape)
    fits = len(actual) == len(shape) and all(w is None or w == a for w, a in zip(shape, actual, strict=True))
    if not fits:
        wanted = ", ".join("*" if w is None else str(w) for w in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(actual)}")


def expect_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `tensor.dtype` is one of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def expect_same_device(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all given tensors (None is skipped) are on one device."""
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    if len(set(devices.values())) > 1:
        listing = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all tensors must be on one device, got {listing}")


def expect_contiguous(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all given tensors (None is skipped) are contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def expect_at_least(name: str, value: int, least: int) -> None:
    """Raise ValueError if `value` is below `least`."""
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


Expected = tuple[torch.Tensor | None, Sequence[int | None], torch.dtype]
"""A tensor (None is skipped) with the shape and the dtype that it must have."""


def expect_tensors(others: Mapping[str, torch.Tensor | None] | None = None, /, **expected: Expected) -> None:
    """Raise ValueError unless each tensor has its shape and dtype, is contiguous, and all are on one device.

    Of `others` only the device is checked.
    """
    for name, (tensor, shape, dtype) in expected.items():
        if tensor is not None:
            expect_shape(name, tensor, shape)
            expect_dtype(name, tensor, dtype)
            expect_contiguous(**{name: tensor})
    expect_same_device(**(others or {}), **{name: tensor for name, (tensor, _, _) in expected.items()})
