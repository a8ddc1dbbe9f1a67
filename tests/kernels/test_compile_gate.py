"""The gate compiles for a chip that is not there, and refuses what does not fit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1900)  # compilers are slow on a busy machine


def run_compiled(*arguments: str, timeout: int = 1800) -> subprocess.CompletedProcess[str]:
    """Run Python outside the interpreter mode of this suite."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.parametrize("options", [("--sample",), pytest.param((), marks=pytest.mark.slow)], ids=["sample", "whole"])
def test_every_kernel_fits_the_chips(options: tuple[str, ...]) -> None:
    """Every kernel of every family is launched by a gate case; `make gate` compiles the whole table."""
    done = run_compiled("-m", "specdec_kernels.compile_gate", *options)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "0 over a limit, 0 complaints" in done.stdout


def test_it_refuses_to_run_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specdec_kernels.compile_gate", "--family", "tree"],
        cwd=ROOT,
        env=dict(os.environ, TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 1 and "TRITON_INTERPRET" in done.stderr


def test_spills_excess_and_missing_kernels_fail(tmp_path: Path) -> None:
    """A kernel that must spill, usage beyond a chip's limits, a family whose kernel no case launches."""
    (tmp_path / "hungry.py").write_text(
        textwrap.dedent(
            """
            import torch, triton, triton.language as tl
            from specdec_kernels import compile_gate as gate
            from specdec_kernels.launch import Launch

            @triton.jit
            def copying(x, out, BLOCK: tl.constexpr):
                lane = tl.arange(0, BLOCK)
                kept = tl.load(x + lane)
                tl.debug_barrier()  # all of the block is in registers here
                tl.store(out + lane, kept)

            x = torch.zeros(16)
            def job(block):
                return gate.job_of("test", "sm80", Launch(copying, (x, x), dict(BLOCK=block), 1, 1))

            assert gate.compile_job(job(256)).verdict == "ok"
            spilling = gate.compile_job(job(16384))
            assert "spills" in spilling.verdict and not spilling.passes, spilling
            bytes_ = spilling.usage.spill_bytes
            gate.EXCEPTIONS[("copying", "sm80")] = gate.Accepted(bytes_, " ")
            assert not spilling.passes, "an exception without a reason"
            gate.EXCEPTIONS[("copying", "sm80")] = gate.Accepted(bytes_ - 1, "known")
            assert not spilling.passes, "a larger spill than was accepted"
            gate.EXCEPTIONS[("copying", "sm80")] = gate.Accepted(bytes_, "known")
            assert spilling.verdict == "accepted: known" and spilling.passes
            idle = ["the exception for copying on sm80 is not needed"]
            assert gate._idle_exceptions([gate.compile_job(job(256))]) == idle
            assert gate._idle_exceptions([spilling]) == gate._idle_exceptions([]) == []

            def verdict(chip, shared, columns, dot=False, core=""):
                launched = Launch(copying, (x, x), dict(BLOCK=256), 1, 1)
                usage = gate.Usage(32, 0, shared, columns, core, dot, 1.0)
                return gate.Row(gate.job_of("test", chip, launched), usage).verdict
            assert verdict("gfx942", 64 * 1024, 0) == "ok"
            assert verdict("gfx942", 64 * 1024 + 1, 0) == "shared 65537 > 65536"
            assert verdict("sm100", 1024, 576) == "tensor memory 576 > 512"

            assert verdict("sm90", 1024, 0, dot=True) == "dot without tensor-core instructions"
            assert verdict("sm90", 1024, 0, dot=True, core="wgmma") == "ok"

            @triton.jit
            def multiplying(x, out, BLOCK: tl.constexpr):
                at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
                tl.store(out + at, tl.dot(tl.load(x + at), tl.load(x + at), input_precision="ieee"))

            def usage(chip, dtype):
                x = torch.zeros(16, dtype=dtype)
                launched = Launch(multiplying, (x, x), dict(BLOCK=64), 4, 1)
                return gate.compile_job(gate.job_of("test", chip, launched)).usage

            cores = {chip: usage(chip, torch.float16).tensor_core for chip in gate.CHIPS}
            assert cores == dict(sm80="mma", sm90="wgmma", sm100="tcgen05", gfx942="mfma"), cores
            scalar = usage("sm80", torch.float32)
            assert scalar.has_dot and scalar.tensor_core == ""

            gate.collect = lambda family, chip, inputs: []
            rows, missing = gate.run(["tree"], ["sm90"], 1)
            named = {line.removeprefix("tree: no gate case launches ") for line in missing}
            assert {"_chain_kernel", "_tree_kernel", "_rerank_kernel"} <= named, missing
            """
        )
    )
    done = run_compiled("-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, '.']; import hungry")
    assert done.returncode == 0, done.stderr
