"""Every mutant still fits the code and names tests that exist; `make mutants` shows that each is caught."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from specdec_kernels import FAMILIES
from tests.kernels.test_parity import CASES
from tests.mutants import __main__ as command
from tests.mutants.drawn import DrawnMutant, draw, is_in, mutated_files, sites_of
from tests.mutants.meaningless import MEANINGLESS
from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.runner import BROKEN, CAUGHT, SURVIVED, Outcome, run_mutant
from tests.mutants.table import MUTANTS

PARITY_CASES = {case.id for case in CASES}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_still_fits(mutant: Mutant) -> None:
    ast.parse(mutant.changed())
    assert mutant.bug and mutant.tests
    for test in mutant.tests:
        path, _, name = test.partition("::")
        function, _, parameters = name.partition("[")
        assert f"def {function}(" in (ROOT / path).read_text(), f"{test}: no such test"
        if function == "test_kernel_is_the_reference":
            assert parameters.removesuffix("]") in PARITY_CASES, f"{test}: no such case"


def test_there_are_enough_and_none_twice() -> None:
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for family in FAMILIES:
        folder = f"specdec_kernels/{family.replace('.', '/')}/"
        assert any(mutant.path.startswith(folder) for mutant in MUTANTS), f"{family}: no mutant"


def planted(**changes: str) -> Mutant:
    given = dict(
        name="planted",
        path="specdec_kernels/tree/types.py",
        old="from __future__ import annotations",
        new="from __future__ import annotations  # harmless",
        bug="none",
    )
    test = changes.pop("test", "tests/test_imports.py::test_kernels_import_torch_and_triton_only")
    return Mutant(**(given | changes), tests=(test,))


@pytest.mark.parametrize(
    "mutant, status, detail",
    [
        (planted(), SURVIVED, "1 tests passed"),
        (planted(new="from __future__ import annotations\nimport numpy"), CAUGHT, "test_imports test_kernels_import"),
        (planted(old="no such text"), BROKEN, "expected its text once in .*, found it 0 times"),
        (planted(test="tests/test_imports.py::test_of_nothing"), BROKEN, "stale tests"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_runner_tells_them_apart(mutant: Mutant, status: str, detail: str) -> None:
    outcome = run_mutant(mutant)
    assert outcome.status == status and re.search(detail, outcome.detail), outcome


def test_what_a_failing_test_catches_counts_as_surviving(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    caught = Outcome(CAUGHT, "", "tests/test_imports.py::test_it")
    monkeypatch.setattr(command, "run_mutant", lambda mutant, limit_s: caught)
    monkeypatch.setattr(command, "load_heavy_modules", lambda: None)
    for failing, share in (({}, "0.0%"), ({caught.test: "AssertionError"}, "100.0%")):
        monkeypatch.setattr(command, "baseline", lambda tests, failing=failing: failing)
        assert command.main(["--only", "", "--drawn", "3", "--seed", "5"]) == 0
        printed = capsys.readouterr().out
        assert printed.endswith(f"{share} of the drawn mutants survive\n")
        assert ("test_imports test_it: AssertionError" in printed) == bool(failing)


def test_drawn_mutants_are_those_of_their_seed() -> None:
    """All four kinds come up, every change parses, and its tests exist."""
    drawn = draw(60, seed=5)
    assert [mutant.site for mutant in drawn] == [mutant.site for mutant in draw(60, seed=5)]
    assert drawn[0].site != draw(1, seed=6)[0].site
    assert {mutant.site.kind for mutant in drawn} == {"comparison", "extreme", "names", "one"}
    for mutant in drawn:
        ast.parse(mutant.changed())
        assert mutant.changed() != (ROOT / mutant.path).read_text()
        files = [argument for argument in mutant.tests if argument.endswith(".py")]
        assert files and all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize("change", sorted(MEANINGLESS), ids=lambda change: f"{Path(change[0]).name} {change[1]}")
def test_a_change_that_means_nothing_has_a_place(change: tuple[str, str, str]) -> None:
    assert any(is_in(site, *change) for site in sites_of(Path(change[0])))


def test_every_change_is_of_one_operator() -> None:
    sites = {path: list(sites_of(path)) for path in mutated_files()}
    assert sum(map(len, sites.values())) > 2000
    assert all(any(path.parts[: len(part)] == part for path in sites) for part in (("algorithms", "runtime"),))
    few = [site for found in sites.values() for site in found][::40]
    for site in few:
        ast.parse(DrawnMutant("", site.path, "", "", (), "", site).changed())
