"""The kernels to compile: the launches of the gate cases, and the kernels that must be among them."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import FAMILIES
from specdec_kernels.cases import Maker
from specdec_kernels.launch import Launch, leaves, record_launches

_POINTER_TYPES = {
    torch.bool: "i1",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
ALIGNMENT = 16  # bytes of a pointer, or a factor of an integer, that the just-in-time compiler specialises on
_DIFFERENT = 4099  # numbers of an input before they repeat
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # types of weights and activations that a run can have


@dataclass(frozen=True)
class Job:
    """One kernel to compile: what `triton.compile` needs, and names for the table."""

    family: str = field(compare=False)  # a kernel that several families launch is compiled once
    chip: str
    kernel: Any
    signature: tuple[tuple[str, Any], ...]
    """Of each argument its type; of a record the types of its fields."""
    constexprs: tuple[tuple[str | tuple[int, ...], Any], ...]
    """By name, or by path inside a record."""
    divisible: tuple[tuple[int, ...], ...]
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    checking: bool = field(default=False, compare=False)
    """For a run in float32, which checks results: it must compile and fit, but may be slow."""

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def settings(self) -> list[tuple[str, Any]]:
        """The compile-time arguments, those of a structure one by one."""
        named = [(name, value) for name, value in self.constexprs if isinstance(name, str)]
        fields = [value._asdict() if hasattr(value, "_asdict") else {name: value} for name, value in named]
        return [pair for each in fields for pair in each.items()]

    @property
    def variant(self) -> str:
        named = " ".join(f"{name}={value}" for name, value in self.settings if value is not None)
        kind = next((name for name in ("bf16", "fp16", "fp32") if name in self.pointers), "int")
        return f"{kind} w{self.num_warps} st{self.num_stages} {named}"

    @property
    def pointers(self) -> frozenset[str]:
        return frozenset(kind[1:] for _, kind in leaves(self.signature) if kind.startswith("*"))


class _Repeating(Maker):
    """Numbers that repeat: random ones for a real vocabulary take seconds."""

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return _repeated(super().normal(_DIFFERENT, scale=scale), shape)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return _repeated(super().integers(low, high, _DIFFERENT, dtype=dtype), shape)


def _repeated(few: Tensor, shape: Sequence[int]) -> Tensor:
    count = math.prod(shape)
    return few.repeat(-(-count // len(few)))[:count].reshape(shape)


def collect(
    family: str, chip: str, inputs: dict[str, dict[str, Any]], dtype: torch.dtype = torch.bfloat16
) -> list[Launch]:
    """Launches of the gate cases of `family` on `chip`; `inputs` keeps the cases of one dtype between chips."""
    package = import_module(f"specdec_kernels.{family}")
    launches: list[Launch] = []
    for case in import_module(f"specdec_kernels.{family}.cases").CASES:
        if not case.gate:
            continue
        if case.name not in inputs:
            inputs[case.name] = case.build(_Repeating.seeded("cpu", dtype))
        with record_launches(chip) as recorded:
            getattr(package, case.function)(**inputs[case.name], impl="triton")
        launches += recorded
    return launches


def job_of(family: str, chip: str, launched: Launch, checking: bool = False) -> Job:
    """Signature and specialisation of a launch, as the just-in-time compiler would derive them."""
    signature: dict[str, Any] = {}
    constexprs: dict[str | tuple[int, ...], Any] = {}
    divisible: list[tuple[int, ...]] = []

    def kind_of(value: Any, parameter: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple) and not parameter.is_constexpr:
            kinds = [kind_of(each, parameter, (*path, place)) for place, each in enumerate(value)]
            return type(value)(*kinds) if hasattr(value, "_fields") else tuple(kinds)
        is_one = _is_integer(value) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            constexprs[path if len(path) > 1 else parameter.name] = value
            return "constexpr"
        if _is_divisible(parameter, value):
            divisible.append(path)
        return _kind(value)

    values = dict(zip(launched.kernel.arg_names, launched.args, strict=False)) | launched.constexprs
    for index, parameter in enumerate(launched.kernel.params):
        value = values.get(parameter.name, parameter.default)
        signature[parameter.name] = kind_of(value, parameter, (index,))
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
        checking,
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    """Triton's name for the type of a run-time argument."""
    if isinstance(value, Tensor):
        return "*" + _POINTER_TYPES[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if isinstance(value, float):
        return "fp32"
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return f"tensordesc<{_POINTER_TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
    raise TypeError(f"no Triton type for an argument of type {type(value).__name__}")


def _is_divisible(parameter: Any, value: Any) -> bool:
    if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
        return False
    if isinstance(value, Tensor):
        return value.data_ptr() % ALIGNMENT == 0
    return _is_integer(value) and value % ALIGNMENT == 0


def kernels_of(family: str) -> set[str]:
    """Names of the family's kernels: its jit functions that no jit function of any family calls."""
    bodies = [source.split("(", 1)[1] for other in FAMILIES for source in _device_code(other).values()]
    return set(_device_code(family)) - {word for body in bodies for word in re.findall(r"\w+", body)}


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


def jobs_of(family: str, chips: Sequence[str]) -> list[Job]:
    """The launches of the gate cases on `chips` in bfloat16, and one launch for each further combination of element
    types."""
    jobs: dict[Job, None] = {}
    for dtype in DTYPES:
        inputs: dict[str, dict[str, Any]] = {}
        launched = [(chip, one) for chip in chips for one in collect(family, chip, inputs, dtype)]
        found = dict.fromkeys(job_of(family, chip, one, dtype == torch.float32) for chip, one in launched)
        jobs |= dict.fromkeys(of_new_types(found, jobs) if jobs else found)
    return list(jobs)


def of_new_types(jobs: Iterable[Job], known: Iterable[Job]) -> list[Job]:
    """The first job for each combination of kernel, chip, element types and switches that no job of `known` has."""

    def combination(job: Job) -> tuple[Any, ...]:
        switches = tuple((name, value) for name, value in job.settings if isinstance(value, bool))
        return job.name, job.chip, job.pointers, switches

    seen = {combination(job) for job in known}
    first = {combination(job): job for job in reversed(list(jobs))}
    return [job for key, job in first.items() if key not in seen]


def sample(jobs: Iterable[Job]) -> list[Job]:
    """Up to two variants of each kernel, the first and the last by name, on alternating chips."""
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
