"""Compile every kernel of every family for four chips on a machine without a GPU, and hold it to the chip's
limits.

The cases marked `gate` are called inside `launch.record_launches(chip)`: nothing runs, the launches are kept, and
each distinct one is compiled ahead of time. Registers and spills then come from the binary (`cuobjdump
--dump-resource-usage`, or the metadata in the AMD assembly), shared and tensor memory from the compiler,
tensor-core instructions from the assembly. A kernel of a family that no gate case launches fails the gate as
a spill does, and so does a dot that the compiler left to the scalar units.

    python -m specdec_kernels.compile_gate [--family tree ...] [--chip sm90 ...] [--workers 2] [--sample]

The whole table takes minutes. `--sample` compiles up to two variants of every kernel, going round the chips;
which kernels are launched is checked in full all the same.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch

from specdec_kernels import FAMILIES
from specdec_kernels.cases import Maker
from specdec_kernels.launch import CHIPS, Launch, interpreting, record_launches

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
_ALIGNMENT = 16  # bytes of a pointer, or a factor of an integer, that the just-in-time compiler specialises on
_DIVISIBLE = [["tt.divisibility", _ALIGNMENT]]
# Name in the table -> instruction: PTX of sm90, sm100 and of every NVIDIA chip, then AMD assembly.
_TENSOR_CORE = {
    "wgmma": re.compile(r"\bwgmma\.mma_async"),
    "tcgen05": re.compile(r"\btcgen05\.mma"),
    "mma": re.compile(r"\bmma\.sync"),
    "mfma": re.compile(r"\bv_s?mfma"),
}
_SAMPLE_VARIANTS = 2


@dataclass(frozen=True)
class Limits:
    """Bytes of shared memory of a program and of a processor, and columns of tensor memory."""

    shared_bytes: int
    processor_shared_bytes: int
    tensor_columns: int


LIMITS = {
    "sm80": Limits(163 * 1024, 164 * 1024, 0),
    "sm90": Limits(227 * 1024, 228 * 1024, 0),
    "sm100": Limits(227 * 1024, 228 * 1024, 512),
    "gfx942": Limits(64 * 1024, 64 * 1024, 0),
}


@dataclass(frozen=True)
class Accepted:
    """A spill that is accepted up to so many bytes, and why."""

    spill_bytes: int
    reason: str


# (kernel, chip) -> what is accepted of it on that chip; any other excess fails all the same.
EXCEPTIONS: dict[tuple[str, str], Accepted] = {
    ("_mla_kernel", "sm90"): Accepted(
        8, "one register or two, stored before the loop and read after it; smaller tiles are slower"
    ),
    ("_finish_kernel", "sm90"): Accepted(
        8, "one register, at a vocabulary of two groups only: the compiler aims at 32"
    ),
    ("_select_kernel", "sm100"): Accepted(8, "one register, at a vocabulary of two groups only"),
}


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

    @property
    def variant(self) -> str:
        """The compile-time arguments that a reader can tell kernels apart by."""
        named = " ".join(f"{name}={value}" for name, value in self.constexprs if value is not None)
        pointers = {kind[1:] for _, kind in self.signature if kind.startswith("*")}
        kind = next((name for name in ("bf16", "fp16", "fp32") if name in pointers), "int")
        return f"{kind} w{self.num_warps} st{self.num_stages} {named}"


@dataclass(frozen=True)
class Usage:
    """Resources of a compiled kernel. `tensor_core` names the matrix instruction it uses, empty for none;
    `has_dot`: its source multiplies matrices; `occupancy`: the share of the processor's warps that fit at
    once."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_columns: int
    tensor_core: str
    has_dot: bool
    occupancy: float


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    job: Job
    usage: Usage | None
    error: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """(kernel, chip), as in `EXCEPTIONS`."""
        return self.job.kernel.__name__, self.job.chip

    @property
    def verdict(self) -> str:
        """`ok`, or what is wrong, with the reason where it is a listed exception."""
        if self.usage is None:
            return self.error
        problems, accepted = _excesses(self.usage, LIMITS[self.job.chip]), EXCEPTIONS.get(self.key)
        if not problems:
            return "ok"
        spills = 0 < self.usage.spill_bytes <= (accepted.spill_bytes if accepted else 0)
        if accepted and accepted.reason.strip() and spills and len(problems) == 1:
            return f"accepted: {accepted.reason}"
        return "; ".join(problems)

    @property
    def passes(self) -> bool:
        return self.verdict == "ok" or self.verdict.startswith("accepted: ")


def _excesses(usage: Usage, limits: Limits) -> list[str]:
    """What the kernel takes beyond its chip's limits, in words."""
    problems = []
    if usage.spill_bytes:
        problems.append(f"spills {usage.spill_bytes} bytes")
    if usage.shared_bytes > limits.shared_bytes:
        problems.append(f"shared {usage.shared_bytes} > {limits.shared_bytes}")
    if usage.tensor_columns > limits.tensor_columns:
        problems.append(f"tensor memory {usage.tensor_columns} > {limits.tensor_columns}")
    if usage.has_dot and not usage.tensor_core:
        problems.append("dot without tensor-core instructions")
    return problems


def collect(family: str, chip: str, inputs: dict[str, dict[str, Any]]) -> list[Launch]:
    """Launches that the gate cases of `family` make on `chip`; `inputs` keeps built cases between chips."""
    package = import_module(f"specdec_kernels.{family}")
    launches: list[Launch] = []
    for case in import_module(f"specdec_kernels.{family}.cases").CASES:
        if not case.gate:
            continue
        if case.name not in inputs:
            inputs[case.name] = case.build(Maker.seeded("cpu", torch.bfloat16))
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
        return value.data_ptr() % _ALIGNMENT == 0
    return _is_integer(value) and value % _ALIGNMENT == 0


def compile_job(job: Job) -> Row:
    """Compile one kernel and measure the result; a failure to compile is a row too."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    amd = job.chip.startswith("gfx")
    target = GPUTarget("hip", job.chip, 64) if amd else GPUTarget("cuda", int(job.chip[2:]), 32)
    attrs = {(index,): _DIVISIBLE for index in job.divisible}
    source = ASTSource(job.kernel, dict(job.signature), dict(job.constexprs), attrs)
    options = dict(num_warps=job.num_warps, num_stages=job.num_stages, enable_fp_fusion=True)
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as failure:  # any compiler error is the gate's finding, whatever its type
        return Row(job, None, f"does not compile: {type(failure).__name__}: {str(failure).strip()[-300:]}")
    return Row(job, _amd_usage(compiled) if amd else _nvidia_usage(compiled, job.chip))


def _nvidia_usage(compiled: Any, chip: str) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        command = [_cuobjdump(), "--dump-resource-usage", binary.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (_number(rf"\b{field}:(\d+)", report) for field in ("REG", "STACK", "LOCAL"))
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    return Usage(
        registers,
        stack + local,
        shared,
        getattr(compiled.metadata, "tmem_size", 0) or 0,
        _matrix_instruction(compiled.asm["ptx"]),
        _has_dot(compiled),
        _nvidia_occupancy(registers, shared, warps, LIMITS[chip]),
    )


def _nvidia_occupancy(registers: int, shared: int, warps: int, limits: Limits) -> float:
    """Share of 64 warps: 64 Ki registers, given out by 256 a warp; 1 KiB of shared memory kept a program."""
    warp_registers = -(-max(registers, 1) * 32 // 256) * 256
    by_registers = 65536 // (warp_registers * warps)
    by_shared = limits.processor_shared_bytes // (shared + 1024)
    return min(by_registers, by_shared, 64 // warps, 32) * warps / 64


def _matrix_instruction(assembly: str) -> str:
    """Which tensor-core instruction the assembly holds, the widest first."""
    return next((name for name, pattern in _TENSOR_CORE.items() if pattern.search(assembly)), "")


def _has_dot(compiled: Any) -> bool:
    """Whether the program, before any lowering, multiplies matrices."""
    return re.search(r"\btt\.dot(_scaled)?\b", compiled.asm["ttir"]) is not None


def _amd_occupancy(by_registers: float, shared: int, warps: int) -> float:
    """The compiler's figure knows registers alone: shared memory is given at launch, to 32 waves at most."""
    programs = LIMITS["gfx942"].processor_shared_bytes // max(shared, 1)
    return min(by_registers, programs * warps / 32)


def _amd_usage(compiled: Any) -> Usage:
    """Scalar spills go to lanes of a vector register and are no memory traffic, so they do not count."""
    text = compiled.asm["amdgcn"]
    spilled = _number(r"\.vgpr_spill_count:\s*(\d+)", text) * 4
    return Usage(
        _number(r"\.vgpr_count:\s*(\d+)", text),
        max(spilled, _number(r"\.private_segment_fixed_size:\s*(\d+)", text)),
        compiled.metadata.shared,
        0,
        _matrix_instruction(text),
        _has_dot(compiled),
        _amd_occupancy(
            _number(r"; Occupancy:\s*(\d+)", text) / 8, compiled.metadata.shared, compiled.metadata.num_warps
        ),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no match for {pattern!r} in the compiler's report")
    return int(found[1])


@cache
def _cuobjdump() -> str:
    """The disassembler that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        raise FileNotFoundError(f"Triton's cuobjdump is not at {tool}")
    return str(tool)


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


def run(
    families: Iterable[str], chips: Iterable[str], workers: int, sample: bool = False
) -> tuple[list[Row], list[str]]:
    """Rows of the table, and complaints: kernels that no gate case launches, exceptions nobody needs."""
    jobs: dict[Job, None] = {}
    complaints = []
    chips = list(chips)
    for family in families:
        inputs: dict[str, dict[str, Any]] = {}
        launched = {chip: collect(family, chip, inputs) for chip in chips}
        jobs |= {job_of(family, chip, one): None for chip, found in launched.items() for one in found}
        seen = {one.kernel.__name__ for found in launched.values() for one in found}
        complaints += [f"{family}: no gate case launches {name}" for name in sorted(kernels_of(family) - seen)]
    wanted = _sampled(jobs) if sample else list(jobs)
    # Long compilations first, so that no worker is left alone with one at the end.
    ordered = sorted(wanted, key=lambda job: (job.family != "attention", job.chip))
    rows = list(_compile_all(ordered, workers))
    return rows, complaints if sample else complaints + _idle_exceptions(rows)


def _sampled(jobs: Iterable[Job]) -> list[Job]:
    """Up to `_SAMPLE_VARIANTS` variants of each kernel, first and last by name, the chips taking turns."""
    by_kernel: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: (job.kernel.__name__, job.variant, job.chip)):
        by_kernel.setdefault(job.kernel.__name__, []).append(job)
    chosen = []
    for place, mine in enumerate(by_kernel.values()):
        variants = list(dict.fromkeys(job.variant for job in mine))
        kept = dict.fromkeys([variants[0], variants[-1]][:_SAMPLE_VARIANTS])
        for turn, variant in enumerate(kept, start=2 * place):
            of_variant = [job for job in mine if job.variant == variant]
            chosen.append(of_variant[turn % len(of_variant)])
    return chosen


def _idle_exceptions(rows: Iterable[Row]) -> list[str]:
    """Exceptions whose kernel was compiled for their chip and stayed within its limits."""
    verdicts: dict[tuple[str, str], list[bool]] = {}
    for row in rows:
        verdicts.setdefault(row.key, []).append(row.verdict == "ok")
    return [
        f"the exception for {kernel} on {chip} is not needed"
        for kernel, chip in EXCEPTIONS
        if all(verdicts.get((kernel, chip), [False]))
    ]


_jobs: list[Job] = []  # read by forked workers: kernels are functions of modules and do not pickle


def _compile_indexed(index: int) -> tuple[Usage | None, str]:
    row = compile_job(_jobs[index])
    return row.usage, row.error


def _compile_all(jobs: list[Job], workers: int) -> Iterable[Row]:
    if workers <= 1:
        yield from map(compile_job, jobs)
        return
    _jobs[:] = jobs
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for job, (usage, error) in zip(jobs, pool.map(_compile_indexed, range(len(jobs))), strict=True):
            yield Row(job, usage, error)


def table(rows: Iterable[Row]) -> str:
    """The rows as text, a kernel's chips together."""
    order = {chip: place for place, chip in enumerate(CHIPS)}
    lines = [
        f"{'kernel':<24}{'chip':<8}{'regs':>5}{'spill':>6}{'shared':>8}{'tmem':>5}{'mma':>8}{'occ':>5}"
        "  verdict | variant"
    ]
    for row in sorted(rows, key=lambda r: (r.job.kernel.__name__, r.job.variant, order[r.job.chip])):
        used = row.usage
        numbers = (
            f"{used.registers:>5}{used.spill_bytes:>6}{used.shared_bytes:>8}{used.tensor_columns:>5}"
            f"{used.tensor_core or '-':>8}{used.occupancy:>5.0%}"
            if used
            else f"{'-':>5}{'-':>6}{'-':>8}{'-':>5}{'-':>8}{'-':>5}"
        )
        lines.append(f"{row.job.kernel.__name__:<24}{row.job.chip:<8}{numbers}  {row.verdict} | {row.job.variant}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 0 when every kernel is there and within its limits, else 1."""
    parser = argparse.ArgumentParser(description="Compile every kernel for every chip and check the chip's limits.")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="default: all")
    parser.add_argument("--chip", action="append", choices=CHIPS, help="default: all")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--sample", action="store_true", help="two variants a kernel, the chips in turn")
    chosen = parser.parse_args(arguments)
    if interpreting():
        print("compile_gate: TRITON_INTERPRET=1 replaces the compiler; unset it", file=sys.stderr)
        return 1
    rows, complaints = run(chosen.family or FAMILIES, chosen.chip or CHIPS, chosen.workers, chosen.sample)
    print(table(rows))
    failed = [row for row in rows if not row.passes]
    for complaint in complaints:
        print(complaint)
    print(f"{len(rows)} compiled, {len(failed)} over a limit, {len(complaints)} complaints")
    return 1 if failed or complaints else 0


if __name__ == "__main__":
    sys.exit(main())
