"""The short ways of the fast interpreter against Triton's own: values, and every type that a result carries."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from specdec_kernels.interpreter import prepare
from specdec_kernels.interpreter_memory import Memory
from specdec_kernels.interpreter_operators import (
    _ARITHMETIC,
    _BITS,
    _COMPARISONS,
    _DIVISIONS,
    _SELECTIONS,
    _SHIFTS,
    FUNCTIONS,
    Operators,
)
from specdec_kernels.launch import interpreting

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")

KINDS = (
    tl.int1, tl.int8, tl.int32, tl.int64, tl.uint8, tl.uint32, tl.float16, tl.float32, tl.float64,
    tl.pointer_type(tl.int16),
)  # fmt: skip
SHAPES = ((), (4,), (4, 1), (1, 4), (2, 4))
SIGNED = (tl.int32, tl.int64, tl.float32)
NUMBERS = (0, 3, -5, 2**31, 2**40, True, 0.1, 0.0, 1e-300, 1e39, float("inf"), tl.constexpr(7), tl.constexpr(0.3))
METHODS = (*_ARITHMETIC, *_DIVISIONS, *_COMPARISONS, *_BITS, *_SHIFTS, *(f"r{name}" for name in _ARITHMETIC))
BINARY = (*(f"__{name}__" for name in METHODS), *_SELECTIONS)


@pytest.fixture(autouse=True)
def types_of_a_kernel() -> Iterator[None]:
    """Unsigned types are types of their own only while a kernel runs."""
    scope = interpreter._LangPatchScope()
    interpreter._patch_lang_core(tl, scope)
    yield
    scope.restore()


def tensor(kind: Any, shape: tuple[int, ...]) -> Any:
    numpy = np.uint64 if kind.is_ptr() else interpreter._get_np_dtype(kind)
    values = (np.arange(np.prod(shape, dtype=int)) * 7 % 5 - (2 if kind in SIGNED else 0)).reshape(shape or (1,))
    values = np.where(values == 0, 3, values).astype(numpy)
    handle = interpreter.TensorHandle(values, kind)
    return tl.tensor(handle, tl.block_type(kind, list(shape)) if shape else kind)


def outcome(function: Any, *operands: Any) -> Any:
    try:
        result = function(*operands)
    except Exception as error:
        return type(error)
    if result.handle is None:  # of a store
        return str(result.type)
    data = np.asarray(result.handle.data)
    return str(data.tolist()), data.dtype, data.shape, str(result.handle.dtype), str(result.type), str(result.dtype)


def assert_same(name: str, *operands: Any) -> bool:
    """Three results are equal: Triton's, the first one of the short way and a later one. Whether the last was short."""
    prepare()
    holder, calls = (tl if name in FUNCTIONS else tl.tensor), []
    member = getattr(holder, name)

    def slow(*arguments: Any, **_: Any) -> Any:
        calls.append(name)
        return member(*arguments, _semantic=interpreter.interpreter_semantic)

    with np.errstate(all="ignore"):
        expected, short = outcome(slow, *operands), Operators(interpreter).of(name, slow)
        assert outcome(short, *operands) == expected, (name, operands)
        before = len(calls)
        assert outcome(short, *operands) == expected, (name, operands)
    return len(calls) == before


@pytest.mark.parametrize("name", BINARY)
def test_operators_give_what_triton_gives(name: str) -> None:
    kinds = (tl.int32, tl.int64), (tl.int64, tl.int32), (tl.float32, tl.float32), (KINDS[-1], tl.int32)
    pairs = [(tensor(one, (4,)), tensor(two, (4,))) for one, two in product(KINDS, KINDS)]
    pairs += [(tensor(one, a), tensor(two, b)) for (one, two), a, b in product(kinds, SHAPES, SHAPES)]
    numbers = [(tensor(kind, shape), number) for kind in KINDS for shape in SHAPES[:2] for number in NUMBERS]
    reverse = name[2:3] == "r" and name != "__rshift__"  # the number comes before the tensor
    short = [assert_same(name, *operands) for operands in (numbers if reverse else pairs + numbers)]
    assert 5 < sum(short) < len(short)


def test_numbers_that_are_equal_are_told_apart() -> None:
    """3 and 3.0 beside an integer; 0.0 and -0.0 are one number to Triton."""
    prepare()
    for name, kind, numbers in (("__add__", tl.int32, (3, 3.0)), ("__mul__", tl.float32, (0.0, -0.0, 0))):
        slow = partial(getattr(tl.tensor, name), _semantic=interpreter.interpreter_semantic)
        short = Operators(interpreter).of(name, slow)
        for number in numbers * 2:
            expected = outcome(slow, tensor(kind, (4,)), number)
            assert outcome(short, tensor(kind, (4,)), number) == expected and isinstance(expected, tuple)


def test_where_gives_what_triton_gives() -> None:
    sides: list[Any] = [tensor(kind, shape) for kind in (tl.int32, tl.float32) for shape in SHAPES]
    conditions = [tensor(tl.int1, shape) for shape in SHAPES]
    operands = product(conditions, [*sides, 2, 0.5], [*sides, 2, 0.5])
    assert sum(assert_same("where", *each) for each in operands) > 100


def test_casts_and_negatives_are_what_triton_gives() -> None:
    pairs = product([tensor(kind, shape) for kind in KINDS[:-1] for shape in SHAPES[:2]], KINDS[:-1])
    assert sum(assert_same(name, *pair) for pair in pairs for name in ("to", "cast")) > 80
    negated = [assert_same("__neg__", tensor(kind, shape)) for kind in KINDS for shape in SHAPES]
    assert sum(negated) == 4 * len(SHAPES)
    zero = tl.tensor(interpreter.TensorHandle(np.zeros(1, np.float32), tl.float32), tl.float32)
    negative = Operators(interpreter).of("__neg__", lambda values: values)
    for _ in range(2):
        assert not np.signbit(negative(zero).handle.data)


@pytest.mark.parametrize("kind", [tl.int1, tl.int8, tl.int64, tl.uint32, tl.float16, tl.float32, tl.float8e4nv])
def test_loads_are_what_triton_loads(kind: Any) -> None:
    """With a mask, a number or a tensor behind it, and hints; lanes behind the mask have no address."""
    memory = np.arange(1, 9).astype(np.int8 if kind is tl.int1 else interpreter._get_np_dtype(kind))
    type_of, masks = tl.pointer_type(kind), [None, *(tensor(tl.int1, shape) for shape in SHAPES)]
    behind = [tensor(each, shape) for each in (kind, tl.int32) for shape in SHAPES]
    short, lowest = 0, float("-inf") if kind.is_floating() else -1
    for shape, mask, other in product(SHAPES, masks, (None, 0, 2, 0.5, lowest, tl.constexpr(3), *behind)):
        places = np.arange(np.prod(shape, dtype=int)).astype(np.uint64).reshape(shape or (1,))
        addresses = memory.ctypes.data + places * np.uint64(memory.itemsize)
        if mask is not None and mask.shape is tensor(kind, shape).shape:
            mask = tl.tensor(interpreter.TensorHandle(places % 2 == 0, tl.int1), mask.type)
            addresses = np.where(places % 2 == 0, addresses, np.uint64(0))
        block = tl.block_type(type_of, list(shape)) if shape else type_of
        pointer = tl.tensor(interpreter.TensorHandle(addresses, type_of), block)
        short += assert_same("load", pointer, mask, other)
    assert short == 0 if kind is tl.int1 else short > 20


@pytest.mark.parametrize("kind", [np.int8, np.uint32, np.int64, np.float16, np.float32])
def test_memory_is_gathered_and_scattered_as_triton_walks_it(kind: Any) -> None:
    """One array in any order, two, places no multiple of a size apart, several lanes of one, and few lanes."""
    rng, own = np.random.default_rng(1), _interpreter_of_triton()
    arrays = [rng.integers(1, 99, 300).astype(kind) for _ in range(2)]
    memory, calls = Memory(np, Mock(wraps=own)), 0
    for lanes, num_arrays, shift, share in product((8, 256), (1, 2), (0, 1), (0.0, 0.4, 1.0)):
        bases = np.array([array.ctypes.data for array in arrays], np.uint64)[rng.integers(0, num_arrays, lanes)]
        places = rng.integers(0, 200, lanes).astype(np.uint64) * np.uint64(np.dtype(kind).itemsize)
        moved = places + np.uint64(shift) * (np.arange(lanes) % 2).astype(np.uint64)
        addresses, active = (bases + moved).reshape(2, -1), (rng.random(lanes) < share).reshape(2, -1)
        filled = rng.integers(1, 99, active.shape).astype(kind)
        mask = active * rng.integers(1, 3) if lanes == 256 else active  # of one bit by its type, a number in NumPy
        asked = np.where(active, addresses, np.uint64(0)), mask, filled, np.dtype(kind)
        found, expected = memory.load(*asked), own.load(*asked)
        assert found.tobytes() == expected.tobytes() and found.dtype == expected.dtype
        values, written = filled.T.copy().T, []  # of another layout than the addresses
        for side in (memory, own):
            before = [array.copy() for array in arrays]
            side.store(asked[0], values, mask)
            written.append([array.tobytes() for array in arrays])
            for array, old in zip(arrays, before, strict=True):
                array[:] = old
        assert written[0] == written[1]
        calls += 1
    assert 0 < memory.__getattr__("load").call_count < calls and 0 < memory.__getattr__("store").call_count < calls


@pytest.mark.parametrize("kind", [tl.int1, tl.int32, tl.float16, tl.float32])
def test_stores_are_what_triton_stores(kind: Any) -> None:
    memory, type_of = np.zeros(8, interpreter._get_np_dtype(kind)), tl.pointer_type(kind)
    masks: list[Any] = [None, *(tensor(tl.int1, shape) for shape in SHAPES)]
    values = [tensor(each, shape) for each in (kind, tl.int1, tl.int64) for shape in SHAPES]
    short = 0
    for shape, mask, value in product(SHAPES, masks, [*values, 2]):
        places = np.arange(np.prod(shape, dtype=int)).astype(np.uint64).reshape(shape or (1,))
        addresses = memory.ctypes.data + places * np.uint64(memory.itemsize)
        if mask is not None and mask.shape is tensor(kind, shape).shape:
            mask = tl.tensor(interpreter.TensorHandle(places % 2 == 0, tl.int1), mask.type)
        block, calls, written = tl.block_type(type_of, list(shape)) if shape else type_of, [], []
        pointer = tl.tensor(interpreter.TensorHandle(addresses, type_of), block)

        def slow(*arguments: Any, calls: list[Any] = calls) -> Any:
            calls.append(arguments)
            return tl.store(*arguments, _semantic=interpreter.interpreter_semantic)

        store = Operators(interpreter).of("store", slow)
        for function in (slow, store, store):
            memory[:] = 0
            error = outcome(function, pointer, value, mask)
            written.append((memory.tobytes(), error))
        assert written[0] == written[1] == written[2]
        short += len(calls) == 2
    assert short == 0 if kind is tl.int1 else short > 20


def test_constants_are_what_triton_gives() -> None:
    numbers = [([4, 2], value, kind) for value in (0, 3, 0.5, float("-inf"), True) for kind in KINDS[:-1]]
    assert sum(assert_same("full", *each) for each in [*numbers, ((4,), 1, tl.int32)]) > 30
    assert not assert_same("full", [4], tensor(tl.int32, ()), tl.int32) and not assert_same("arange", 0, 3)
    assert assert_same("arange", 0, 8) and assert_same("arange", 4, 8)


def test_products_are_what_triton_gives() -> None:
    kinds, prepared = (tl.int8, tl.float16, tl.float32, tl.float64), prepare()
    pairs = [(tensor(one, (4, 4)), tensor(two, (4, 2))) for one, two in product(kinds, kinds)]
    added = [None, *(tensor(kind, shape) for kind in (tl.int32, *kinds) for shape in ((4, 2), (4, 1)))]
    short = [assert_same("dot", *pair, *([] if acc is None else [acc])) for pair, acc in product(pairs, added)]
    assert prepared is None and 3 < sum(short) < len(short)


@pytest.mark.parametrize("combine", ["_sum_combine", "_elementwise_max", "_elementwise_min", "_xor_combine"])
def test_reductions_are_what_triton_gives(combine: str) -> None:
    calls: list[Any] = []

    def slow(operation: Any, values: Any) -> Any:
        calls.append(operation)
        return interpreter.ReduceScanOpInterface.apply(operation, values)

    prepare()
    short, apply = 0, Operators(interpreter).reduction(slow)
    for kind, shape, axis, keep in product((tl.int32, tl.int64, tl.float32), SHAPES[1:], (0, 1, None), (False, True)):
        operation = interpreter.ReduceOps(axis, getattr(tl.standard, combine), keep)
        values = tensor(kind, shape)
        if kind is tl.float32:
            values.handle.data.flat[1] = float("nan")
        calls.clear()
        expected = outcome(slow, operation, values)
        assert outcome(apply, operation, values) == outcome(apply, operation, values) == expected
        short += len(calls) == 2
    assert short == 0 if combine == "_xor_combine" else short > 40


def _interpreter_of_triton() -> Any:
    prepare()
    return interpreter._interpreter._own


def test_new_dimensions_are_what_triton_gives() -> None:
    everything = slice(None)
    places = [(everything, None), (None, everything), (everything, None, everything), (None, everything, None), None]
    for kind, shape, place in product((tl.int32, tl.pointer_type(tl.int16)), SHAPES[1:4], places):
        assert_same("__getitem__", tensor(kind, shape), place)
    assert assert_same("__getitem__", tensor(tl.int32, (4,)), places[0])


def test_operands_that_go_are_not_mistaken_for_others() -> None:
    """Types of pointers are made for each launch, and results are kept by the identity of the types."""
    slow = interpreter.interpreter_semantic.add
    add = Operators(interpreter).of("__add__", lambda left, right: slow(left, right, False))
    for width, element in ((1, tl.int8), (8, tl.int64)) * 20:
        pointer = tl.tensor(
            interpreter.TensorHandle(np.zeros(1, np.uint64), tl.pointer_type(element)), tl.pointer_type(element)
        )
        for _ in range(2):
            moved = add(pointer, tensor(tl.int32, (4,)))
            assert (
                moved.handle.data.tolist() == [width * each % 2**64 for each in (-2, 3, 2, -1)]
                and moved.dtype.element_ty is element
            )
