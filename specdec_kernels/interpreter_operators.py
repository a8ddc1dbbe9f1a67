"""Operators of tensors in Triton's interpreter by the shortest way, with the same results.

The first time that an operator meets operands of two types, Triton computes the result. Its type is kept, and from then
on NumPy computes what Triton would let it compute. Whatever else comes (a number that does not fit, types that differ,
the option `debug`) goes to Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_KEPT = 8192  # types of results
# Names of functions of NumPy, which is the interpreter's and no requirement of this package.
_ARITHMETIC = {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide"}
_DIVISIONS = {"floordiv": "", "mod": "fmod"}
_COMPARISONS = {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal", "ne": "not_equal",
}  # fmt: skip
_BITS = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
_SHIFTS = {"lshift": "left_shift", "rshift": "right_shift"}
_SELECTIONS = {"minimum": "minimum", "maximum": "maximum"}
FUNCTIONS = frozenset({"where", "load", "cast", *_SELECTIONS})
"""Functions of the language that have a short way, beside the methods of tensors."""


class Operators:
    """`of(name, slow)` is the short way of the function `name` of tensors, where there is one, with `slow` for all
    else."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, self._numpy, tl = interpreter, interpreter.np, interpreter.tl
        self._integers = frozenset(map(id, (tl.int32, tl.int64)))
        self._floats = frozenset(map(id, (tl.float32, tl.float64)))
        self._numbers = self._integers | self._floats
        self._unsigned = frozenset(map(id, (tl.uint8, tl.uint16, tl.uint32, tl.uint64)))
        self._results: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._kept: dict[tuple[Any, ...], Any] = {}

    def of(self, name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
        plain = name.strip("_")
        numpy, words = self._numpy, self._integers | self._unsigned
        if plain in _COMPARISONS:
            return self._operator(getattr(numpy, _COMPARISONS[plain]), plain, self._numbers, slow)
        if plain in _SELECTIONS:
            return self._operator(getattr(numpy, _SELECTIONS[plain]), plain, self._numbers, slow)
        if plain in _BITS:
            kinds = words | {id(self._interpreter.tl.int1)}
            return self._operator(getattr(numpy, _BITS[plain]), plain, kinds, slow)
        backwards = plain.startswith("r") and plain[1:] in _ARITHMETIC
        forwards = plain[1:] if backwards else plain
        if forwards in _ARITHMETIC:
            kinds = self._floats if forwards == "truediv" else self._numbers
            return self._operator(getattr(numpy, _ARITHMETIC[forwards]), plain, kinds, slow, backwards)
        if plain in _DIVISIONS:
            function = numpy.fmod if plain == "mod" else self._quotient
            return self._operator(function, plain, self._integers, slow)
        if plain in _SHIFTS:
            return self._operator(getattr(numpy, _SHIFTS[plain]), plain, words, slow)
        others = {"where": self._where, "getitem": self._index, "neg": self._negative, "load": self._load}
        others |= dict.fromkeys(("to", "cast"), self._cast)
        return others[plain](slow) if plain in others else slow

    def _quotient(self, left: Any, right: Any) -> Any:
        """Rounded to zero, as Triton divides."""
        return (left - self._numpy.fmod(left, right)) // right

    def _operator(
        self,
        operation: Callable[..., Any],
        name: str,
        kinds: frozenset[int],
        slow: Callable[..., Any],
        backwards: bool = False,
    ) -> Callable[..., Any]:
        """`backwards` is the operator with the number before the tensor."""
        tl, builder, results = self._interpreter.tl, self._interpreter.interpreter_builder, self._results
        number, keep, made, integers = self._number, self._keep, self._made, self._integers
        compares, adds, tensor, wide = name in _COMPARISONS, name == "add", tl.tensor, tl.int64
        # A number becomes a tensor before the other operand is seen.
        apart = compares or name in _SELECTIONS
        unsigned, word = self._numpy.uint64, tl.int32

        def apply(left: Any, right: Any, *more: Any, **rest: Any) -> Any:
            if type(left) is not tensor or more or rest or builder.options.debug:
                return slow(left, right, *more, **rest)
            kind, other, operand = left.dtype, None, None
            known = id(kind) in kinds
            if type(right) is tensor:
                other = right.dtype
                both = id(other) in integers
                if known and (other is kind or both and id(kind) in integers):
                    operand = right.handle.data
                elif adds and both and kind.is_ptr():
                    operand = right.handle.data.astype(unsigned) * max(1, kind.element_ty.primitive_bitwidth // 8)
                key: tuple[Any, ...] = (compares, id(left.shape), id(right.shape), id(kind), id(other))
            else:
                if known:
                    operand = number(right, kind, apart)
                elif adds and kind.is_ptr():
                    operand = number(right, word, False)
                    if operand is not None:
                        operand = operand.astype(unsigned) * max(1, kind.element_ty.primitive_bitwidth // 8)
                key = (compares, id(left.shape), id(kind))
            if operand is None:
                return slow(left, right)
            if key not in results:
                return keep(key, slow(left, right), left, right)
            values = operation(operand, left.handle.data) if backwards else operation(left.handle.data, operand)
            # Of 32 and of 64 bits: NumPy computes in 64, as Triton does.
            return made(values, wide if known and other is wide else left.handle.dtype, results[key])

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
            return made(choose(condition.handle.data, one, two), kind, results[key])

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
            return made(values.handle.data[places], values.handle.dtype.scalar, results[key])

        return index

    def _negative(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """0 - values, which has no -0.0."""
        numbers, keep, made, results = self._numbers, self._keep, self._made, self._results
        number, builder, subtract = self._number, self._interpreter.interpreter_builder, self._numpy.subtract

        def negative(values: Any, **rest: Any) -> Any:
            kind = values.dtype
            if id(kind) not in numbers or builder.options.debug:
                return slow(values, **rest)
            key = (False, id(values.shape), id(kind))
            if key not in results:
                return keep(key, slow(values, **rest), values)
            return made(subtract(number(0, kind, False), values.handle.data), kind, results[key])

        return negative

    def _cast(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """To a type that NumPy converts to as Triton does."""
        keep, made, results, tensor = self._keep, self._made, self._results, self._interpreter.tl.tensor
        typed, wanted = self._interpreter._get_np_dtype, self._numbers | self._unsigned
        given = wanted | {id(self._interpreter.tl.int1)}

        def cast(values: Any, kind: Any, *more: Any, **rest: Any) -> Any:
            if type(values) is not tensor or more or rest:
                return slow(values, kind, *more, **rest)
            if values.dtype is kind:
                return values
            if id(values.dtype) not in given or id(kind) not in wanted:
                return slow(values, kind)
            key = ("cast", id(values.shape), id(values.dtype), id(kind))
            if key not in results:
                return keep(key, slow(values, kind), values)
            return made(values.handle.data.astype(typed(kind)), kind, results[key])

        return cast

    def _load(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """From a tensor of pointers, with a mask and a number or a tensor behind it."""
        interpreter, numpy, tl = self._interpreter, self._numpy, self._interpreter.tl
        semantic, keep, made, results = interpreter.interpreter_semantic, self._keep, self._made, self._results
        tensor, bit, typed, spread = tl.tensor, tl.int1, interpreter._get_np_dtype, numpy.broadcast_to
        constants: dict[tuple[Any, ...], tuple[Any, Any]] = {}

        def constant(value: Any, kind: Any, shape: Any) -> tuple[Any, Any]:
            """All lanes active, and the number behind the mask in each of them."""
            if value is None:
                return numpy.ones(shape, bool), numpy.zeros(shape, typed(kind))
            number = semantic.cast(semantic.to_tensor(value), kind)
            return numpy.ones(shape, bool), spread(number.handle.data, shape).copy()

        def load(pointer: Any, mask: Any = None, other: Any = None, *more: Any, **hints: Any) -> Any:
            kind = pointer.dtype.element_ty if type(pointer) is tensor and pointer.dtype.is_ptr() else None
            other = other.value if type(other) is tl.constexpr else other
            masked, behind = type(mask) is tensor, type(other) is tensor
            plain = type(kind) is tl.dtype and kind is not bit and not more
            if not plain or not (mask is None or masked and mask.dtype is bit) or behind and other.dtype is not kind:
                return slow(pointer, mask, other, *more, **hints)
            shapes = id(pointer.shape), masked and id(mask.shape), behind and id(other.shape)
            key = ("load", *shapes, id(pointer.dtype), None if behind else other, *hints.items())
            if key not in results:
                found = slow(pointer, mask, other, **hints)
                constants[key] = constant(None if behind else other, kind, found.handle.data.shape)
                return keep(key, found, pointer, mask, other)
            active, filled = constants[key]
            addresses, shape = pointer.handle.data, active.shape
            active = mask.handle.data if masked else active
            filled = other.handle.data if behind else filled
            if addresses.shape != shape or active.shape != shape or filled.shape != shape:
                addresses, active, filled = (spread(each, shape) for each in (addresses, active, filled))
            return made(interpreter._interpreter.load(addresses, active, filled, typed(kind)), kind, results[key])

        return load

    def _keep(self, key: tuple[Any, ...], result: Any, *operands: Any) -> Any:
        """The result, its type kept for the key, with what the key names by its identity."""
        if len(self._results) >= _KEPT:
            self._results.clear()
        alive = [(operand.shape, operand.dtype) for operand in operands if hasattr(operand, "handle")]
        fields = {name: value for name, value in vars(result).items() if name != "handle"}
        self._results[key] = fields, alive
        return result

    def _made(self, data: Any, kind: Any, result: tuple[Any, ...]) -> Any:
        """A tensor, without the checks of its size that operands of one type pass always."""
        handle = object.__new__(self._interpreter.TensorHandle)
        handle.data, handle.dtype, handle.attr = data, kind, {}
        made = object.__new__(self._interpreter.tl.tensor)
        vars(made).update(result[0])
        made.handle = handle
        return made

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
            lowest, words = (-(2**31) if id(kind) in self._numbers else 0), self._numbers | self._unsigned
            fits = id(kind) in words and lowest <= value < 2 ** min(31, kind.primitive_bitwidth)
        else:  # in a comparison, a number becomes a tensor before the other operand is seen
            fits = id(kind) in self._floats and value == value
            fits = fits and (not compares or semantic.to_tensor(value).dtype is kind)
        typed = self._interpreter._get_np_dtype(kind)
        self._kept[key] = semantic.scalar_constant(value, kind).handle.data.astype(typed) if fits else None
        return self._kept[key]
