"""Runs of several processes, as far as one process can see them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.app.schema import REPO_ROOT
from experiments.sweep import job


def test_the_folder_of_a_rank_is_removed_when_it_ends(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from experiments.app.hardware import output_folder\n"
        "folder = output_folder(Path('asked')); (folder / 'file').write_text('x'); print(folder)"
    )
    environment = {"RANK": "1", "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO_ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(tmp_path)) and not list(tmp_path.iterdir())


def test_rank_0_alone_claims_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The others run it without a lock, and leave it where it is done."""
    summaries: list[dict[str, int] | None] = [None, {"rows": 1}]
    folder = SimpleNamespace(summary=lambda name: summaries.pop(0), claim=None)
    monkeypatch.setattr(job, "SweepFolder", lambda path: folder)
    monkeypatch.setattr(job, "is_main_process", lambda: False)
    runtime = SimpleNamespace(runtime=SimpleNamespace(output_dir=str(tmp_path / "job")))
    monkeypatch.setattr(job.HydraConfig, "get", lambda: runtime)
    config = SimpleNamespace(sweep=SimpleNamespace(name="s", force=False))
    run = job.as_job(lambda config, composed: "ran", [])
    composed: Any = None
    assert [run(config, composed), run(config, composed)] == ["ran", None]
