"""The gate compiles for a chip that is not there, and refuses what does not fit."""

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.programs import run_python as run_in_fork

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1900)  # compilers are slow on a busy machine


def run_python(*arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python with or without the interpreter mode, whatever this suite runs in."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    return run_in_fork(*arguments, cwd=ROOT, env=environment, timeout=1800)


def test_it_refuses_to_run_in_the_interpreter() -> None:
    done = run_python("-m", "tools.compile_gate", "--family", "tree", interpret=True)
    assert done.returncode == 1 and "TRITON_INTERPRET" in done.stderr


PREAMBLE = """
import torch, triton, triton.language as tl
from specdec_kernels.launch import CHIPS, Launch
from tools.compile_gate import __main__ as gate
from tools.compile_gate import verdict
from tools.compile_gate.jobs import job_of
from tools.compile_gate.usage import Usage, compile_job
from tools.compile_gate.verdict import ALLOWED_SPILLS, AllowedSpill, Row

@triton.jit
def copying(x, out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    kept = tl.load(x + lane)
    tl.debug_barrier()  # all of the block is in registers here
    tl.store(out + lane, kept)

x = torch.zeros(16)

def job(block, chip="sm80"):
    return job_of("test", chip, Launch(copying, (x, x), dict(BLOCK=block), 1, 1))

def compiled(block):
    return Row(job(block), compile_job(job(block)))
"""


def run_program(folder: Path, program: str) -> None:
    """Run `program` behind the preamble, as a file: Triton reads the source of its kernels."""
    (folder / "program.py").write_text(PREAMBLE + textwrap.dedent(program))
    done = run_python("-c", f"import sys; sys.path[:0] = [{str(folder)!r}, '.']; import program")
    assert done.returncode == 0, done.stderr


def test_what_exceeds_a_chip_fails_but_for_a_spill_that_is_listed_with_its_size_and_a_reason(tmp_path: Path) -> None:
    """Registers, shared memory, tensor memory, and products on the scalar units."""
    run_program(
        tmp_path,
        """
        assert compiled(256).verdict == "ok"
        spilling = compiled(16384)
        assert "spills" in spilling.verdict and not spilling.passes, spilling
        bytes_ = spilling.result.spill_bytes
        ALLOWED_SPILLS[("copying", "sm80")] = AllowedSpill(bytes_, " ")
        assert not spilling.passes, "an allowed spill without a reason"
        ALLOWED_SPILLS[("copying", "sm80")] = AllowedSpill(bytes_ - 1, "known")
        assert not spilling.passes, "a larger spill than is allowed"
        ALLOWED_SPILLS[("copying", "sm80")] = AllowedSpill(bytes_, "known")
        assert spilling.verdict == "allowed: known" and spilling.passes

        def verdict(chip, shared, columns, dot=False, core="", spill=0):
            return Row(job(256, chip), Usage(32, spill, shared, columns, core, dot)).verdict

        assert verdict("gfx942", 64 * 1024, 0) == "ok"
        assert verdict("gfx942", 64 * 1024 + 1, 0) == "shared 65537 > 65536"
        assert verdict("sm100", 1024, 576) == "tensor memory 576 > 512"
        assert verdict("sm90", 1024, 0, dot=True) == "dot without tensor-core instructions"
        assert verdict("sm90", 1024, 0, dot=True, core="wgmma") == "ok"
        ALLOWED_SPILLS[("copying", "gfx942")] = AllowedSpill(8, "known")
        assert verdict("gfx942", 64 * 1024 + 1, 0, spill=8) == "spills 8 bytes; shared 65537 > 65536"
        """,
    )


def test_matrix_products_use_the_tensor_cores_of_every_chip(tmp_path: Path) -> None:
    run_program(
        tmp_path,
        """
        @triton.jit
        def multiplying(x, out, BLOCK: tl.constexpr):
            at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            tl.store(out + at, tl.dot(tl.load(x + at), tl.load(x + at), input_precision="ieee"))

        def usage(chip, dtype):
            x = torch.zeros(16, dtype=dtype)
            return compile_job(job_of("test", chip, Launch(multiplying, (x, x), dict(BLOCK=64), 4, 1)))

        cores = {chip: usage(chip, torch.float16).tensor_core for chip in CHIPS}
        assert cores == dict(sm80="mma", sm90="wgmma", sm100="tcgen05", gfx942="mfma"), cores
        scalar = usage("sm80", torch.float32)
        assert scalar.has_dot and scalar.tensor_core == ""
        """,
    )


def test_attention_compiles_for_every_pair_of_query_and_cache_types(tmp_path: Path) -> None:
    """The gate reaches each pair on each chip; float32 queries over a float8 cache compile in the smallest and the
    largest tile of sm90, and fit. They may spill and use the scalar units, because they only check results."""
    run_program(
        tmp_path,
        """
        from tools.compile_gate.jobs import collect, jobs_of

        def pair(job):
            types = dict(job.signature)
            return types["tensors"].q, types["kv_ptr"]

        found = jobs_of("attention", list(CHIPS))
        halves = ("*bf16", "*fp16", "*fp32")
        for chip in CHIPS:
            pairs = {pair(job) for job in found if job.chip == chip and job.name == "_attention_kernel"}
            assert pairs == {(q, kv) for q in halves for kv in (q, "*u8")}, (chip, pairs)

        jobs = [job_of("attention", "sm90", one, True) for one in collect("attention", "sm90", {}, torch.float32)]
        over_codes = {dict(job.settings).get("BLOCK_M"): job for job in jobs if "u8" in job.pointers}
        for rows in (16, 128):
            row = Row(over_codes[rows], compile_job(over_codes[rows]))
            assert row.passes, row.verdict
        spilling = Usage(255, 64, 1024, 0, "", True)
        assert Row(over_codes[16], spilling).passes and not Row(job(256, "sm90"), spilling).passes
        """,
    )


def test_kernels_that_no_case_launches_are_complaints(tmp_path: Path) -> None:
    run_program(
        tmp_path,
        """
        gate.jobs_of = lambda family, chips: []
        rows, complaints = gate.run(["tree"], ["sm90"], 1)
        named = {line.removeprefix("tree: no gate case launches ") for line in complaints}
        assert {"_links_kernel", "_rerank_kernel"} <= named, complaints
        """,
    )
