"""The guard reports each kind of fault that it checks for, and accepts a correct kernel."""

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the guard checks the interpreter, which runs only without a GPU", allow_module_level=True)

import triton
import triton.language as tl

from tests.kernels.guard import INTEGER_POISON, guarded, poisoned


@triton.jit
def _copy(source, target, size, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + lane, mask=lane < size, other=0.0) if MASKED else tl.load(source + lane)
    tl.store(target + lane, value, mask=lane < size)


@triton.jit
def _gather(index, source, target, size, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    at = tl.load(index + lane, mask=lane < size, other=0)
    tl.store(target + lane, tl.load(source + at, mask=lane < size, other=0.0), mask=lane < size)


@triton.jit
def _overlap(target, STEP: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(target + tl.program_id(0) * STEP + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32))


@triton.jit
def _scatter_twice(target, BLOCK: tl.constexpr):
    tl.store(target + tl.arange(0, BLOCK) // 2, tl.zeros((BLOCK,), tl.float32))


def test_correct_kernel_passes() -> None:
    source, target = torch.randn(10), torch.zeros(10)
    with guarded():
        _copy[(3,)](source, target, 10, 4, True)
    assert torch.equal(source, target)


FAULTS = {
    "unmasked load": (lambda: _copy[(1,)](torch.randn(10), torch.zeros(16), 10, 16, False), "lanes outside"),
    "store past the end": (lambda: _copy[(1,)](torch.randn(32), torch.zeros(8), 16, 16, True), "lanes outside"),
    "one past the end": (lambda: _copy[(1,)](torch.randn(16), torch.zeros(16)[:7], 8, 8, True), "1 of 8 lanes outside"),
    "index -1": (
        lambda: _gather[(1,)](torch.tensor([0, 3, -1]), torch.randn(10), torch.zeros(3), 3, 4),
        "lanes outside",
    ),
    "outside the view": (lambda: _copy[(1,)](torch.randn(16), torch.zeros(64)[8:16], 16, 16, True), "lanes outside"),
    "empty tensor": (lambda: _copy[(1,)](torch.zeros(0), torch.zeros(4), 4, 4, True), "lanes outside"),
    "two programs": (lambda: _overlap[(2,)](torch.zeros(64), 7, 8), "written by programs"),
    "two lanes": (lambda: _scatter_twice[(1,)](torch.zeros(8), 8), "written by several lanes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str) -> None:
    run, message = FAULTS[fault]
    with guarded(), pytest.raises(Exception, match=message):
        run()


def test_poison_marks_what_is_not_written() -> None:
    with poisoned():
        floats, integers = torch.empty(3), torch.empty(3, dtype=torch.int32)
        like = torch.empty_like(torch.zeros(2))
    assert floats.isnan().all() and like.isnan().all() and (integers == INTEGER_POISON).all()
    assert torch.empty(1).shape == (1,)
