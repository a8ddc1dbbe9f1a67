"""What is shipped: the wheel holds the kernels and nothing above them, pins agree with ranges, and every trained
model comes with what it was made from."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "specdec_kernels", "algorithms", "experiments", "configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    done = subprocess.run(
        [*build, "-w", str(target), str(source)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("specdec_kernels-0.2.0-*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_ships_the_kernels_only(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == {"specdec_kernels", "specdec_kernels-0.2.0.dist-info"}


def test_the_wheel_ships_every_module_and_its_types(wheel: zipfile.ZipFile) -> None:
    shipped = set(wheel.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "specdec_kernels").rglob("*.py")}
    assert modules and modules <= shipped
    assert "specdec_kernels/py.typed" in shipped


def requirements(wheel: zipfile.ZipFile) -> list[Requirement]:
    (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    lines = wheel.read(name).decode().splitlines()
    return [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines if line.startswith("Requires-Dist")]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    rows = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {row.name: str(row.specifier).removeprefix("==") for row in rows}


def test_pins_lie_inside_the_ranges(wheel: zipfile.ZipFile) -> None:
    pinned = pins()
    for requirement in requirements(wheel):
        optional = requirement.marker is not None and "extra" in str(requirement.marker)
        if requirement.name in pinned:
            assert requirement.specifier.contains(pinned[requirement.name]), requirement
        else:
            assert optional, f"{requirement} has no pin"


def test_pins_are_public_versions_from_nowhere_in_particular() -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert "+" not in text and "://" not in text and "--" not in text.split("\n", 2)[2]


def test_the_pair_that_decides_results_is_pinned_together() -> None:
    assert (pins()["torch"], pins()["triton"]) == ("2.13.0", "3.7.1")


def test_no_version_is_named_twice() -> None:
    names = re.findall(r"^([a-z0-9-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    assert len(names) == len(set(names))


def test_the_environment_has_a_torch_in_range(wheel: zipfile.ZipFile) -> None:
    (torch_range,) = [r.specifier for r in requirements(wheel) if r.name == "torch"]
    assert torch_range.contains(version("torch").split("+")[0])


ASSETS = Path(__file__).resolve().parent.parent / "assets"
LARGEST_BYTES = 110_000_000
COMPANIONS = {"config.json", "training.jsonl", "training.svg", "training_summary.json"}


def models() -> list[Path]:
    return sorted(path.parent for path in ASSETS.rglob("model.safetensors"))


def test_the_shipped_models_are_small_together() -> None:
    assert 0 < sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) <= LARGEST_BYTES


@pytest.mark.parametrize("folder", models(), ids=lambda folder: "/".join(folder.parts[-2:]))
def test_every_model_has_its_curve_and_a_page_with_recipe_data_and_licence(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} >= COMPANIONS
    page = (folder.parent / "README.md").read_text(encoding="utf-8")
    assert "python -m experiments.train drafter=" in page and "## Data" in page
    assert f"{folder.name}/training.svg" in page and "Licence: Apache-2.0" in page
