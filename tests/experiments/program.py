"""Calls run.py in this process, which spares its imports."""

import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiments.app import cli
from experiments.app.schema import REPO_ROOT
from experiments.sweep.main import main
from experiments.tasks.run import run_task


@dataclass(frozen=True)
class Done:
    """How a call of the program ended, and the folder it left, if any."""

    returncode: int
    stdout: str
    stderr: str
    folder: Path | None

    def read(self, name: str) -> str:
        assert self.folder is not None, self.stderr
        return (self.folder / name).read_text()

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.read(name).splitlines()]

    @property
    def results(self) -> list[dict[str, Any]]:
        return json.loads(self.read("summary.json"))["rows"]


Run = Callable[..., Done]


def model_settings(models: Path) -> list[str]:
    """Settings of a run with the models in the folder."""
    drafts = [f"model.drafts.{algo}={models / name}" for algo, name in (("dflash", "dflash"), ("standalone", "draft"))]
    return ["model=local", f"model.path={models / 'target'}", *drafts]


def called(home: Path, *arguments: str) -> Done:
    """`python run.py ARGUMENTS` in `home`."""
    before = set((home / "outputs/test").glob("*"))
    code, out, err = 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(home)
        patch.delenv(cli.FULL_ERROR, raising=False)
        fixed = ["runtime.device=cpu", "runtime.impl=reference", "tracker=none", "name=test"]
        options = [word for word in arguments if word.startswith("-")]  # first, as argparse wants them
        patch.setattr(sys, "argv", ["run.py", *options, *fixed, *(word for word in arguments if word not in options)])
        try:
            if options:
                main(run_task, [str(REPO_ROOT / "run.py")])
            else:
                cli.main(run_task)
        except SystemExit as end:
            code = int(end.code or 0)
    found = set((home / "outputs/test").glob("*")) - before
    return Done(code, out.getvalue(), err.getvalue(), found.pop() if found else None)
