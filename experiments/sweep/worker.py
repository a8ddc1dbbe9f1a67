"""A process that runs rows one after the other, so that they share a loaded target.

    python -m experiments.sweep.worker

reads one JSON object per line (`program`, `arguments`, `log`), runs the program as its own process would, prints into
the log, and answers with the exit code. What a run leaves on the device is freed before the next one.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from experiments.sweep.row import end_with_parent


def run_program(program: Sequence[str], arguments: Sequence[str]) -> int:
    """Run a program as `python PROGRAM ARGUMENTS` does, in this process. Returns its exit code."""
    before = sys.argv
    try:
        if program[0] == "-m":
            sys.argv = [program[1], *arguments]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [program[0], *arguments]
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as ending:
        return _exit_code(ending.code)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.argv = before
    return 0


def _exit_code(code: Any) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _into(log: str) -> None:
    """Send what this process prints into `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def _free() -> None:
    """Return the memory of the last run to the device."""
    gc.collect()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        sys.modules["torch"].cuda.empty_cache()
        sys.modules["torch"].cuda.reset_peak_memory_stats()


def main() -> None:
    """Serve until the input ends."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        _into(asked["log"])
        code = run_program(asked["program"], asked["arguments"])
        sys.stdout.flush()
        sys.stderr.flush()
        _free()
        answers.write(f"{code}\n")
        answers.flush()


if __name__ == "__main__":
    main()
