"""Compile one job ahead of time, and read from the binary what the kernel takes of the chip."""

import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tools.compile_gate.jobs import ALIGNMENT, Job

# Name in the table -> instruction: PTX of sm90, sm100 and of every NVIDIA chip, then AMD assembly.
_TENSOR_CORE = {
    "wgmma": re.compile(r"\bwgmma\.mma_async"),
    "tcgen05": re.compile(r"\btcgen05\.mma"),
    "mma": re.compile(r"\bmma\.sync"),
    "mfma": re.compile(r"\bv_s?mfma"),
}


@dataclass(frozen=True)
class Usage:
    """Resources of a compiled kernel. `tensor_core`: its matrix instruction, if any; `has_dot`: its source multiplies
    matrices."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_columns: int
    tensor_core: str
    has_dot: bool


def compile_job(job: Job) -> Usage | str:
    """Resources of the compiled kernel, or the compiler's complaint."""
    amd = job.chip.startswith("gfx")
    target = GPUTarget("hip", job.chip, 64) if amd else GPUTarget("cuda", int(job.chip[2:]), 32)
    attrs = {path: [["tt.divisibility", ALIGNMENT]] for path in job.divisible}
    source_class: Any = ASTSource
    if job.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_class = GluonASTSource
    source = source_class(job.kernel, dict(job.signature), dict(job.constexprs), attrs)
    options = dict(num_warps=job.num_warps, num_stages=job.num_stages, enable_fp_fusion=True)
    if job.max_registers is not None:  # not an option of every chip's compiler
        options["maxnreg"] = job.max_registers
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as failure:  # any compiler error, of any type, is a result of the gate
        return f"does not compile: {type(failure).__name__}: {str(failure).strip()[-300:]}"
    asm, metadata = compiled.asm, compiled.metadata
    registers, spilled = _amd_registers(asm["amdgcn"]) if amd else _nvidia_registers(asm["cubin"])
    assembly = asm["amdgcn" if amd else "ptx"]
    core = next((name for name, pattern in _TENSOR_CORE.items() if pattern.search(assembly)), "")
    # Of the program before any lowering; Gluon names the instruction itself.
    has_dot = re.search(r"\btt\.dot(_scaled)?\b", asm.get("ttir", "")) is not None
    return Usage(registers, spilled, metadata.shared, getattr(metadata, "tmem_size", 0) or 0, core, has_dot)


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


def _nvidia_registers(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of spills)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(cubin)
        binary.flush()
        command = [str(tool), "--dump-resource-usage", binary.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (_number(rf"\b{field}:(\d+)", report) for field in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def _amd_registers(assembly: str) -> tuple[int, int]:
    """(registers, bytes of spills). Scalar spills go to lanes of a vector register, so they do not count."""
    spilled = _number(r"\.vgpr_spill_count:\s*(\d+)", assembly) * 4
    private = _number(r"\.private_segment_fixed_size:\s*(\d+)", assembly)
    return _number(r"\.vgpr_count:\s*(\d+)", assembly), max(spilled, private)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no match for {pattern!r} in the compiler's report")
    return int(found[1])
