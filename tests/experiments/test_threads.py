"""Threads on a CPU: cores that may be used, and the environment that torch reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.app import cpu_threads as threads
from experiments.app.schema import REPO_ROOT


@pytest.mark.parametrize(
    ("cpus", "siblings", "quota", "expected"),
    [
        ({0, 1}, {0: "0", 1: "1"}, "max 100000", 2),
        ({0, 1, 2, 3}, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, None, 2),
        (set(range(64)), {}, "250000 100000", 3),
        ({5}, {5: "5,37"}, "50000 100000", 1),
        ({0, 1, 2}, {}, None, 3),
    ],
    ids=["cores", "hyperthreads", "quota", "affinity", "unknown"],
)
def test_cores_that_may_be_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cpus: set[int],
    siblings: dict[int, str],
    quota: str | None,
    expected: int,
) -> None:
    for cpu, text in siblings.items():
        (tmp_path / str(cpu)).write_text(f"{text}\n")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(threads, "SIBLINGS", f"{tmp_path}/{{}}")
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: cpus)
    assert threads.physical_cores() == expected


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    threads.settle_threads()
    assert (threads.os.environ["OMP_NUM_THREADS"], threads.os.environ["OMP_WAIT_POLICY"]) == ("7", "PASSIVE")


def test_every_program_settles_before_it_imports_torch() -> None:
    found = "import os, sys, experiments; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run([sys.executable, "-c", found], env=environment, cwd=REPO_ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["PASSIVE", "False"], done.stderr
