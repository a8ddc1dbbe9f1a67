"""Memory checks for kernels in Triton's interpreter, and allocations that show what was never written.

The interpreter does not check pointers: a wrong load goes unnoticed, and a wrong store overwrites other memory. Inside
`guarded()` every lane of every load and store must lie inside one of the tensor arguments of the launch (inside the
view, not only its storage), no store may write one address from two lanes, and no two programs of a launch may write
the same address. The hooks are two internal functions of the interpreter whose signatures are the same in all supported
versions of Triton. Inside `poisoned()` new allocations are filled with NaN, or with -7777 for integers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.runtime.interpreter as interpreter

from specdec_kernels.interpreter import prepare
from specdec_kernels.launch import leaves

INTEGER_POISON = -7777
PART = 2**18  # bytes of memory whose writers are kept together


class MemoryFault(AssertionError):
    """A load or store outside of every argument, or two writes to one address."""


class _CheckedMemory:
    """Replaces the interpreter's memory module; all other attributes are those of the real one."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._extents: list[tuple[int, int]] = []
        self._writers: dict[int, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def enter_launch(self, tensors: list[torch.Tensor]) -> None:
        self._extents = [_extent(tensor) for tensor in tensors]
        self._writers = {}

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._lanes("load", pointers, mask, np.dtype(dtype).itemsize)
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        lanes = self._lanes("store", pointers, mask, np.asarray(value).dtype.itemsize)
        if lanes.size:
            self._record_writes(lanes)
        return self._real.store(pointers, value, mask)

    def _lanes(self, what: str, pointers: Any, mask: Any, size: int) -> np.ndarray:
        """Addresses of the active lanes, after the bounds check."""
        mask = np.asarray(mask).astype(bool, copy=False)
        every = np.logical_and.reduce(mask, axis=None)
        lanes = np.asarray(pointers).ravel() if every else np.broadcast_to(pointers, mask.shape)[mask]
        lanes = lanes.astype(np.uint64, copy=False)
        if not lanes.size:
            return lanes
        first, last = int(np.minimum.reduce(lanes)), int(np.maximum.reduce(lanes)) + size
        if any(low <= first and last <= high for low, high in self._extents):  # all lie in one tensor
            return lanes
        inside = np.zeros(lanes.shape, bool)
        for low, high in self._extents:
            inside |= (lanes >= low) & (lanes + np.uint64(size) <= high)
        if not inside.all():
            address = int(lanes[~inside][0])
            raise MemoryFault(
                f"{what}: {int((~inside).sum())} of {lanes.size} lanes outside every argument at program "
                f"{interpreter.interpreter_builder.grid_idx}, first {self._describe(address)}"
            )
        return lanes

    def _describe(self, address: int) -> str:
        if not self._extents:
            return f"0x{address:x}, the launch has no tensors"
        ends = [(abs(address - high), address - high) for _, high in self._extents]
        return f"0x{address:x}, {min(ends)[1]:+d} bytes from the nearest argument's end"

    def _record_writes(self, lanes: np.ndarray) -> None:
        """Addresses of one store: of each byte of a part of memory, which program wrote it, counted from 1."""
        builder = interpreter.interpreter_builder
        program = tuple(builder.grid_idx)
        _, second, third = builder.grid_dim
        number = 1 + (program[0] * second + program[1]) * third + program[2]
        rises = np.logical_and.reduce(lanes[1:] > lanes[:-1])
        if not rises and (twice := lanes.size - np.unique(lanes).size):
            raise MemoryFault(f"store: {twice} addresses written by several lanes at {program}")
        parts = lanes // np.uint64(PART)
        one = np.minimum.reduce(parts) == np.maximum.reduce(parts)
        for part in [int(parts[0])] if one else np.unique(parts).tolist():
            here = lanes if one else lanes[parts == part]
            if part not in self._writers:
                self._writers[part] = np.zeros(PART, np.int32)
            writers, places = self._writers[part], here % np.uint64(PART)
            before = writers[places]
            taken = (before != 0) & (before != number)
            if taken.any():
                other = tuple(map(int, np.unravel_index(before[taken][0] - 1, builder.grid_dim)))
                raise MemoryFault(f"store: 0x{int(here[taken][0]):x} written by programs {other} and {program}")
            writers[places] = number


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte of the view, and the address behind its last."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for _, value in leaves(tuple(values)) if isinstance(value, torch.Tensor)]


@contextmanager
def guarded() -> Iterator[None]:
    """Check every load and store of every launch in the interpreter. Raises MemoryFault."""
    prepare()  # it replaces the same module, and only once
    real, enter = interpreter._interpreter, interpreter.GridExecutor._init_args_hst
    memory = _CheckedMemory(real)

    def entering(self: Any, args: Any, kwargs: Any) -> Any:
        host_args, host_kwargs = enter(self, args, kwargs)
        memory.enter_launch(_tensors(host_args) + _tensors(host_kwargs.values()))
        return host_args, host_kwargs

    interpreter._interpreter, interpreter.GridExecutor._init_args_hst = memory, entering
    try:
        yield
    finally:
        interpreter._interpreter, interpreter.GridExecutor._init_args_hst = real, enter


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, with -7777 (in integer types that cannot hold it, a large value), or with True for bool."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    limits = torch.iinfo(tensor.dtype)
    return tensor.fill_(INTEGER_POISON if limits.min <= INTEGER_POISON else limits.max - 88)


@contextmanager
def poisoned() -> Iterator[None]:
    """Let torch.empty, torch.empty_like and Tensor.new_empty return tensors filled by `poison`."""
    saved = (torch.empty, torch.empty_like, torch.Tensor.new_empty)
    empty, empty_like, new_empty = saved
    torch.empty = lambda *a, **k: poison(empty(*a, **k))  # type: ignore[assignment]
    torch.empty_like = lambda *a, **k: poison(empty_like(*a, **k))  # type: ignore[assignment]
    torch.Tensor.new_empty = lambda *a, **k: poison(new_empty(*a, **k))  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.empty, torch.empty_like, torch.Tensor.new_empty = saved  # type: ignore[method-assign]
