"""The fast interpreter: opt-in, the same functions in place while a kernel runs, and gone after it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from specdec_kernels.interpreter import FAST_INTERPRETER, prepare
from specdec_kernels.launch import interpreting, launch
from tests.programs import run_python

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")


@triton.jit
def _inner(values, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    return tl.where(lane % 2 == 0, values, tl.cumsum(values, 0))


@triton.jit
def _outer(out_ptr, LANES: tl.constexpr):  # [LANES] int32
    lane = tl.arange(0, LANES)
    values = _inner(_inner(lane, LANES), LANES)
    tl.store(out_ptr + lane, values + tl.sum(lane.to(tl.float32), 0).to(tl.int32) + (lane < 3))


@triton.jit
def _overflowing(out_ptr, LANES: tl.constexpr):  # [LANES] int32
    lane = tl.arange(0, LANES)
    tl.store(out_ptr + lane, (lane + 2147483647) * 2)


@triton.jit
def _overflowing_difference(out_ptr, LANES: tl.constexpr):  # [LANES] int32
    """0 - -2^31; the reverse is a number."""
    lane = tl.arange(0, LANES)
    tl.store(out_ptr + lane, lane * 0 - ((lane * 0 + 1) << 31))


def run() -> list[int]:
    out = torch.empty(8, dtype=torch.int32)
    launch(_outer, (1,), out, LANES=8)
    return out.tolist()


def test_device_functions_find_what_the_kernel_has_put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the module of the kernels, not again for each of the functions that a kernel calls."""
    from triton.runtime import interpreter

    expected = run()
    searched, patch = [], interpreter._patch_builtin
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda holder, *rest: (searched.append(holder), patch(holder, *rest))
    )
    assert run() == expected
    assert searched.count(tl) == 1


@pytest.mark.parametrize(("asked", "replaced"), [("1", "True"), ("0", "False"), (None, "False")])
def test_triton_is_changed_only_where_it_is_asked_for(asked: str | None, replaced: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != FAST_INTERPRETER}
    program = (
        "import torch, specdec_kernels as s\n"
        "from triton.runtime import interpreter\n"
        "before = interpreter._patch_builtin\n"
        "s.build_chain(torch.tensor([3]), 4, impl='triton')\n"
        "print(interpreter._patch_builtin is not before)\n"
    )
    given = environment | ({FAST_INTERPRETER: asked} if asked else {})
    done = run_python("-c", program, cwd=Path(__file__).parents[2], env=given)
    assert done.stdout == f"{replaced}\n", done.stderr


def test_the_language_is_itself_again_after_a_kernel() -> None:
    run()
    assert all(map(tl.core.is_builtin, (tl.load, tl.math.exp2, tl.tensor.__add__)))


@pytest.mark.parametrize("kernel", [_overflowing, _overflowing_difference])
def test_an_overflow_is_told_where_triton_tells_it(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    from triton.runtime import interpreter

    out = torch.empty(4, dtype=torch.int32)
    launch(kernel, (1,), out, LANES=4)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True))
    with pytest.raises(Exception, match="int32 overflow detected"):
        launch(kernel, (1,), out, LANES=4)


def test_types_of_blocks_are_checked_and_told_apart() -> None:
    prepare()
    for _ in range(2):
        block = tl.block_type(tl.int64, [4, 2])
        assert block == tl.block_type(tl.int64, [tl.constexpr(4), 2]) and block.numel == 8
        assert block != tl.block_type(tl.int32, [4, 2]) and block != tl.block_type(tl.int64, [2, 4])
        assert str(block) == str(tl.block_type(tl.int64, [4, 2])) != str(tl.block_type(tl.int32, [8]))
        assert tl.block_type(tl.pointer_type(tl.int8), [2]).element_ty == tl.pointer_type(tl.int8)
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.int64, [3])
