"""Every command in README.md is run as it stands, from the repository root, as a reader would run it.

The first one runs in a shell. The others run in processes that are forked behind the import of large libraries, see
`tests/programs.py`.

`make` targets are taken apart with `make -n` instead, since running them would install an environment and run this
suite inside itself. Any other kind of command is refused.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import run_python

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
TIMEOUT_S = 280


def commands() -> list[str]:
    """Lines of all fenced bash blocks; a trailing backslash continues a line, comments and prompts are dropped."""
    if not README.is_file():
        return []
    blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line.removeprefix("$ ") for line in lines if line and not line.startswith("#")]


def kind(command: str) -> str:
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        return "make"
    return "python" if words[0].startswith(("python", "TRITON_")) else "unknown"


def of(wanted: str) -> list[str]:
    return list(dict.fromkeys(command for command in commands() if kind(command) == wanted))


def test_the_readme_has_commands_and_each_is_of_a_known_kind() -> None:
    assert README.is_file(), "README.md is missing"
    assert {"make run", "make test"} <= {" ".join(shlex.split(c, comments=True)) for c in of("make")}
    assert of("python"), "no python command in any fenced block"
    assert of("unknown") == []


@pytest.mark.parametrize("command", of("make"))
def test_make_targets_exist(command: str) -> None:
    words = shlex.split(command, comments=True)
    done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    recipe = {"run": "run.py algo=dflash backend=fa4", "test": "-m pytest"}
    assert recipe.get(words[1], "") in done.stdout


@pytest.mark.commands
@pytest.mark.parametrize("command", of("python"))
def test_python_commands_run(command: str) -> None:
    """In the order of the page: the last one reads what a sweep before it wrote."""
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": here, "COLUMNS": "110"}
    environment.pop("TRITON_INTERPRET", None)  # as in a reader's shell
    words = shlex.split(command, comments=True)
    if command == of("python")[0] or words[0] != "python":
        done = subprocess.run(
            command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    else:
        done = run_python(*words[1:], cwd=ROOT, env=environment, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
