"""Every mutant still fits the code and names tests that exist; `make mutants` shows that each is caught."""

from __future__ import annotations

import ast
import re

import pytest

from specdec_kernels import FAMILIES
from tests.kernels.test_parity import CASES
from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.runner import BROKEN, CAUGHT, SURVIVED, run_mutant
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
