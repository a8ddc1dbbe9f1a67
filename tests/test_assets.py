"""What comes with the repository: small enough to clone, and every trained model with what it was made from."""

from pathlib import Path

import pytest

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
