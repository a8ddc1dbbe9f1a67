"""Operators of tensors in Triton's interpreter by the shortest way, with the same results.

The first time that an operator meets operands of two types, Triton computes the result. Its type is kept, and from then
on NumPy computes what Triton would let it compute. Whatever else comes (a number that does not fit, types that differ,
the option `debug`) goes to Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_KEPT = 8192  # results that one operator keeps
FIELDS = ("type", "dtype", "shape", "numel")
"""What a tensor holds beside its handle."""
# Names of functions of NumPy, which is the interpreter's and no requirement of this package.
_ARITHMETIC = {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide"}
_DIVISIONS = {"floordiv": "floor_divide", "mod": "fmod"}
_COMPARISONS = {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal", "ne": "not_equal",
}  # fmt: skip
_BITS = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
_SHIFTS = {"lshift": "left_shift", "rshift": "right_shift"}
_SELECTIONS = {"minimum": "minimum", "maximum": "maximum"}
_NUMPY = _ARITHMETIC | _DIVISIONS | _COMPARISONS | _BITS | _SHIFTS | _SELECTIONS
FUNCTIONS = frozenset({"where", "load", "store", "cast", "dot", "full", "arange", *_SELECTIONS})
"""Functions of the language that have a short way, beside the methods of tensors."""


class _Known(dict[Any, Any]):
    """What an operator does with operands of known types, by the identity of the types, which therefore stay alive."""

    def keep(self, key: Any, result: Any, *operands: Any, plan: tuple[Any, ...] = ()) -> Any:
        """The result; for the next operands of these types, its fields and the plan."""
        if len(self) >= _KEPT:
            self.clear()
        fields = tuple(getattr(result, name) for name in FIELDS)
        self[key] = (fields, *plan), [getattr(operand, "type", None) for operand in operands]
        return result

    def find(self, key: Any) -> Any:
        found = self.get(key)
        return found and found[0]


class Operators:
    """`of(name, slow)` is the short way of the function `name` of tensors, where there is one, with `slow` for all
    else."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, self._numpy, tl = interpreter, interpreter.np, interpreter.tl
        self._integers = frozenset(map(id, (tl.int32, tl.int64)))
        self._floats = frozenset(map(id, (tl.float32, tl.float64)))
        self._numbers = self._integers | self._floats
        self._unsigned = frozenset(map(id, (tl.uint8, tl.uint16, tl.uint32, tl.uint64)))
        words = self._integers | self._unsigned
        groups = (
            (_ARITHMETIC | _COMPARISONS | _SELECTIONS, self._numbers),
            ({"truediv"}, self._floats),
            (_DIVISIONS, self._integers),
            (_BITS, words | {id(tl.int1)}),
            (_SHIFTS, words),
        )
        self._kinds = {name: kinds for names, kinds in groups for name in names}  # types with a short way
        self._others: dict[str, Callable[..., Any]] = {
            "where": self._where, "getitem": self._index, "neg": self._negative, "dot": self._dot, "to": self._cast,
            "cast": self._cast, "load": self._load, "store": self._store, "full": self._constant,
            "arange": self._constant,
        }  # fmt: skip
        self._made = _maker(tl.tensor, interpreter.TensorHandle)
        self._kept: dict[tuple[Any, ...], Any] = {}

    def of(self, name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
        plain = name.strip("_")
        backwards = plain.startswith("r") and plain[1:] in _ARITHMETIC
        forwards = plain[1:] if backwards else plain
        if forwards in self._kinds:
            function = self._quotient if forwards == "floordiv" else getattr(self._numpy, _NUMPY[forwards])
            return self._operator(function, plain, self._kinds[forwards], slow, backwards)
        return self._others[plain](slow) if plain in self._others else slow

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
        tl, builder, known = self._interpreter.tl, self._interpreter.interpreter_builder, _Known()
        made, find, tensor, constexpr, unsigned = self._made, known.find, tl.tensor, tl.constexpr, self._numpy.uint64
        # A comparison takes a number as a tensor before the other operand is seen.
        apart, adds = name in _COMPARISONS or name in _SELECTIONS, name == "add"

        def plan(left: Any, right: Any) -> tuple[Any, ...] | None:
            """(the number as an array, bytes of an entry if integers move a pointer, the handle's type if it is not
            the left operand's), or None without a short way."""
            kind, moves = left.dtype, adds and left.dtype.is_ptr()
            width = max(1, kind.element_ty.primitive_bitwidth // 8) if moves else 0
            if type(right) is not tensor:
                operand = self._number(right, tl.int32 if moves else kind, apart and not moves)
                short = operand is not None and (moves or id(kind) in kinds)
                return (operand.astype(unsigned) * width if moves else operand, 0, None) if short else None
            other, both = right.dtype, id(right.dtype) in self._integers
            if moves:
                return (None, width, None) if both else None
            if id(kind) not in kinds or other is not kind and not (both and id(kind) in self._integers):
                return None
            # Of 32 and of 64 bits: NumPy computes in 64, as Triton does.
            return None, 0, other if other is tl.int64 else None

        def apply(left: Any, right: Any, *more: Any, **rest: Any) -> Any:
            if type(left) is not tensor or more or rest or builder.options.debug:
                return slow(left, right, *more, **rest)
            if type(right) is tensor:
                key: Any = id(left.type), id(right.type)
            else:
                number = right.value if type(right) is constexpr else right
                if type(number) is not int and type(number) is not float:
                    return slow(left, right)
                key = id(left.type), number, type(number)
            found = find(key)
            if found is None:
                way = plan(left, right)
                result = slow(left, right)
                return result if way is None else known.keep(key, result, left, right, plan=way)
            fields, operand, width, kind = found
            if operand is None:
                operand = right.handle.data
                if width:
                    operand = operand.astype(unsigned) * width
            handle = left.handle
            values = operation(operand, handle.data) if backwards else operation(handle.data, operand)
            return made(values, handle.dtype if kind is None else kind, fields)

        return apply

    def _constant(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """A tensor that depends on numbers, sizes and types alone."""
        made, known, plain = self._made, _Known(), {int, float, self._interpreter.tl.dtype}

        def constant(*arguments: Any, **rest: Any) -> Any:
            sizes = arguments[0] if type(arguments[0]) in (list, tuple) else ()
            others = arguments[1:] if type(arguments[0]) in (list, tuple) else arguments
            if rest or {*map(type, sizes)} - {int} or {*map(type, others)} - plain:
                return slow(*arguments, **rest)
            key = *sizes, *others
            found = known.find(key)
            if found is None:
                result = slow(*arguments)
                data = result.handle.data.copy()
                data.flags.writeable = False
                return known.keep(key, result, plan=(data, result.handle.dtype))
            fields, data, kind = found
            return made(data, kind, fields)

        return constant

    def _where(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        tl, numbers, number, made, known = self._interpreter.tl, self._numbers, self._number, self._made, _Known()
        tensor, bit, choose = tl.tensor, tl.int1, self._numpy.where

        def where(condition: Any, left: Any, right: Any, **rest: Any) -> Any:
            first, second = type(left) is tensor, type(right) is tensor
            kind = left.dtype if first else right.dtype if second else None
            short = id(kind) in numbers and type(condition) is tensor and condition.dtype is bit
            if not short or first and second and right.dtype is not kind:
                return slow(condition, left, right, **rest)
            one = left.handle.data if first else number(left, kind, False)
            two = right.handle.data if second else number(right, kind, False)
            if one is None or two is None:
                return slow(condition, left, right, **rest)
            key = id(condition.type), id(left.type) if first else 0, id(right.type) if second else 0
            found = known.find(key)
            if found is None:
                return known.keep(key, slow(condition, left, right, **rest), condition, left, right)
            return made(choose(condition.handle.data, one, two), kind, found[0])

        return where

    def _index(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """`values[:, None]`, and the like: new dimensions of size 1."""
        made, known, everything = self._made, _Known(), slice(None)

        def index(values: Any, places: Any, **rest: Any) -> Any:
            pattern = [place is None or place == everything and 0 for place in places] if type(places) is tuple else []
            new = pattern.count(True)
            if not pattern or any(each is False for each in pattern) or new == len(pattern):
                return slow(values, places, **rest)
            key = id(values.type), *pattern
            found = known.find(key)
            if found is None:
                result = slow(values, places, **rest)
                return known.keep(key, result, values) if len(pattern) - new <= len(values.shape.values) else result
            handle = values.handle
            return made(handle.data[places], handle.dtype.scalar, found[0])

        return index

    def _negative(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """0 - values, which has no -0.0."""
        numbers, number, made, known = self._numbers, self._number, self._made, _Known()
        builder, subtract = self._interpreter.interpreter_builder, self._numpy.subtract

        def negative(values: Any, **rest: Any) -> Any:
            kind = values.dtype
            if id(kind) not in numbers or builder.options.debug:
                return slow(values, **rest)
            found = known.find(id(values.type))
            if found is None:
                return known.keep(id(values.type), slow(values, **rest), values)
            return made(subtract(number(0, kind, False), values.handle.data), kind, found[0])

        return negative

    def _cast(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """To a type that NumPy converts to as Triton does."""
        made, known, tensor, converts = self._made, _Known(), self._interpreter.tl.tensor, self._converts
        typed = self._interpreter._get_np_dtype

        def cast(values: Any, kind: Any, *more: Any, **rest: Any) -> Any:
            if type(values) is not tensor or more or rest:
                return slow(values, kind, *more, **rest)
            if values.dtype is kind:
                return values
            key = id(values.type), id(kind)
            found = known.find(key)
            if found is None:
                result = slow(values, kind)
                plan = typed(kind), kind  # which stays alive by it
                return known.keep(key, result, values, plan=plan) if converts(values.dtype, kind) else result
            return made(values.handle.data.astype(found[1]), kind, found[0])

        return cast

    def _converts(self, given: Any, wanted: Any) -> bool:
        numbers, bit = self._numbers | self._unsigned, self._interpreter.tl.int1
        return id(wanted) in numbers and (given is bit or id(given) in numbers)

    def _load(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """From a tensor of pointers, with a mask and a number or a tensor behind it."""
        interpreter, numpy, tl = self._interpreter, self._numpy, self._interpreter.tl
        semantic, made, known, both = interpreter.interpreter_semantic, self._made, _Known(), self._numpy.logical_and
        tensor, bit, typed, constexpr = tl.tensor, tl.int1, interpreter._get_np_dtype, tl.constexpr

        def plan(kind: Any, other: Any, shape: Any) -> tuple[Any, ...]:
            """The type of an entry, all lanes active, and the number behind the mask in each of them."""
            numbers = numpy.zeros(shape, typed(kind))
            if other is not None and type(other) is not tensor:
                numbers[...] = semantic.cast(semantic.to_tensor(other), kind).handle.data
            return kind, numbers.dtype, numpy.ones(shape, bool), numbers

        def load(pointer: Any, mask: Any = None, other: Any = None, *more: Any, **hints: Any) -> Any:
            other = other.value if type(other) is constexpr else other
            masked, behind = type(mask) is tensor, type(other) is tensor
            if type(pointer) is not tensor or more or not (masked or mask is None):
                return slow(pointer, mask, other, *more, **hints)
            key = id(pointer.type), masked and id(mask.type), behind or other, behind and id(other.type), *hints.items()
            found = known.find(key)
            if found is None:
                result, kind = slow(pointer, mask, other, **hints), getattr(pointer.dtype, "element_ty", bit)
                plain = type(kind) is tl.dtype and kind is not bit and pointer.dtype.is_ptr()
                if not plain or masked and mask.dtype is not bit or behind and other.dtype is not kind:
                    return result
                way = plan(kind, other, result.handle.data.shape)
                return known.keep(key, result, pointer, mask, other, plan=way)
            fields, kind, typed, active, filled = found
            addresses, shape = pointer.handle.data, active.shape
            if addresses.shape != shape:
                addresses = numpy.broadcast_to(addresses, shape)
            if masked:
                mask = mask.handle.data
                active = mask if mask.shape == shape else both(mask, active)
            if behind:
                filled = other.handle.data
                filled = filled if filled.shape == shape else numpy.broadcast_to(filled, shape)
            return made(interpreter._interpreter.load(addresses, active, filled, typed), kind, fields)

        return load

    def _store(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """To a tensor of pointers, of values that NumPy converts as Triton does."""
        interpreter, numpy, tl = self._interpreter, self._numpy, self._interpreter.tl
        known, tensor, bit, both, spread = _Known(), tl.tensor, tl.int1, numpy.logical_and, numpy.broadcast_to

        def store(pointer: Any, value: Any, mask: Any = None, *more: Any, **hints: Any) -> Any:
            masked = type(mask) is tensor
            if not (type(pointer) is type(value) is tensor) or more or not (masked or mask is None):
                return slow(pointer, value, mask, *more, **hints)
            key = id(pointer.type), id(value.type), masked and id(mask.type), *hints.items()
            found = known.find(key)
            if found is None:
                result, kind = slow(pointer, value, mask, **hints), getattr(pointer.dtype, "element_ty", bit)
                short = type(kind) is tl.dtype and kind is not bit and pointer.dtype.is_ptr()
                short = short and (value.dtype is kind or self._converts(value.dtype, kind))
                if not short or masked and mask.dtype is not bit:
                    return result
                plan = result, interpreter._get_np_dtype(kind), numpy.ones(pointer.handle.data.shape, bool)
                return known.keep(key, result, pointer, value, mask, plan=plan)
            _, result, kind, active = found
            values, shape = value.handle.data.astype(kind, copy=False), active.shape
            if masked:
                mask = mask.handle.data
                active = mask if mask.shape == shape else both(mask, active)
            values = values if values.shape == shape else spread(values, shape)
            interpreter._interpreter.store(pointer.handle.data, values, active)
            return result

        return store

    def _dot(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """Of two matrices of one type of floats, added to others or to zeros."""
        tl, builder, made, known = self._interpreter.tl, self._interpreter.interpreter_builder, self._made, _Known()
        kinds, tensor = self._floats | {id(tl.float16)}, tl.tensor

        def dot(left: Any, right: Any, acc: Any = None, **rest: Any) -> Any:
            added = type(acc) is tensor
            if not (type(left) is type(right) is tensor) or not (added or acc is None):
                return slow(left, right, acc, **rest)
            key = id(left.type), id(right.type), added and id(acc.type), *rest.items()
            found = known.find(key)
            if found is None:
                result = slow(left, right, acc, **rest)
                short = id(left.dtype) in kinds and right.dtype is left.dtype
                zeros = self._numpy.zeros_like(result.handle.data)
                start = self._interpreter.TensorHandle(zeros, result.handle.dtype)
                return known.keep(key, result, left, right, acc, plan=(start,)) if short else result
            fields, start = found
            handle = builder.create_dot(left.handle, right.handle, acc.handle if added else start, None, 0)
            return made(handle.data, handle.dtype, fields)

        return dot

    def reduction(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """`ReduceOps.apply` of the interpreter: sums, and the largest and smallest, of one tensor."""
        tl, numpy, made, known = self._interpreter.tl, self._numpy, self._made, _Known()
        functions = {
            id(tl.standard._sum_combine): numpy.add.reduce,
            id(tl.standard._elementwise_max): numpy.fmax.reduce,
            id(tl.standard._elementwise_min): numpy.fmin.reduce,
        }

        def apply(operation: Any, values: Any) -> Any:
            function = functions.get(id(operation.combine_fn))
            if type(values) is not tl.tensor or function is None or id(values.dtype) not in self._numbers:
                return slow(operation, values)
            axis, keepdims = operation.axis, operation.keep_dims
            key = id(values.type), id(function), axis, keepdims
            found = known.find(key)
            if found is None:
                result = slow(operation, values)
                return known.keep(key, result, values, plan=(result.handle.dtype, result.handle.data.dtype))
            fields, kind, typed = found
            data = function(values.handle.data, axis=axis, keepdims=keepdims)
            return made(data.astype(typed) if data.shape else numpy.array([data], typed), kind, fields)

        return apply

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


def _maker(tensor: Any, handle_type: Any) -> Callable[[Any, Any, tuple[Any, ...]], Any]:
    """Tensors without the checks of their size, which operands of one type pass always."""
    new = object.__new__

    def made(data: Any, kind: Any, fields: tuple[Any, ...]) -> Any:
        handle = new(handle_type)
        handle.data, handle.dtype, handle.attr = data, kind, {}
        result = new(tensor)
        result.handle = handle
        result.type, result.dtype, result.shape, result.numel = fields
        return result

    return made
