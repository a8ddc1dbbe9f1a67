"""The probe of conventions on the tiny family: the declared reading leads, and a wrong one is found."""

import json
from pathlib import Path

import pytest

from experiments.app.schema import REPO_ROOT
from experiments.checkpoints import conventions
from experiments.checkpoints.conventions import Reading, main, readings, rewritten

TINY = REPO_ROOT / "assets" / "tiny"


def test_keys_are_replaced_wherever_they_are() -> None:
    config = {
        "block_size": 8,
        "dflash_config": {"slots": "own", "target_layer_ids": [1, 2]},
        "sample_from_anchor": True,
    }
    found = rewritten(config, Reading("x", {"slots": "next"}, 1))
    assert found == {"block_size": 8, "dflash_config": {"target_layer_ids": [2, 3]}, "slots": "next"}
    with pytest.raises(ValueError, match="names no layers"):
        rewritten({"block_size": 8}, Reading("x", {}, 1))


@pytest.mark.parametrize("algo", ["dflash", "eagle3", "mtp"])
def test_readings_are_different(algo: str) -> None:
    found = list(readings(algo))
    assert found[0] == Reading("as declared") and len({str(each) for each in found}) == len(found) >= 5


def test_the_shipped_drafter_is_right_and_a_wrong_file_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    some = [each for each in readings("dflash") if each.name in ("as declared", "slots=own", "slots=next layers+1")]
    monkeypatch.setattr(conventions, "readings", lambda algo: some)
    assert len(some) == 3
    text = tmp_path / "prompts"
    text.write_text("Tom has 3 apples and buys 4 more. How many apples are there now?")
    arguments = [str(TINY / "target"), str(TINY / "dflash"), "--tokens", "12", "--text", str(text)]
    assert main(arguments) == 0
    assert "the folder's own reading is right" in capsys.readouterr().out
    config = json.loads((TINY / "dflash" / "config.json").read_text())
    config["dflash_config"]["slots"] = "next"
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in (TINY / "dflash").glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    assert main([arguments[0], str(tmp_path), *arguments[2:]]) == 1
    assert "is wrong or missing: slots=own\n" in capsys.readouterr().out
