"""Constants and the launch form of SGLang."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class TreeMaskMode(IntEnum):
    """Layouts of `tree_mask`."""

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


class Launcher(Generic[Parameters, Result]):
    """A function that may also be called as SGLang calls its kernels: `name[grid](...)`."""

    def __init__(self, function: Callable[Parameters, Result]) -> None:
        self._function = function
        update_wrapper(self, function)

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return self._function(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Result]:
        if not isinstance(grid, tuple) or not all(isinstance(size, int) for size in grid):
            raise ValueError(f"grid: expected a tuple of integers, got {grid!r}")
        function: Callable[..., Any] = self._function
        return partial(function, grid=grid)
