"""The run decides how much of a step is captured, unless the algorithm insists; what is impossible is refused."""

from __future__ import annotations

import pytest
import torch

from algorithms.naive_eagle import NaiveEagle
from algorithms.runtime.backends.torch import TorchBackend
from algorithms.runtime.engine import Engine
from algorithms.runtime.engine_settings import EngineSettings
from algorithms.runtime.levels import GRAPH_LEVELS
from algorithms.runtime.request import EngineError
from tests.algorithms.drafters import TARGET, load_random_drafters
from tests.algorithms.toy import Replayed, Setup, autoregressive, engine_of, spell


@pytest.fixture(autouse=True)
def drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    load_random_drafters(monkeypatch)


def level_used(captured: bool | None, asked: str) -> str:
    algorithm = NaiveEagle(NaiveEagle.Config(captured=captured), TARGET, "random")
    config = TorchBackend.Config()
    settings = EngineSettings(max_length=64, impl="reference", graph=asked)
    engine = Engine(TARGET, algorithm, TorchBackend(config, "reference"), settings, spell, Replayed)
    return engine.runner.level


@pytest.mark.parametrize("asked", GRAPH_LEVELS)
def test_the_run_decides_unless_the_algorithm_insists(asked: str) -> None:
    assert level_used(None, asked) == asked
    assert level_used(True, asked) == "step"
    assert level_used(False, asked) == "none"


def test_what_an_algorithm_insists_on_is_known_before_it_loads() -> None:
    assert NaiveEagle.graph_of(NaiveEagle.Config()) is None
    assert NaiveEagle.graph_of(NaiveEagle.Config(captured=True)) == ("step", "algo.captured=true")
    assert NaiveEagle.graph_of(NaiveEagle.Config(captured=False)) == ("none", "algo.captured=false")


def test_capture_needs_a_backend_that_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchBackend, "capturable", False)
    engine_of(autoregressive(TARGET), Setup(backend="torch"), TARGET)
    with pytest.raises(EngineError, match="backend=torch .* cannot be captured, got graph=draft"):
        engine_of(autoregressive(TARGET), Setup(backend="torch", graph="draft"), TARGET)
    insisting = NaiveEagle(NaiveEagle.Config(captured=True), TARGET, "random")
    with pytest.raises(EngineError, match="got graph=step"):
        engine_of(insisting, Setup(backend="torch"), TARGET)


def test_without_a_gpu_a_level_of_its_own_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    insisting = NaiveEagle(NaiveEagle.Config(captured=True), TARGET, "random")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        engine_of(insisting, Setup(backend="torch"), TARGET)
