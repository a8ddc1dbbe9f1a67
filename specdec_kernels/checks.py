"""Checks of arguments and settings: every message is `name: expected …, got …`. No torch is imported here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias, get_args, get_type_hints

if TYPE_CHECKING:
    import torch

Expected: TypeAlias = "tuple[torch.Tensor | None, Sequence[int | None], torch.dtype | Sequence[torch.dtype]]"
"""A tensor (None is skipped) with the shape and the dtype, or one of the dtypes, that it must have."""


def expect_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def expect_at_least(name: str, value: float | None, least: float, nullable: bool = False) -> None:
    """Raise ValueError unless `value` is at least `least`, or None if `nullable`."""
    expect_between(name, value, least, inf, nullable=nullable)


def expect_at_least_one(**numbers: int | None) -> None:
    """Raise ValueError unless all given numbers (None is skipped) are at least 1."""
    for name, number in numbers.items():
        if number is not None:
            expect_at_least(name, number, 1)


def expect_between(
    name: str, value: float | None, low: float, high: float, above: bool = False, nullable: bool = False
) -> None:
    """Raise ValueError unless low <= value <= high, or low < value with `above`, or None if `nullable`."""
    if value is None and nullable:
        return
    if value is None or not (low < value if above else low <= value) or not value <= high:
        if high == inf:
            bounds = f"{'above' if above else 'at least'} {low}"
        else:
            bounds = f"above {low} and at most {high}" if above else f"{low} to {high}"
        raise ValueError(f"{name}: expected {bounds}{' or null' if nullable else ''}, got {value}")


def expect_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    """Raise ValueError unless `tensor` has `shape`; None stands for any size in that place."""
    actual = tensor.shape
    if actual == shape:
        return
    if len(actual) == len(shape):
        for wanted, size in zip(shape, actual, strict=True):
            if wanted is not None and wanted != size:
                break
        else:
            return
    listed = ", ".join("*" if w is None else str(w) for w in shape)
    raise ValueError(f"{name}: expected shape [{listed}], got {list(actual)}")


def expect_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `tensor.dtype` is one of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def expect_same_device(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all given tensors (None is skipped) are on one device."""
    if len({tensor.device for tensor in tensors.values() if tensor is not None}) > 1:
        given = [(name, tensor.device) for name, tensor in tensors.items() if tensor is not None]
        listing = ", ".join(f"{name} on {device}" for name, device in given)
        raise ValueError(f"expected all tensors on one device, got {listing}")


def expect_contiguous(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all given tensors (None is skipped) are contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None:
            _expect_whole(name, tensor)


def _expect_whole(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def expect_tensors(others: Mapping[str, torch.Tensor | None] | None = None, /, **expected: Expected) -> None:
    """Raise ValueError unless each tensor has its shape and dtype, is contiguous, and all are on one device. Of
    `others` only the device is checked."""
    for name, (tensor, shape, dtype) in expected.items():
        if tensor is not None:
            _expect_form(name, tensor, shape, dtype)
            _expect_whole(name, tensor)
    expect_same_device(**(others or {}), **{name: tensor for name, (tensor, _, _) in expected.items()})


def expect_strided(**expected: Expected) -> None:
    """As `expect_tensors` of tensors whose rows may be strided: the entries of the last dimension are adjacent."""
    for name, (tensor, shape, dtype) in expected.items():
        if tensor is not None:
            _expect_form(name, tensor, shape, dtype)
            if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                raise ValueError(f"{name}: expected stride 1 in the last dimension, got strides {tensor.stride()}")
    expect_same_device(**{name: tensor for name, (tensor, _, _) in expected.items()})


def _expect_form(
    name: str, tensor: torch.Tensor, shape: Sequence[int | None], dtype: torch.dtype | Sequence[torch.dtype]
) -> None:
    expect_shape(name, tensor, shape)
    if tensor.dtype is not dtype:
        expect_dtype(name, tensor, *(dtype if isinstance(dtype, (tuple, list)) else (dtype,)))


def expect_fields(
    call: tuple[Any, ...], strided: Collection[str] = (), others: Mapping[str, Any] | None = None, **sizes: int
) -> None:
    """Raise ValueError unless the tensors of the named tuple `call` have the forms that its class declares.

    `Annotated[Tensor, "B N float32|float16"]` has two sizes and one of two dtypes, or the dtype of the field that is
    named there. A size is a number, `*` for any, a name that means the same in all fields and in `sizes`, `N+1`, or
    `N/64`, rounded up. The tensors are contiguous, or strided as in `expect_strided` where named, and on one device
    with `others`.
    """
    forms = _forms(type(call))
    tensors = {name: tensor for name in forms if (tensor := getattr(call, name)) is not None}
    for name, tensor in tensors.items():
        places, dtypes = forms[name]
        if len(places) == tensor.ndim:
            for (place, added, divisor), actual in zip(places, tensor.shape, strict=True):
                if divisor == 1 and added == 0 and isinstance(place, str):
                    sizes.setdefault(place, int(actual))
        expect_shape(name, tensor, [_size(*place, sizes) for place in places])
        if str(tensor.dtype) not in dtypes:
            dtypes = [str(tensors[dtype].dtype) if dtype in tensors else dtype for dtype in dtypes]
            if str(tensor.dtype) not in dtypes:
                raise ValueError(f"{name}: expected dtype {' or '.join(dtypes)}, got {tensor.dtype}")
        if name in strided:
            expect_strided(**{name: (tensor, tensor.shape, tensor.dtype)})
        else:
            _expect_whole(name, tensor)
    expect_same_device(**{**tensors, **(others or {})})


_Place: TypeAlias = "tuple[str | int | None, int, int]"
"""A size of a form: a number, a name or None, what is added to it, and what divides it."""


def _size(place: str | int | None, added: int, divisor: int, sizes: Mapping[str, int]) -> int | None:
    size = sizes.get(place) if isinstance(place, str) else place
    return None if size is None else -(-(size + added) // divisor)


@cache
def _forms(kind: type) -> dict[str, tuple[list[_Place], list[str]]]:
    """Sizes and dtypes of each annotated field; a dtype may be the name of a field."""
    hints = get_type_hints(kind, include_extras=True).items()
    forms = {name: get_args(hint)[1].split() for name, hint in hints if hasattr(hint, "__metadata__")}
    return {
        name: (
            [_place(text) for text in form[:-1]],
            [dtype if dtype in forms else f"torch.{dtype}" for dtype in form[-1].split("|")],
        )
        for name, form in forms.items()
    }


def _place(text: str) -> _Place:
    text, _, divisor = text.partition("/")
    name, _, added = text.partition("+")
    return (int(name) if name.isdigit() else name if name.isidentifier() else None), int(added or 0), int(divisor or 1)
