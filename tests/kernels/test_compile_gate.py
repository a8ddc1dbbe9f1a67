"""The gate compiles for a chip that is not there, and refuses what does not fit."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_compiled(*arguments: str, timeout: int = 280) -> subprocess.CompletedProcess[str]:
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


def test_one_family_for_two_makes_of_chip() -> None:
    done = run_compiled(
        "-m", "specdec_kernels.compile_gate", "--family", "tree", "--chip", "sm90", "--chip", "gfx942"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "_tree_kernel" in done.stdout and "_chain_kernel" in done.stdout
    assert "0 over a limit, 0 kernels not covered" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_family_for_every_chip() -> None:
    done = run_compiled("-m", "specdec_kernels.compile_gate", timeout=1200)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_it_refuses_to_run_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specdec_kernels.compile_gate", "--family", "tree"],
        cwd=ROOT,
        env=dict(os.environ, TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "TRITON_INTERPRET" in done.stderr


def test_spills_excess_and_missing_kernels_fail(tmp_path: Path) -> None:
    """A kernel that must spill, one too large for shared memory, a family whose kernel no case launches."""
    (tmp_path / "hungry.py").write_text(
        textwrap.dedent(
            """
            import torch, triton, triton.language as tl
            from specdec_kernels import compile_gate as gate
            from specdec_kernels.launch import Launch

            @triton.jit
            def spilling(x, out, BLOCK: tl.constexpr):
                lane = tl.arange(0, BLOCK)
                kept = tl.load(x + lane)
                tl.debug_barrier()
                tl.store(out + lane, tl.sort(kept) + kept)

            @triton.jit
            def wide(x, out, BLOCK: tl.constexpr):
                row = tl.arange(0, BLOCK)
                tile = tl.load(x + row[:, None] * BLOCK + row[None, :])
                tl.store(out + row[:, None] * BLOCK + row[None, :], tl.dot(tile, tl.trans(tile)))

            @triton.jit
            def modest(x, out, BLOCK: tl.constexpr):
                tl.store(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)))

            x = torch.zeros(16)
            def verdict(kernel, block, chip):
                job = gate.job_of("test", chip, Launch(kernel, (x, x), dict(BLOCK=block), 1, 1))
                row = gate.compile_job(job)
                return row.verdict if not row.passes else "ok"

            assert verdict(modest, 256, "sm90") == "ok"
            assert "spills" in verdict(spilling, 16384, "sm80"), verdict(spilling, 16384, "sm80")
            excess = verdict(wide, 256, "gfx942")
            assert "shared" in excess or "spills" in excess, excess
            gate.EXCEPTIONS[("spilling", "sm80")] = "known"
            assert verdict(spilling, 16384, "sm80") == "ok"
            gate.collect = lambda family, chip, inputs: []
            rows, missing = gate.run(["tree"], ["sm90"], 1)
            kernels = ("_chain_kernel", "_tree_kernel")
            assert sorted(missing) == [f"tree: no gate case launches {kernel}" for kernel in kernels]
            """
        )
    )
    done = run_compiled("-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, '.']; import hungry")
    assert done.returncode == 0, done.stderr
