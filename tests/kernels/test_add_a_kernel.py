"""`docs/add_a_kernel.md` works as it stands: a copy of the tree gets its family, and its commands pass there."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.mutants.mutant import ROOT, copy_tree
from tests.programs import run_python

pytestmark = pytest.mark.commands
PAGE = (ROOT / "docs" / "add_a_kernel.md").read_text(encoding="utf-8")
FAMILY = "relu2"
FACADE = "specdec_kernels/__init__.py"
FILES = dict(re.findall(r"^`([\w/]+\.(?:py|txt))`\n\n```\w+\n(.*?)^```", PAGE, re.M | re.S))
COMMANDS = "".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)).splitlines()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the page's family in it."""
    copy = tmp_path_factory.mktemp("tree")
    copy_tree(copy)
    for name, text in FILES.items():
        path = copy / name
        if path.exists():
            text = with_line(path.read_text(encoding="utf-8"), text)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return copy


def with_line(source: str, line: str) -> str:
    """`source` with `line` among the star imports, in alphabetical order."""
    lines = source.splitlines(keepends=True)
    stars = [index for index, text in enumerate(lines) if text.endswith(" import *\n")]
    indent = lines[stars[0]][: len(lines[stars[0]]) - len(lines[stars[0]].lstrip())]
    lines[stars[0] : stars[-1] + 1] = sorted([*lines[stars[0] : stars[-1] + 1], indent + line])
    return "".join(lines)


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    gated = "tools.compile_gate" in arguments
    environment = {name: value for name, value in os.environ.items() if not (gated and name == "TRITON_INTERPRET")}
    return run_python(*arguments, cwd=tree, env=environment)


def test_a_kernel_touches_two_places_beside_its_own_folder() -> None:
    own = [name for name in FILES if name.startswith(f"specdec_kernels/{FAMILY}/")]
    assert {Path(name).name for name in own} >= {"__init__.py", "api.py", "reference.py", "kernel.py", "cases.py"}
    assert [name for name in FILES if name not in own] == [FACADE, f"tests/mutants/{FAMILY}.txt"]
    assert len(FILES[FACADE].splitlines()) == 1, "one line in the facade"
    assert [name for name in FILES if (ROOT / name).exists()] == [FACADE], "all other files are new"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_passes(tree: Path, command: str) -> None:
    program, *arguments = shlex.split(command)
    assert program == "python"
    done = run(tree, *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    expected = {
        "pytest": r"\d+ passed",
        "tools.compile_gate": "12 compiled, 0 over a limit, 0 complaints",
        "tests.mutants": "1 caught, 0 CRASHED, 0 SURVIVED, 0 BROKEN",
        "experiments.kernel_bench": FAMILY,
    }[arguments[1]]
    assert re.search(expected, done.stdout), done.stdout


def test_facade_and_work_model_know_the_family(tree: Path) -> None:
    program = (
        "import torch, specdec_kernels as s\n"
        "from experiments.bench.roofline import work_of\n"
        "x = torch.tensor([-2.0, 3.0])\n"
        "assert s.squared_relu(x, impl='reference').tolist() == [0, 9] and 'squared_relu' in s.__all__\n"
        "assert work_of('relu2', 'squared_relu', dict(x=x), x) == (16, 4, 'family')\n"
    )
    done = run(tree, "-c", program)
    assert done.returncode == 0, done.stderr


def test_a_family_without_its_line_in_the_facade_is_noticed(tree: Path) -> None:
    facade = tree / FACADE
    whole = facade.read_text(encoding="utf-8")
    facade.write_text(re.sub(rf".*{re.escape(FILES[FACADE])}", "", whole), encoding="utf-8")
    try:
        done = run(tree, "-m", "pytest", "-q", "tests/kernels/test_family_layout.py")
    finally:
        facade.write_text(whole, encoding="utf-8")
    assert done.returncode == 1 and "test_type_checkers_see_every_family" in done.stdout, done.stdout
