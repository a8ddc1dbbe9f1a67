"""Rows of a sweep share what the target alone decodes, and only where it would be the same."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from algorithms.engine.request import Completion, Request
from algorithms.engine.session import Generation
from algorithms.engine.settings import RuntimeSettings
from algorithms.step.runner import GraphReport
from algorithms.step.sampling_params import SamplingParams
from experiments.app import provenance
from experiments.app.hardware import Hardware
from experiments.app.workload import Conversations
from experiments.data.prompts import Prompt
from experiments.tasks.decoding import Decoded
from experiments.tasks.resumed import BaselineStore

SAMPLING = SamplingParams(logit_bias={3: 1.5}, stop_strings=("end",), temperature=0.5)
REQUEST = Request(0, (1, 2, 3), SAMPLING, frozenset({7}), frozenset({9, 8}))
BACKEND = RuntimeSettings  # any dataclass
TOKENIZER: Any = None  # there are no later turns
TALKS = Conversations((), [REQUEST], TOKENIZER)
WORKLOAD: Any = SimpleNamespace(name="d", prompts=SimpleNamespace(prompts=("a", "b")), max_length=64)


def plan(**runtime: Any) -> Any:
    config = SimpleNamespace(runtime=RuntimeSettings(**runtime), backend=BACKEND())
    hardware = Hardware("cpu", "float32", "reference", "reference")
    return SimpleNamespace(config=config, hardware=hardware, target=SimpleNamespace(path="target"), graph="none")


def decoded(text: str = "x") -> Decoded:
    completion = Completion(0, [4, 5], text=text, accepted_counts=[1], emitted_at_ms=[1.5], total_ms=2.0)
    graphs = GraphReport("none", (1, 2))
    generation = Generation([completion], 2, 1.0, 2.0, 3.0, 0.5, [0.1, 0.2], {"draft": 1.0}, graphs)
    attention = {"decode": "torch"}
    return Decoded("autoregressive", {}, [REQUEST], generation, generation, 0, "target_only", False, attention, [], 1)


def refuse() -> Decoded:
    raise AssertionError("decoded again")


def test_another_row_gets_the_same_decoding(tmp_path: Path) -> None:
    first = BaselineStore(tmp_path).shared(plan(), WORKLOAD, TALKS, decoded)
    again = BaselineStore(tmp_path).shared(plan(), WORKLOAD, TALKS, refuse)
    assert first == (decoded(), False) and again == (decoded(), True)


def test_repeats_are_shared_by_their_number(tmp_path: Path) -> None:
    one, other = BaselineStore(tmp_path), BaselineStore(tmp_path)
    for text in "ab":
        assert not one.shared(plan(), WORKLOAD, TALKS, lambda text=text: decoded(text))[1]
    assert [other.shared(plan(), WORKLOAD, TALKS, refuse)[0] for _ in "ab"] == [decoded("a"), decoded("b")]


@pytest.mark.parametrize("change", ["prompt", "seed", "batch", "turns", "revision", "machine", "target"])
def test_what_would_decode_otherwise_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    BaselineStore(tmp_path).shared(plan(), WORKLOAD, TALKS, decoded)
    others = {"prompt": replace(REQUEST, prompt_ids=(1, 2)), "seed": REQUEST.with_sampling(seed=5)}
    request, other = others.get(change, REQUEST), plan(**({"max_batch": 2} if change == "batch" else {}))
    if change in ("revision", "machine"):
        monkeypatch.setattr(provenance, {"revision": "git_revision"}.get(change, change), lambda *_: "other")
    if change == "target":
        other.target = SimpleNamespace(path="another target")
    talks = Conversations([Prompt("a")] if change == "turns" else (), [request], TOKENIZER)
    again = BaselineStore(tmp_path).shared(other, WORKLOAD, talks, lambda: decoded("y"))
    assert again == (decoded("y"), False)


def test_a_broken_file_is_decoded_again(tmp_path: Path) -> None:
    BaselineStore(tmp_path).shared(plan(), WORKLOAD, TALKS, decoded)
    (path,) = tmp_path.glob("*.json")
    path.write_text(path.read_text()[:50])
    assert BaselineStore(tmp_path).shared(plan(), WORKLOAD, TALKS, decoded) == (decoded(), False)
