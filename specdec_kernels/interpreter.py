"""Optional: faster kernels in Triton's interpreter, with the same results, and one repair.

Active only where `SPECDEC_FAST_INTERPRETER=1` is set at the first launch, because it replaces private functions of
Triton in the whole process. If a version of Triton has no such function, its interpreter stays as it is.

Before a kernel and every device function, the interpreter searches `triton.language` for functions to replace. The
first search is kept, and so are signatures, NumPy types and the attributes of types and tensors. Steps of an operation
that change nothing are skipped, and so are copies of tensors that the host holds. The repair: Triton 3.6 converts an
array of one entry by `int`, which NumPy 2.4 and later refuse.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from specdec_kernels.interpreter_memory import Memory
from specdec_kernels.interpreter_operators import FIELDS, FUNCTIONS, Operators

FAST_INTERPRETER = "SPECDEC_FAST_INTERPRETER"
_KEPT = 8192  # types of tensors


@cache
def prepare() -> None:
    """Replace the functions; call it before the first kernel is interpreted."""
    from triton.runtime import interpreter

    needed = (
        "_patch_lang",
        "_patch_builtin",
        "_get_np_dtype",
        "_interpreter",
        "_implicit_cvt",
        "_LangPatchScope",
        "interpreter_semantic",
        "TritonSemantic",
        "ReduceOps",
        "GridExecutor",
    )
    if not all(hasattr(interpreter, name) for name in needed):
        return
    if vars(interpreter.interpreter_semantic.to_tensor(1)).keys() != {"handle", *FIELDS}:
        return
    if len(inspect.signature(interpreter._patch_builtin).parameters) != 3:
        return
    if hasattr(interpreter, "_patch_lang_tensor"):
        interpreter._patch_lang_tensor = _patch_index(interpreter._patch_lang_tensor)
    interpreter._interpreter = Memory(interpreter.np, interpreter._interpreter)
    operators = Operators(interpreter)
    interpreter._patch_builtin = _patch_known(interpreter, operators)
    interpreter.ReduceOps.apply = operators.reduction(interpreter.ReduceOps.apply)
    interpreter.inspect = _Signatures()
    _leave_on_host(interpreter.GridExecutor)
    interpreter._patch_lang = _patch_once(interpreter, interpreter._patch_lang)
    interpreter._get_np_dtype = _known_types(interpreter.tl, interpreter._get_np_dtype)
    interpreter._implicit_cvt = _known_arguments(interpreter, interpreter._implicit_cvt)
    core = interpreter.tl.core
    core.block_type.__init__ = _known_blocks(core.block_type.__init__)
    core.tensor.__init__ = _known_shapes(core.tensor.__init__)
    _skip_steps_without_effect(interpreter)


def _patch_index(patch_tensor: Callable[..., None]) -> Callable[..., None]:
    """The interpreter's replacement of a tensor's methods, with an index that every version of NumPy gives."""

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


class _Signatures:
    """The module `inspect` for a launch, with the arguments of each kernel kept."""

    def __init__(self) -> None:
        self.getfullargspec, self._signature = cache(inspect.getfullargspec), cache(inspect.signature)

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getcallargs(self, function: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        bound = self._signature(function).bind(*arguments, **named)
        bound.apply_defaults()
        return bound.arguments


def _leave_on_host(executor: Any) -> None:
    """Tensors in the memory of the host are not wrapped again for a launch, nor copied onto themselves after it."""
    enter, leave = executor._init_args_hst, executor._restore_args_dev
    numbers = (bool, int, float, str, type(None))

    def enter_if_needed(self: Any, arguments: Any, named: Any) -> Any:
        values = (*arguments, *named.values())
        at_hand = all(type(value) in numbers or getattr(value, "is_cpu", False) for value in values)
        return (arguments, named) if at_hand else enter(self, arguments, named)

    def leave_if_needed(self: Any, arguments: Any, arguments_there: Any, named: Any, named_there: Any) -> None:
        if arguments is not arguments_there:
            leave(self, arguments, arguments_there, named, named_there)

    executor._init_args_hst, executor._restore_args_dev = enter_if_needed, leave_if_needed


def _patch_known(interpreter: Any, operators: Operators) -> Callable[..., None]:
    """The interpreter's replacement of the functions of one module or class, with the replacements kept."""
    is_builtin, semantic = interpreter.tl.core.is_builtin, interpreter.interpreter_semantic
    kept: dict[Any, dict[str, Callable[..., Any]]] = {}

    def interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*arguments, **named)

        return call

    def patch(holder: Any, builder: Any, scope: Any) -> None:
        if holder not in kept:
            found = {name: member for name, member in inspect.getmembers(holder) if is_builtin(member)}
            if not found:  # they are replaced at this moment
                return
            plain = {name: interpreted(inspect.unwrap(member)) for name, member in found.items()}
            short = plain if holder is interpreter.tl.tensor else plain.keys() & FUNCTIONS
            kept[holder] = plain | {name: operators.of(name, plain[name]) for name in short}
        for name, replacement in kept[holder].items():
            if is_builtin(getattr(holder, name)):
                scope.set_attr(holder, name, replacement)

    return patch


def _patch_once(interpreter: Any, patch_lang: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's replacement for one function of a kernel, left out where all of it is in place."""
    settled: set[Any] = set()  # functions that find it in place, until it is taken back
    tl = interpreter.tl
    is_builtin, nothing = tl.core.is_builtin, interpreter._LangPatchScope()

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc, name-defined]
        def restore(self) -> None:
            settled.clear()
            super().restore()

    @cache
    def modules(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]

    def patch(function: Any) -> Any:
        if function in settled:
            return nothing
        settled.add(function)
        places = (*(module.load for module in modules(function)), tl.tensor.__add__)
        return patch_lang(function) if any(map(is_builtin, places)) else nothing

    interpreter._LangPatchScope = Scope
    return patch


def _known_types(tl: Any, find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter's NumPy type of a type of Triton, the type of its elements, with the answers kept."""
    known = cache(find)

    def of(kind: Any) -> Any:
        element = kind.scalar
        return known(element) if type(element) is tl.dtype else find(element)

    return of


def _known_arguments(interpreter: Any, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter's tensor of an argument; pointers to one type have one type in all launches."""
    tl, numpy = interpreter.tl, interpreter.np
    types: dict[Any, Any] = {}

    def converted(value: Any) -> Any:
        if not hasattr(value, "data_ptr"):
            return convert(value)
        kind = types.get(value.dtype)
        if kind is None:
            kind = types[value.dtype] = convert(value).type
        return tl.tensor(interpreter.TensorHandle(numpy.array([value.data_ptr()], numpy.uint64), kind), kind)

    return converted


def _known_blocks(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor of the type of a block, which checks its shape and writes its name, with the results kept. Each
    operation makes several, of a few element types and shapes in all."""
    known: dict[Any, dict[str, Any]] = {}

    def build(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *shape)
        if key not in known:
            init(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])
        self.element_ty = element_ty

    return build


def _known_shapes(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor of a tensor, which wraps each size of its shape, with one type for all tensors of one kind."""
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def build(self: Any, handle: Any, type: Any) -> None:
        key = id(type.scalar), *(type.shape if type.is_block() else ())
        if key not in known:
            init(self, handle, type)
            if len(known) >= _KEPT:  # kernels may make types of pointers
                known.clear()
            known[key] = tuple(getattr(self, name) for name in FIELDS)  # the scalar stays alive by it
        self.handle = handle
        self.type, self.dtype, self.shape, self.numel = known[key]

    return build


def _skip_steps_without_effect(interpreter: Any) -> None:
    """Steps of each arithmetic operation that change nothing: finding the common type of operands of one type,
    broadcasting operands of one shape, casting a tensor to its own type, building a constant again, and looking for
    integer overflow without the option `debug`, where it is not reported."""
    semantic, tl = interpreter.TritonSemantic, interpreter.tl
    broadcast, cast, check = semantic.broadcast_impl_value, semantic.cast, semantic.binary_op_sanitize_overflow_impl
    meet, constant = semantic.binary_op_type_checking_impl, cache(semantic.scalar_constant)
    convert = semantic.to_tensor
    own = {tl.int32, tl.int64, tl.float32, tl.float64}  # what operands of one of these types are computed in

    def meet_if_needed(self: Any, left: Any, right: Any, *flags: Any, **named: Any) -> Any:
        kind = left.dtype if type(left) is tl.tensor else None
        if type(kind) is not tl.dtype or kind not in own or named or flags[2:3] == (False,):
            return meet(self, left, right, *flags, **named)
        if type(right) is int and -(2**31) <= right < 2**31:  # a number takes the type of a tensor
            right = constant(self, right, kind)
        elif type(right) is not tl.tensor or right.dtype is not kind:
            return meet(self, left, right, *flags)
        return self.broadcast_impl_value(left, right)

    def broadcast_if_needed(self: Any, left: Any, right: Any) -> Any:
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    def cast_if_needed(self: Any, value: Any, kind: Any, rounding: Any = None) -> Any:
        return value if value.dtype is kind else cast(self, value, kind, rounding)

    def convert_if_needed(self: Any, value: Any, check_type: bool = True) -> Any:
        return value if type(value) is tl.tensor else convert(self, value, check_type)

    def check_in_debug(self: Any, left: Any, right: Any, operation: Any) -> None:
        if self.builder.options.debug:
            check(self, left, right, operation)

    semantic.binary_op_type_checking_impl, semantic.to_tensor = meet_if_needed, convert_if_needed
    semantic.broadcast_impl_value, semantic.cast = broadcast_if_needed, cast_if_needed
    semantic.binary_op_sanitize_overflow_impl = check_in_debug
