"""The runner of mutants tells outcomes apart, and random mutants are valid; `make mutants` runs the mutants."""

import ast
import re

import pytest

from tests.mutants import __main__ as command
from tests.mutants.mutant import ROOT, Mutant, known
from tests.mutants.random_mutants import random_mutants
from tests.mutants.runner import BROKEN, CAUGHT, CRASHED, SURVIVED, Outcome, run_mutant


def planted(**changes: str) -> Mutant:
    given = dict(
        path="specdec_kernels/tree/types.py",
        old="from typing import Annotated, NamedTuple",
        new="from typing import Annotated, NamedTuple  # harmless",
        bug="none",
    )
    test = changes.pop("test", "tests/test_imports.py::test_kernels_import_torch_and_triton_only")
    return Mutant(**(given | changes), tests=(test,))


@pytest.mark.parametrize(
    "mutant, status, detail",
    [
        (planted(), SURVIVED, "1 tests passed"),
        (
            planted(new="from typing import Annotated, NamedTuple\nimport numpy"),
            CAUGHT,
            "test_imports test_kernels_import",
        ),
        (
            planted(path="tests/test_imports.py", old="import ast\n", new="import os\nos._exit(3)\n"),
            CRASHED,
            "ended with 3",
        ),
        (planted(old="no such text"), BROKEN, "expected its text once in .*, found it 0 times"),
        (planted(test="tests/test_imports.py::test_of_nothing"), BROKEN, "stale tests"),
    ],
    ids=["survived", "caught", "crashed", "stale text", "stale test"],
)
def test_the_runner_tells_outcomes_apart(mutant: Mutant, status: str, detail: str) -> None:
    outcome = run_mutant(mutant)
    assert outcome.status == status and re.search(detail, outcome.detail), outcome


def test_a_mutant_that_is_caught_by_a_failing_test_survives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    caught = Outcome(CAUGHT, "", "tests/test_imports.py::test_it")
    monkeypatch.setattr(command.runner, "run_mutant", lambda mutant, limit_s: caught)
    monkeypatch.setattr(command.runner, "load_heavy_modules", lambda: None)
    for failing, share in (({}, "0.0%"), ({caught.test: "AssertionError"}, "100.0%")):
        monkeypatch.setattr(command.runner, "baseline", lambda tests, failing=failing: failing)
        assert command.main(["--only", "", "--random", "3", "--seed", "5"]) == 0
        printed = capsys.readouterr().out
        assert printed.endswith(f"{share} of the random mutants survive\n")
        assert ("test_imports test_it: AssertionError" in printed) == bool(failing)


def test_random_mutants_follow_their_seed_and_have_tests() -> None:
    mutants = random_mutants(40, seed=5)
    assert mutants == random_mutants(40, seed=5) and mutants != random_mutants(40, seed=6)
    for mutant in mutants:
        ast.parse(mutant.changed())
        assert mutant.old != mutant.new
        files = [test for test in mutant.tests if test.startswith("tests/")]
        assert files and all((ROOT / file).exists() for file in files)


def test_every_row_of_a_table_is_a_mutant() -> None:
    """The pattern of a row passes over what it does not fit."""
    tables = [path.read_text(encoding="utf-8") for path in (ROOT / "tests/mutants").glob("*.txt")]
    rows = [row for table in tables for row in re.findall(r"^- (.*)", table, re.M)]
    assert sorted(rows) == sorted(mutant.bug for mutant in known())
