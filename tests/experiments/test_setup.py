"""What cannot work together is refused from configurations alone, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hydra
import pytest

from experiments.config import CONFIG_FOLDER, build_config, register
from experiments.errors import UserError
from experiments.setup import Hardware, _check_graph, check_drafters

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

    monkeypatch.setattr("algorithms.runtime.models.weights._read_tensors", read)


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
    from algorithms.runtime.backends.sdpa import TorchBackend

    monkeypatch.setattr(TorchBackend, "capturable", False)
    config = build_config(hydra.compose("config", overrides=["backend=torch"]))
    with pytest.raises(UserError) as caught:
        _check_graph(config, Hardware("cuda", "bfloat16", "triton", "triton"), "step", "algo.captured=true", "leave it")
    assert "backend=torch" in str(caught.value) and "leave it, or one of backend=fa4" in str(caught.value)
