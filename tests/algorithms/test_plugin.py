"""Adding an algorithm: one file and its config go through engine, tree verification, report and records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from algorithms.registry import PACKAGES_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "tests/plugin"


def run_cli(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, PACKAGES_VARIABLE: "tests.plugin", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "run.py"), "--config-dir", str(PLUGIN / "configs"), *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)


def test_one_file_is_an_algorithm(tmp_path: Path) -> None:
    assert len((PLUGIN / "bigram.py").read_text().splitlines()) <= 60
    settings = ("algo=bigram", "data=code", "data.limit=2", "tracker=none", "runtime.impl=reference")
    done = run_cli(tmp_path, *settings, "sampling.max_new_tokens=40")
    assert done.returncode == 0, done.stderr
    (summary_file,) = tmp_path.glob("outputs/**/summary.json")
    summary = json.loads(summary_file.read_text())
    row = summary["rows"][-1]
    assert row["algo"] == "bigram"
    assert row["lossless"] == {"checked": 2, "identical": 2, "first_difference": None}
    assert row["tokens_per_step"] > 1.1
    assert "bigram" in (summary_file.parent / "report.html").read_text()


def test_its_settings_are_checked(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "algo=bigram", "algo.widht=2")
    assert done.returncode == 2 and "algo.width" in done.stderr
