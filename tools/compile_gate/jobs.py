"""What is to be compiled: the launches of the gate cases, and the kernels that must be among them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch

from specdec_kernels import FAMILIES
from specdec_kernels.cases import Maker
from specdec_kernels.launch import Launch, record_launches

_POINTER_TYPES = {
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
ALIGNMENT = 16
"""Bytes of a pointer, or a factor of an integer, that the just-in-time compiler specialises on."""
_DIFFERENT = 4099
"""Floats of an input before they repeat."""


@dataclass(frozen=True)
class Job:
    """One kernel to compile: what `triton.compile` needs, and names for the table."""

    family: str = field(compare=False)  # a kernel that several families launch is compiled once
    chip: str
    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Any], ...]
    divisible: tuple[int, ...]
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def variant(self) -> str:
        """The compile-time arguments that a reader can tell kernels apart by."""
        named = " ".join(f"{name}={value}" for name, value in self.constexprs if value is not None)
        pointers = {kind[1:] for _, kind in self.signature if kind.startswith("*")}
        kind = next((name for name in ("bf16", "fp16", "fp32") if name in pointers), "int")
        return f"{kind} w{self.num_warps} st{self.num_stages} {named}"


class _Repeating(Maker):
    """Makes floats that repeat: the gate reads no values, and random ones for a real vocabulary take seconds."""

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        count = math.prod(shape)
        few = super().normal(_DIFFERENT, scale=scale)
        return few.repeat(-(-count // _DIFFERENT))[:count].reshape(shape)


def collect(family: str, chip: str, inputs: dict[str, dict[str, Any]]) -> list[Launch]:
    """Launches that the gate cases of `family` make on `chip`; `inputs` keeps built cases between chips."""
    package = import_module(f"specdec_kernels.{family}")
    launches: list[Launch] = []
    for case in import_module(f"specdec_kernels.{family}.cases").CASES:
        if not case.gate:
            continue
        if case.name not in inputs:
            inputs[case.name] = case.build(_Repeating.seeded("cpu", torch.bfloat16))
        with record_launches(chip) as recorded:
            getattr(package, case.function)(**inputs[case.name], impl="triton")
        launches += recorded
    return launches


def job_of(family: str, chip: str, launched: Launch) -> Job:
    """Signature and specialisation of a launch, as the just-in-time compiler would derive them."""
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    divisible = []
    values = dict(zip(launched.kernel.arg_names, launched.args, strict=False)) | launched.constexprs
    for index, parameter in enumerate(launched.kernel.params):
        name, value = parameter.name, values.get(parameter.name, parameter.default)
        fixed = parameter.is_constexpr or value is None
        if not fixed and _is_integer(value) and value == 1 and not parameter.do_not_specialize:
            fixed = True
        signature[name] = "constexpr" if fixed else _kind(value)
        if fixed:
            constexprs[name] = value
        elif _is_divisible(parameter, value):
            divisible.append(index)
    return Job(
        family,
        chip,
        launched.kernel,
        tuple(signature.items()),
        tuple(constexprs.items()),
        tuple(divisible),
        launched.num_warps,
        launched.num_stages,
        launched.constexprs.get("maxnreg"),
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    """Triton's name for the type of a run-time argument."""
    if isinstance(value, torch.Tensor):
        return "*" + _POINTER_TYPES[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"no Triton type for an argument of type {type(value).__name__}")


def _is_divisible(parameter: Any, value: Any) -> bool:
    if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
        return False
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % ALIGNMENT == 0
    return _is_integer(value) and value % ALIGNMENT == 0


def kernels_of(family: str) -> set[str]:
    """Names of the family's kernels: its jit functions that no jit function of any family calls."""
    called = {word for other in FAMILIES for source in _device_code(other).values() for word in _words(source)}
    return set(_device_code(family)) - called


@cache
def _device_code(family: str) -> dict[str, str]:
    """Source of every jit function that the family's modules define."""
    from triton.runtime.jit import JITFunction

    package = import_module(f"specdec_kernels.{family}")
    modules = [import_module(info.name) for info in iter_modules(package.__path__, f"{package.__name__}.")]
    return {
        name: value.src
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__
    }


def _words(source: str) -> set[str]:
    """Identifiers of a function's source, its own name left out."""
    return set(re.findall(r"\w+", source.split("(", 1)[1]))


def sample(jobs: Iterable[Job]) -> list[Job]:
    """Up to two variants of each kernel, the first and the last by name, the chips in turn."""
    by_kernel: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: (job.name, job.variant, job.chip)):
        by_kernel.setdefault(job.name, []).append(job)
    chosen = []
    for place, mine in enumerate(by_kernel.values()):
        variants = list(dict.fromkeys(job.variant for job in mine))
        for turn, variant in enumerate(dict.fromkeys([variants[0], variants[-1]]), start=2 * place):
            of_variant = [job for job in mine if job.variant == variant]
            chosen.append(of_variant[turn % len(of_variant)])
    return chosen
