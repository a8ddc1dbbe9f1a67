"""Compile one job ahead of time, and read from the binary what the kernel takes of the chip."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tools.compile_gate.jobs import ALIGNMENT, Job

# Name in the table -> instruction: PTX of sm90, sm100 and of every NVIDIA chip, then AMD assembly.
_TENSOR_CORE = {
    "wgmma": re.compile(r"\bwgmma\.mma_async"),
    "tcgen05": re.compile(r"\btcgen05\.mma"),
    "mma": re.compile(r"\bmma\.sync"),
    "mfma": re.compile(r"\bv_s?mfma"),
}
_PROCESSOR_SHARED_BYTES = {"sm80": 164 * 1024, "sm90": 228 * 1024, "sm100": 228 * 1024, "gfx942": 64 * 1024}


@dataclass(frozen=True)
class Usage:
    """Resources of a compiled kernel.

    `tensor_core` names the matrix instruction it uses, empty for none; `has_dot`: its source multiplies matrices;
    `occupancy`: the share of the processor's warps that fit at once.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_columns: int
    tensor_core: str
    has_dot: bool
    occupancy: float


def compile_job(job: Job) -> Usage | str:
    """What the compiled kernel takes, or the compiler's complaint."""
    import triton
    from triton.backends.compiler import GPUTarget

    amd = job.chip.startswith("gfx")
    target = GPUTarget("hip", job.chip, 64) if amd else GPUTarget("cuda", int(job.chip[2:]), 32)
    attrs = {(index,): [["tt.divisibility", ALIGNMENT]] for index in job.divisible}
    source = _source_class(job.kernel)(job.kernel, dict(job.signature), dict(job.constexprs), attrs)
    options = dict(num_warps=job.num_warps, num_stages=job.num_stages, enable_fp_fusion=True, maxnreg=job.max_registers)
    if job.max_registers is None:
        del options["maxnreg"]  # not an option of every chip's compiler
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as failure:  # any compiler error is a result of the gate, whatever its type
        return f"does not compile: {type(failure).__name__}: {str(failure).strip()[-300:]}"
    return _amd_usage(compiled) if amd else _nvidia_usage(compiled, job.chip)


def _source_class(kernel: Any) -> Any:
    """What `triton.compile` takes a kernel as: Gluon has a class of its own."""
    from triton.compiler import ASTSource

    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


_jobs: Sequence[Job] = ()  # read by forked workers: kernels are functions of modules and do not pickle


def _compile_indexed(index: int) -> Usage | str:
    return compile_job(_jobs[index])


def compile_all(jobs: Sequence[Job], workers: int) -> Iterator[Usage | str]:
    """The results of `compile_job` in order, from `workers` processes."""
    global _jobs
    if workers <= 1:
        yield from map(compile_job, jobs)
        return
    _jobs = jobs
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_compile_indexed, range(len(jobs)))


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
        _nvidia_occupancy(registers, shared, warps, chip),
    )


def _nvidia_occupancy(registers: int, shared: int, warps: int, chip: str) -> float:
    """Share of 64 warps: 64 Ki registers in units of 256 per warp, 1 KiB of shared memory reserved per program."""
    warp_registers = -(-max(registers, 1) * 32 // 256) * 256
    by_registers = 65536 // (warp_registers * warps)
    by_shared = _PROCESSOR_SHARED_BYTES[chip] // (shared + 1024)
    return min(by_registers, by_shared, 64 // warps, 32) * warps / 64


def _amd_usage(compiled: Any) -> Usage:
    """Scalar spills go to lanes of a vector register and are no memory traffic, so they do not count.

    The compiler's occupancy knows registers alone; shared memory is given at launch, to 32 waves at most.
    """
    text, shared = compiled.asm["amdgcn"], compiled.metadata.shared
    spilled = _number(r"\.vgpr_spill_count:\s*(\d+)", text) * 4
    programs = _PROCESSOR_SHARED_BYTES["gfx942"] // max(shared, 1)
    return Usage(
        _number(r"\.vgpr_count:\s*(\d+)", text),
        max(spilled, _number(r"\.private_segment_fixed_size:\s*(\d+)", text)),
        shared,
        0,
        _matrix_instruction(text),
        _has_dot(compiled),
        min(_number(r"; Occupancy:\s*(\d+)", text) / 8, programs * compiled.metadata.num_warps / 32),
    )


def _matrix_instruction(assembly: str) -> str:
    """Which tensor-core instruction the assembly holds, the widest first."""
    return next((name for name, pattern in _TENSOR_CORE.items() if pattern.search(assembly)), "")


def _has_dot(compiled: Any) -> bool:
    """Whether the program, before any lowering, multiplies matrices. Gluon names the instruction itself."""
    return re.search(r"\btt\.dot(_scaled)?\b", compiled.asm.get("ttir", "")) is not None


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
