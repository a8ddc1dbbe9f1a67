"""Children that have imported what this process has: programs start in them without the seconds that imports take."""

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from experiments.sweep import processes


class Forked:
    """A child that runs `function`, with the interface of `subprocess.Popen` that is needed here."""

    def __init__(self, function: Callable[[], Any], keep: Sequence[int] = ()) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(function, keep)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        code = self._wait(0)
        assert code is not None
        return code

    def terminate(self) -> None:
        os.kill(self.pid, 15)

    def _wait(self, option: int) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, option))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode


def _run(function: Callable[[], Any], keep: Sequence[int]) -> None:
    """End this process with the code that a program of `function` alone has."""
    code = 1
    try:
        low = 3
        for number in [*sorted(keep), os.sysconf("SC_OPEN_MAX")]:  # a pipe ends when all of its copies are closed
            os.closerange(low, number)
            low = number + 1
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        GlobalHydra.instance().clear()
        function()
        code = 0
    except SystemExit as ending:
        code = int(ending.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Let the workers of sweeps be children that have imported everything."""

    def started(command: Sequence[str], pass_fds: Sequence[int], env: Mapping[str, str], **_: Any) -> Forked:
        def work() -> None:
            os.environ.clear()
            os.environ.update(env)
            exec(command[-1], {})

        return Forked(work, pass_fds)

    patch.setattr(processes, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": started}))
