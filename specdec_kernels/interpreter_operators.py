"""Operators of tensors in Triton's interpreter by the shortest way, with the same results.

The first time that an operator meets operands of two types, Triton computes the result. Its type is kept, and from then
on NumPy computes what Triton would let it compute. Whatever else comes (a number that does not fit, types that differ,
the option `debug`) goes to Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_KEPT = 8192  # types of results; those of pointers belong to one launch
# Names of functions of NumPy, which is the interpreter's and no requirement of this package.
_ARITHMETIC = {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide"}
_COMPARISONS = {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal", "ne": "not_equal",
}  # fmt: skip
_BITS = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}


class Operators:
    """`of(name, slow)` is the short way of the function `name` of tensors, where there is one, with `slow` for all
    else."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, self._numpy, tl = interpreter, interpreter.np, interpreter.tl
        self._integers = frozenset(map(id, (tl.int32, tl.int64)))
        self._floats = frozenset(map(id, (tl.float32, tl.float64)))
        self._numbers = self._integers | self._floats
        self._words = self._integers | frozenset(map(id, (tl.int1, tl.uint32, tl.uint64)))
        self._results: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self._kept: dict[tuple[Any, ...], Any] = {}

    def of(self, name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
        plain = name.strip("_")
        if plain in _COMPARISONS:
            return self._operator(_COMPARISONS[plain], plain, self._numbers, slow)
        if plain in _BITS:
            return self._operator(_BITS[plain], plain, self._words, slow)
        if plain in _ARITHMETIC:
            kinds = self._floats if plain == "truediv" else self._numbers
            return self._operator(_ARITHMETIC[plain], plain, kinds, slow)
        if plain == "where":
            return self._where(slow)
        return self._index(slow) if plain == "getitem" else slow

    def _operator(
        self, function: str, name: str, kinds: frozenset[int], slow: Callable[..., Any]
    ) -> Callable[..., Any]:
        tl, builder, results = self._interpreter.tl, self._interpreter.interpreter_builder, self._results
        number, keep, made, integers = self._number, self._keep, self._made, self._integers
        compares, adds, tensor, wide = name in _COMPARISONS, name == "add", tl.tensor, tl.int64
        operation, unsigned = getattr(self._numpy, function), self._numpy.uint64

        def apply(left: Any, right: Any, **rest: Any) -> Any:
            kind, other = left.dtype, None
            known = id(kind) in kinds
            if builder.options.debug:
                return slow(left, right, **rest)
            if type(right) is tensor:
                other, operand = right.dtype, right.handle.data
                both = id(other) in integers
                if not known and adds and both and kind.is_ptr():
                    operand = max(1, kind.element_ty.primitive_bitwidth // 8) * operand.astype(unsigned)
                elif not known or other is not kind and not (both and id(kind) in integers):
                    return slow(left, right, **rest)
                key: tuple[int, ...] = (compares, id(left.shape), id(right.shape), id(kind), id(other))
            else:
                operand = number(right, kind, compares) if known else None
                if operand is None:
                    return slow(left, right, **rest)
                key = (compares, id(left.shape), id(kind))
            if key not in results:
                return keep(key, slow(left, right, **rest), left, right)
            values = operation(left.handle.data, operand)
            # Of 32 and of 64 bits: NumPy computes in 64, as Triton does.
            return made(values, wide if known and other is wide else left.handle.dtype, results[key][0])

        return apply

    def _where(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        tl, results, numbers = self._interpreter.tl, self._results, self._numbers
        number, keep, made, tensor, bit = self._number, self._keep, self._made, tl.tensor, tl.int1
        choose = self._numpy.where

        def where(condition: Any, left: Any, right: Any, **rest: Any) -> Any:
            first, second = type(left) is tensor, type(right) is tensor
            kind = left.dtype if first else right.dtype if second else None
            known = id(kind) in numbers and type(condition) is tensor and condition.dtype is bit
            if not known or first and second and right.dtype is not kind:
                return slow(condition, left, right, **rest)
            one = left.handle.data if first else number(left, kind, False)
            two = right.handle.data if second else number(right, kind, False)
            if one is None or two is None:
                return slow(condition, left, right, **rest)
            shapes = id(left.shape) if first else 0, id(right.shape) if second else 0
            key = (id(condition.shape), *shapes, id(kind))
            if key not in results:
                return keep(key, slow(condition, left, right, **rest), condition, left, right)
            return made(choose(condition.handle.data, one, two), kind, results[key][0])

        return where

    def _index(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """`values[:, None]`, and the like: new dimensions of size 1."""
        results, keep, made, everything = self._results, self._keep, self._made, slice(None)

        def index(values: Any, places: Any, **rest: Any) -> Any:
            plain = type(places) is tuple and all(place is None or place == everything for place in places)
            if not plain or not 0 < len(places) - places.count(None) <= len(values.shape.values):
                return slow(values, places, **rest)
            key = (-1, id(values.shape), id(values.dtype), *(place is None for place in places))
            if key not in results:
                return keep(key, slow(values, places, **rest), values)
            return made(values.handle.data[places], values.handle.dtype.scalar, results[key][0])

        return index

    def _keep(self, key: tuple[int, ...], result: Any, *operands: Any) -> Any:
        """The result, its type kept for the key, with what the key names by its identity."""
        if len(self._results) >= _KEPT:
            self._results.clear()
        alive = [(operand.shape, operand.dtype) for operand in operands if hasattr(operand, "handle")]
        self._results[key] = result.type, alive
        return result

    def _made(self, data: Any, kind: Any, result: Any) -> Any:
        """A tensor, without the checks of its size that operands of one type pass always."""
        handle = object.__new__(self._interpreter.TensorHandle)
        handle.data, handle.dtype, handle.attr = data, kind, {}
        return self._interpreter.tl.tensor(handle, result)

    def _number(self, value: Any, kind: Any, compares: bool) -> Any:
        """A number as an array of the type that Triton gives it beside a tensor, or None where that is another one."""
        semantic = self._interpreter.interpreter_semantic
        if type(value) is self._interpreter.tl.constexpr:
            value = value.value
        if type(value) not in (int, float):
            return None
        key = (type(value), value, id(kind), compares)
        if key in self._kept:
            return self._kept[key]
        if type(value) is int:
            fits = id(kind) in self._numbers and -(2**31) <= value < 2**31
        else:  # in a comparison, a number becomes a tensor before the other operand is seen
            fits = id(kind) in self._floats and value == value
            fits = fits and (not compares or semantic.to_tensor(value).dtype is kind)
        self._kept[key] = semantic.scalar_constant(value, kind).handle.data if fits else None
        return self._kept[key]
