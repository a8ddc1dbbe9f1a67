"""What cannot work together is refused from configurations alone, before any weight is read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest

from experiments.app.errors import UserError
from experiments.app.plan import Hardware, _check_graph, check_drafters
from experiments.app.schema import CONFIG_FOLDER, build_config, register
from tests.runtime.tiny_folders import edit_json

CPU = ("runtime.device=cpu", "runtime.impl=reference")


@pytest.fixture(scope="module", autouse=True)
def schemas() -> Iterator[None]:
    register()
    with hydra.initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
        yield


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("algorithms.runtime.models.loading.weights._read_tensors", read)


def check(*overrides: str) -> None:
    config = build_config(hydra.compose("config", overrides=[*CPU, *overrides]))
    check_drafters(config, [config.algo])


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        check(*overrides)
    return str(caught.value)


def test_a_level_of_its_own_is_refused_where_nothing_can_be_captured() -> None:
    said = refusal("algo=naive_eagle", "algo.captured=true")
    assert "algo.captured=true captures CUDA graphs, and this run is on the CPU" in said
    assert "leave algo.captured=true out of algo=naive_eagle" in said and "runtime.graph" not in said
    for value in ("null", "false"):
        check("algo=naive_eagle", f"algo.captured={value}")


def test_a_backend_that_cannot_be_captured_is_told_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    from algorithms.runtime.backends.torch_sdpa import TorchBackend

    monkeypatch.setattr(TorchBackend, "capturable", False)
    config = build_config(hydra.compose("config", overrides=["backend=torch"]))
    with pytest.raises(UserError) as caught:
        _check_graph(config, Hardware("cuda", "bfloat16", "triton", "triton"), "step", "algo.captured=true", "leave it")
    assert "backend=torch" in str(caught.value) and "leave it, or one of backend=fa4" in str(caught.value)


TINY = CONFIG_FOLDER.parent / "assets" / "tiny"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algo=dflash", "model.draft_path=nowhere"], ["model folder not found", "nowhere", "model.draft_path"]),
        (["algo=dflash", "algo.block_size=200"], ["algo.block_size: expected at most", "as trained, got 200"]),
        (["algo=dflash", "algo.window=2"], ["algo.window: expected at least the block of", "got 2"]),
        (["algo=dflash", f"model.draft_path={TINY / 'eagle'}"], ["this is not a DFlash drafter"]),
        (["algo=eagle", f"model.draft_path={TINY / 'dflash'}"], ["this is not an EAGLE head", "no hidden_norm.weight"]),
        (["algo=eagle", f"model.draft_path={TINY / 'draft'}"], ["this is not an EAGLE head", "Qwen3ForCausalLM"]),
        (["algo=eagle3", f"model.draft_path={TINY / 'eagle'}"], ["this is not an EAGLE-3 head", "midlayer.*"]),
        (["algo=naive_eagle", f"model.draft_path={TINY / 'target'}"], ["this is not an EAGLE head"]),
        (["algo=standalone", f"model.draft_path={TINY / 'eagle'}"], ["this is not a language model", "embed_tokens"]),
        (["algo=standalone", f"model.draft_path={TINY / 'eagle3'}"], ["this is not a language model"]),
        (["algo=standalone", f"model.draft_path={TINY / 'dflash'}"], ["this is not a language model", "fc.weight"]),
        (["algo=ngram", "algo.corpus=nowhere.txt"], ["algo.corpus: expected a text file", "nowhere.txt"]),
        (["algo=ngram", f"algo.corpus={TINY}"], ["algo.corpus: expected a text file"]),
        (["algo=ngram", f"model.path={TINY / 'eagle'}"], ["this is not a language model"]),
    ],
)
def test_folders_are_asked_before_weights_load(overrides: list[str], expected: list[str]) -> None:
    said = refusal(*overrides)
    for text in expected:
        assert text in said, said


@pytest.mark.parametrize("algo", ["dflash", "eagle", "eagle3", "naive_eagle", "standalone", "ngram", "autoregressive"])
def test_shipped_drafters_pass(algo: str) -> None:
    check(f"algo={algo}")


def test_topk_above_the_draft_vocabulary(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY / "eagle3", tmp_path / "head")
    edit_json(folder / "config.json", draft_vocab_size=5)
    said = refusal("algo=eagle3", f"model.draft_path={folder}", "algo.topk=6", "algo.steps=2")
    assert "algo.topk: the drafter knows 5 tokens, got 6" in said


def test_every_method_of_a_task_is_asked() -> None:
    from algorithms.dflash import DFlash
    from algorithms.ngram import NGram

    config = build_config(hydra.compose("config", overrides=[*CPU]))
    with pytest.raises(UserError, match="got 200"):
        check_drafters(config, [NGram.Config(), DFlash.Config(), DFlash.Config(block_size=200)])
