"""Every kernel is chosen and launched through this module.

A public function calls `dispatch` for its implementation: the launcher in the family's kernel module, or the
definition in its reference. Inside `record_launches(chip)` nothing runs, and every launch is kept with its
arguments, so that the compile gate can compile it for that chip without a GPU.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.checks import expect_choice
from specdec_kernels.interpreter import FAST_INTERPRETER, prepare

IMPLS = ("auto", "triton", "reference")
CHIPS = ("sm80", "sm90", "sm100", "gfx942")
PDL_CHIPS = ("sm90", "sm100")
PROCESSORS = {"sm80": 108, "sm90": 132, "sm100": 148, "gfx942": 304}
SHARED_BYTES = {"sm80": 160 << 10, "sm90": 220 << 10, "sm100": 220 << 10, "gfx942": 64 << 10}
"""Of a processor, for buffers: less than there is, since a kernel takes some for itself."""


@dataclass(frozen=True)
class Launch:
    """One recorded launch: the kernel, its run-time arguments in order, and its compile-time arguments."""

    kernel: Any
    args: tuple[Any, ...]
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int


_recorder: tuple[str, list[Launch]] | None = None


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter (`TRITON_INTERPRET=1`, set before Triton is imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(impl: str, tensor: Tensor) -> bool:
    """Whether `impl` means the Triton kernel for `tensor`'s device: `auto` takes it on a GPU or in the interpreter, but
    not for float64, and `triton` raises RuntimeError where no kernel can run, ValueError for float64."""
    expect_choice("impl", impl, IMPLS)
    if impl == "triton" and tensor.dtype == torch.float64:
        raise ValueError("impl='triton': expected float32, float16 or bfloat16, got float64; use impl='reference'")
    if impl == "reference" or tensor.dtype == torch.float64:
        return False
    if _recorder is not None or tensor.is_cuda:
        return True
    if not interpreting() and impl == "triton":
        raise RuntimeError(
            f"impl='triton' needs a GPU tensor or the interpreter: got a tensor on {tensor.device}; set "
            "TRITON_INTERPRET=1 before Triton is imported, or use impl='reference'"
        )
    if interpreting() and tensor.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter computes bfloat16 wrongly: use float32 or float16 on the CPU")
    return interpreting()


def dispatch(function: str, family: str, impl: str, tensor: Tensor, kernel: str = "kernel") -> Callable[..., Any]:
    """The implementation of `function` that `impl` means for `tensor`'s device: from the module `kernel` or
    `reference` of the package `family`, imported at its first use. Raises as `use_triton` does."""
    module = kernel if use_triton(impl, tensor) else "reference"
    return getattr(import_module(f"{family}.{module}"), function)


def current_chip(tensor: Tensor) -> str:
    """Key of the static config tables: one of `CHIPS`, or `interpreter`."""
    if _recorder is not None:
        return _recorder[0]
    if not tensor.is_cuda:
        return "interpreter"
    return _chip_of(tensor.get_device())


@cache
def _chip_of(gpu: int) -> str:
    if torch.version.hip:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(gpu)
    return "sm100" if major >= 10 else "sm90" if major == 9 else "sm80"


def num_processors(tensor: Tensor) -> int:
    """Multiprocessors of the tensor's GPU; 1 in the interpreter."""
    if _recorder is not None or not tensor.is_cuda:
        return 128 if _recorder is not None else 1
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def lanes(count: int, most: int = 1 << 30) -> int:
    """The power of two that covers `count` up to `most`; at least two, which every Triton compiler takes."""
    return max(2, min(1 << (max(count, 1) - 1).bit_length(), most))


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 2, **constexprs: Any
) -> None:
    """Run `kernel` on `grid`, on the GPU that holds its tensors; an empty grid launches nothing.

    A named tuple of tensors is one argument, whose fields the kernel reads. It holds no number that varies from step to
    step: Triton would compile a variant for each. Fusion is explicit because it changes bits and speed. A kernel with a
    parameter `PDL` depends on its predecessor as `pdl` describes, on the chips that can.
    """
    if min(grid) == 0:
        return
    tensor = next((value for _, value in leaves(args) if isinstance(value, Tensor)), None)
    if tensor is not None and "PDL" in getattr(kernel, "arg_names", ()):
        depends = current_chip(tensor) in PDL_CHIPS
        constexprs |= dict(PDL=True, launch_pdl=True) if depends else dict(PDL=False)
    if _recorder is not None:
        _recorder[1].append(Launch(kernel, args, constexprs, num_warps, num_stages))
        return
    if interpreting() and os.environ.get(FAST_INTERPRETER) == "1":
        prepare()
    with _on_device_of(tensor):
        kernel[grid](*args, **constexprs, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True)


def _on_device_of(tensor: Tensor | None) -> AbstractContextManager[Any]:
    """The tensor's GPU as the current one: Triton launches there, regardless of where the tensors are."""
    if tensor is None or not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.get_device())


def leaves(values: tuple[Any, ...], path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """What the arguments of a launch and the records among them hold, each with its path."""
    for place, value in enumerate(values):
        if isinstance(value, tuple):
            yield from leaves(value, (*path, place))
        else:
            yield (*path, place), value


@contextmanager
def record_launches(chip: str) -> Iterator[list[Launch]]:
    """Collect launches as `chip` would make them, instead of running them. Outputs stay unwritten."""
    global _recorder
    expect_choice("chip", chip, CHIPS)
    launches: list[Launch] = []
    _recorder = (chip, launches)
    try:
        yield launches
    finally:
        _recorder = None


@contextmanager
def record_compilations() -> Iterator[list[str]]:
    """Collect the names of kernels that Triton compiles inside, or loads from its cache on disk."""
    names: list[str] = []
    try:
        from triton import knobs
    except ImportError:  # no Triton, no compiler
        yield names
        return
    before = knobs.runtime.jit_post_compile_hook

    def compiled(*args: Any, **given: Any) -> Any:
        names.append(given["fn"].name)
        return before(*args, **given) if before else None

    knobs.runtime.jit_post_compile_hook = compiled
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before
