"""Operators of tensors in Triton's interpreter by the shortest way, with the same results.

The first time that an operator meets operands of two types, Triton computes the result. Its type is kept, and from then
on NumPy computes what Triton would let it compute. Whatever else comes (a number that does not fit, types that differ,
the option `debug`) goes to Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_KEPT = 8192  # types of results; those of pointers belong to one launch
_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide}
_COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


class Operators:
    """`of(name, slow)` is the short way of the operator `name`, where there is one, with `slow` for all else."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, tl = interpreter, interpreter.tl
        integers, floats = (tl.int32, tl.int64), (tl.float32, tl.float64)
        self._integers, self._floats = frozenset(map(id, integers)), frozenset(map(id, floats))
        self._numbers = self._integers | self._floats
        self._words = frozenset(map(id, (tl.int1, *integers, tl.uint32, tl.uint64)))
        self._results: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def of(self, name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
        plain = name.strip("_")
        if plain in _COMPARISONS:
            return self._operator(_COMPARISONS[plain], plain, self._numbers, slow)
        if plain in _BITS:
            return self._operator(_BITS[plain], plain, self._words, slow)
        if plain in _ARITHMETIC:
            kinds = self._floats if plain == "truediv" else self._numbers
            return self._operator(_ARITHMETIC[plain], plain, kinds, slow)
        return slow

    def _operator(
        self, operation: Any, name: str, kinds: frozenset[int], slow: Callable[..., Any]
    ) -> Callable[..., Any]:
        tensor, results, builder = self._interpreter.tl.tensor, self._results, self._interpreter.interpreter_builder
        group = ("compares" if name in _COMPARISONS else "computes").__hash__()
        number, made, integers = self._number(name in _COMPARISONS), self._made, self._integers
        adds = name == "add"

        def apply(left: Any, right: Any, **rest: Any) -> Any:
            kind = left.dtype
            known = id(kind) in kinds
            if builder.options.debug:
                return slow(left, right, **rest)
            if type(right) is tensor:
                other = right.dtype
                if not (known and other is kind or adds and id(other) in integers and kind.is_ptr()):
                    return slow(left, right, **rest)
                key = (group, id(left.shape), id(right.shape), id(kind))
                operand = right.handle.data
                if not known:  # a pointer
                    operand = max(1, kind.element_ty.primitive_bitwidth // 8) * operand.astype(np.uint64)
            else:
                operand = number(right, kind) if known else None
                if operand is None:
                    return slow(left, right, **rest)
                key = (group, id(left.shape), id(kind))
            if key not in results:
                result = slow(left, right, **rest)
                if len(results) >= _KEPT:
                    results.clear()
                # What the key names by its identity stays alive.
                results[key] = result.type, left.shape, getattr(right, "shape", None), kind
                return result
            return made(operation(left.handle.data, operand), left.handle.dtype, results[key][0])

        return apply

    def _made(self, data: Any, kind: Any, result: Any) -> Any:
        """A tensor, without the checks of its size that operands of one type pass always."""
        handle = object.__new__(self._interpreter.TensorHandle)
        handle.data, handle.dtype, handle.attr = data, kind, {}
        return self._interpreter.tl.tensor(handle, result)

    def _number(self, compares: bool) -> Callable[[Any, Any], Any]:
        """A number as an array of the type that Triton gives it beside a tensor, or None where that is another one."""
        semantic, floats, tl = self._interpreter.interpreter_semantic, self._floats, self._interpreter.tl
        kept: dict[tuple[Any, ...], Any] = {}

        def array(value: Any, kind: Any) -> Any:
            if type(value) is tl.constexpr:
                value = value.value
            key = (type(value), value, id(kind))
            if key in kept:
                return kept[key]
            if type(value) is int:
                fits = -(2**31) <= value < 2**31
            else:  # beside a comparison, a number is a tensor before the other operand is seen
                fits = type(value) is float and id(kind) in floats and value == value
                fits = fits and (not compares or semantic.to_tensor(value).dtype is kind)
            kept[key] = semantic.scalar_constant(value, kind).handle.data if fits else None
            return kept[key]

        return array
