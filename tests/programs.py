"""Runs Python programs in processes that have imported the largest libraries already.

Torch, transformers and wandb take two seconds of every process that imports them. A server imports them once and forks
for each program. Nothing of this repository is imported before the fork, and neither is Triton, which reads
TRITON_INTERPRET as it is imported: for the program these imports are only shorter. The server has no threads.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "transformers", "wandb", "hydra")


def run_python(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)` gives, for `-m MODULE …`,
    `-c CODE …` and `SCRIPT …`. Raises `subprocess.TimeoutExpired`."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("out", "err")]
        whole = dict(os.environ if env is None else env)
        process = fork_server().Process(
            target=_become, args=(arguments, str(cwd), whole, [str(path) for path in streams])
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(arguments), timeout)
        out, err = (path.read_text(encoding="utf-8") for path in streams)
        return subprocess.CompletedProcess(list(arguments), process.exitcode, out, err)


@cache
def fork_server() -> ForkServerContext:
    """The context of the server, which starts with the first process; all of Python's use it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LIBRARIES))
    return context


def _become(arguments: Sequence[str], cwd: str, env: Mapping[str, str], streams: Sequence[str]) -> None:
    """Let this process be `python ARGUMENTS` in `cwd`."""
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    run, first = _program(arguments)
    added = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *added, *(path for path in sys.path if path and path != _ROOT)]
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]
    run()


_ROOT = str(Path(__file__).resolve().parent.parent)


def _program(arguments: Sequence[str]) -> tuple[Any, str]:
    """A function that runs the program, and what stands first in `sys.path` for it."""
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True), os.getcwd()
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        return lambda: exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"}), ""
    sys.argv = list(arguments)
    return lambda: runpy.run_path(kind, run_name="__main__"), str(Path(kind).resolve().parent)
