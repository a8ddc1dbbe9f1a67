"""Runs the named tests of a mutant in a copy of the tree, in a process forked after the slow imports."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.mutants.mutant import ROOT, Mutant, copy_tree

CAUGHT, CRASHED, SURVIVED, BROKEN = "caught", "CRASHED", "SURVIVED", "BROKEN"
TIMEOUT_S = 150
"""Time for the tests of a mutant. That they take longer says nothing: it counts as a test that hangs only where one
test alone takes `HANG_S`."""
HANG_S = 100
BASELINE_TIMEOUT_S = 1800
OUR_PACKAGES = ("specdec_kernels", "algorithms", "experiments", "tools", "tests")
PROBLEM_LENGTH = 160


@dataclass(frozen=True)
class Outcome:
    """`caught`: a test failed. `SURVIVED`: all tests passed. `CRASHED`: the test process ended before any test failed.
    `BROKEN`: the mutant or its tests are stale. `test` is the pytest name of the test that caught it."""

    status: str
    detail: str
    test: str = ""


class _Recorder:
    """Records what pytest reports: failures, the number of tests that passed, and modules that do not load."""

    def __init__(self, sending: Connection) -> None:
        self._sending = sending
        self.failed: list[tuple[str, str]] = []
        self.passed = 0
        self.unloadable: list[str] = []

    def pytest_configure(self) -> None:
        """Hypothesis need not shrink a falsifying example, which can take minutes."""
        from hypothesis import Phase, settings

        settings.register_profile("mutants", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._sending.send(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            last = next((line for line in report.longreprtext.splitlines() if line.startswith("E ")), "")
            self.failed.append((report.nodeid, last[1:].strip()[:PROBLEM_LENGTH]))
        elif report.when == "call" and report.passed:
            self.passed += 1

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.unloadable.append(f"{report.nodeid}: {report.longreprtext.splitlines()[-1][:PROBLEM_LENGTH]}")


def load_heavy_modules() -> None:
    """Imports that all child processes share; none of them may import our packages."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # mutants are judged in the interpreter, on every machine alike
    os.environ["TRITON_INTERPRET"] = "1"
    sys.dont_write_bytecode = True
    for name in ("hypothesis", "pytest", "scipy.special", "torch", "triton", "triton.language"):
        __import__(name)


def run_mutant(mutant: Mutant, limit_s: float = TIMEOUT_S) -> Outcome:
    """Run the tests of one mutant for at most `limit_s`. A test that does not end counts as failed."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        copy_tree(copy)
        try:
            mutant.apply(copy)
        except (OSError, ValueError) as stale:
            return Outcome(BROKEN, str(stale))
        found = _in_child(copy, mutant.tests, stop_at_first=True, limit_s=limit_s)
    if found["hangs"]:
        return Outcome(CAUGHT, f"{short(found['hangs'])}: does not end", found["hangs"])
    if found["died"]:
        return Outcome(CRASHED, found["died"])
    if found["cut"]:
        return Outcome(SURVIVED, f"no test failed within {limit_s:.0f} s")
    if found["unloadable"] or found["code"] not in (0, 1):
        return Outcome(BROKEN, "; ".join(found["unloadable"]) or f"pytest ended with {found['code']}: stale tests?")
    if found["failed"]:
        test, problem = found["failed"][0]
        return Outcome(CAUGHT, f"{short(test)}: {problem}", test)
    if not found["passed"]:
        return Outcome(BROKEN, "none of its tests ran")
    return Outcome(SURVIVED, f"{found['passed']} tests passed")


def baseline(tests: Sequence[str]) -> dict[str, str]:
    """The tests that fail without a mutant, each with its problem."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_tree(Path(folder))
        found = _in_child(Path(folder), tests, stop_at_first=False, limit_s=BASELINE_TIMEOUT_S)
    if found["died"]:
        return {"the unchanged tree": found["died"]}
    if found["cut"] or found["hangs"]:
        return {"the unchanged tree": f"did not end within {BASELINE_TIMEOUT_S} s"}
    problems = dict(found["failed"]) | {problem: "does not load" for problem in found["unloadable"]}
    stale = {"pytest": f"ended with {found['code']}: stale tests?"} if found["code"] else {}
    return problems or stale


def short(test: str) -> str:
    return test.removeprefix("tests/").replace(".py::", " ")


def _in_child(copy: Path, tests: Sequence[str], stop_at_first: bool, limit_s: float) -> dict[str, Any]:
    """What pytest reports of `tests` in the copy; `cut` where they did not end, `hangs` the test that did not."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(copy, tuple(tests), stop_at_first, sending))
    child.start()
    sending.close()
    found: dict[str, Any] = dict(code=0, failed=[], passed=0, unloadable=[], hangs="", cut=False, died="")
    end, running, since = time.monotonic() + limit_s, "", time.monotonic()
    try:
        while receiving.poll(min(end, since + HANG_S) - time.monotonic()):
            report = receiving.recv()
            if not isinstance(report, str):
                return found | report
            running, since = report, time.monotonic()
        hangs = bool(running) and time.monotonic() - since >= HANG_S
        return found | dict(hangs=running if hangs else "", cut=not hangs)
    except EOFError:
        child.join()
        return found | dict(code=1, died=f"the test process ended with {child.exitcode}")
    finally:
        # With the processes that its tests have started, which may wait for each other for ever.
        assert child.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.join()


def _child(copy: Path, tests: tuple[str, ...], stop_at_first: bool, sending: Connection) -> None:
    """Import our packages from the copy, run pytest there, and send the report."""
    import pytest

    os.setsid()
    for name in [name for name in sys.modules if name.split(".")[0] in OUR_PACKAGES]:
        del sys.modules[name]
    os.chdir(copy)
    sys.path[:] = [str(copy), *(entry for entry in sys.path if entry and Path(entry).resolve() != ROOT)]
    log = copy / "pytest.log"
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    recorder = _Recorder(sending)
    arguments = ["-q", "-p", "no:cacheprovider", *(["-x"] if stop_at_first else []), *tests]
    code = int(pytest.main(arguments, plugins=[recorder]))
    module = sys.modules.get("specdec_kernels")
    if module is not None and copy not in Path(str(module.__file__)).parents:
        recorder.unloadable.append(f"the tests ran {module.__file__}, not the copy")
    errors = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR: ")]
    recorder.unloadable += errors if code not in (0, 1) else []
    sending.send(dict(code=code, failed=recorder.failed, passed=recorder.passed, unloadable=recorder.unloadable))
    sending.close()
    os._exit(0)
