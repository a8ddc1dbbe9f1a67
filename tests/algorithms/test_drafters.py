"""What drafters with a model declare, ask of the backend and refuse, and that the target as its own drafter is always
right."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from algorithms.algorithm import Algorithm
from algorithms.dflash.drafting import DFlash
from algorithms.eagle.drafting import Eagle, Eagle3, NaiveEagle
from algorithms.standalone import Standalone
from tests.algorithms.drafters import LOADING, TARGET, Watched, draft_model, eagle3_head, eagle_head
from tests.algorithms.toy import Setup, answers, random_drafter, requests, run

HEADS = {"EAGLE": eagle_head, "EAGLE-3": eagle3_head, None: eagle3_head}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Random models in the places of folders; what was asked for."""
    asked: list[Any] = []

    def read(*given: Any) -> tuple[str, Any, dict[str, Any]]:
        asked.append(given)
        return "folder", HEADS[given[-1]]().config, {}

    monkeypatch.setattr("algorithms.eagle.loading.load_eagle", lambda *given: asked.append(given) or HEADS[given[-1]]())
    monkeypatch.setattr("algorithms.eagle.loading.read_eagle", read)
    monkeypatch.setattr(f"{LOADING}.load_draft", lambda *_: draft_model())
    monkeypatch.setattr(f"{LOADING}.read_draft", lambda *given: asked.append(given) or draft_model())
    return asked


@pytest.mark.parametrize(("topk", "mode"), [(1, "chain"), (2, "tree")])
@pytest.mark.parametrize(
    ("kind", "last"), [(Standalone, True), (Eagle, "EAGLE"), (Eagle3, "EAGLE-3"), (NaiveEagle, None)]
)
def test_the_backend_serves_prompts_and_the_shape_of_the_draft(
    folder: list[Any], kind: Any, last: Any, topk: int, mode: str
) -> None:
    """And the folder is read as one of the kind."""
    config = kind.Config(topk=topk)
    calls, made = kind.check(config, TARGET, "folder"), kind(config, TARGET, "folder")
    assert calls.modes == {"prefill": "chain", "draft": mode} and made.chain == (topk == 1)
    assert folder[0] == ("folder", TARGET, last)
    if kind is Standalone:
        assert calls.config == draft_model().config
        return
    assert folder[1:] == [("folder", TARGET, last)]
    assert calls.config == HEADS[last]().config.decoder and made.target_layers == HEADS[last]().target_layers


@pytest.mark.parametrize("topk", [37, 38])
def test_a_token_offers_no_more_children_than_the_head_knows(topk: int) -> None:
    config = Eagle3.Config(topk=topk, num_nodes=20)
    if topk == 37:
        assert Eagle3.check(config, TARGET, "folder") and Eagle3(config, TARGET, "folder").num_nodes == 20
        return
    for make in (Eagle3.check, Eagle3):
        with pytest.raises(ValueError, match="algo.topk: the drafter knows 37 tokens, got 38"):
            make(config, TARGET, "folder")


SAMPLE, WITHOUT = dict(draft_sampling="sample"), dict(draft_sampling="without_replacement")


@pytest.mark.parametrize(
    ("kind", "config", "rule", "sizes"),
    [
        (Standalone, dict(), "target_only", (True, 5, 4, 5)),  # node 0, three drafts that are run, and the last one
        (Standalone, dict(steps=1), "target_only", (True, 2, 1, 2)),
        (Standalone, dict(topk=2, num_nodes=9), "target_only", (False, 9, 4, 7)),
        (Standalone, dict(steps=3) | SAMPLE, "block", (True, 4, 3, 4)),
        (Standalone, dict(steps=3, topk=2, num_nodes=6) | WITHOUT, "traversal", (False, 6, 3, 5)),
        (Standalone, dict(steps=9, topk=2, num_nodes=4) | SAMPLE, "traversal", (False, 4, 2, 17)),
        (Eagle, dict(), "target_only", (True, 4, 3, 2)),
        (Eagle, dict(topk=3, num_nodes=12), "target_only", (False, 12, 3, 6)),
        (Eagle, SAMPLE, "block", (True, 4, 3, 2)),
        (Eagle, dict(steps=9, topk=2, num_nodes=4) | SAMPLE, "traversal", (False, 4, 2, 16)),
    ],
)
def test_declared_sizes(kind: Any, config: dict[str, Any], rule: str, sizes: tuple[bool, int, int, int]) -> None:
    made = kind(kind.Config(**config), TARGET, "folder")
    assert (made.rule, (made.chain, made.num_nodes, made.max_depth, made.draft_slots)) == (rule, sizes)


@pytest.mark.parametrize("algorithm", [Eagle, Eagle3, NaiveEagle, Standalone, DFlash])
def test_a_drafter_must_be_named(algorithm: type[Algorithm]) -> None:
    with pytest.raises(ValueError, match="set model.draft_path"):
        algorithm(algorithm.Config(), TARGET, None)


@pytest.mark.parametrize("topk", [1, 2])
def test_a_drafter_that_is_the_target_is_always_accepted(monkeypatch: pytest.MonkeyPatch, topk: int) -> None:
    """Acceptance 1.0 with the target as its own drafter: nothing is lost between draft, verify and commit."""
    monkeypatch.setattr(f"{LOADING}.load_draft", lambda *_: TARGET)
    algorithm = Standalone(Standalone.Config(steps=3, topk=topk, num_nodes=None if topk == 1 else 11), TARGET, "self")
    completions = run(algorithm, requests(5, max_new_tokens=16), Setup(max_batch=3, page_size=4), TARGET).completions
    assert all(c.accepted_counts == [3, 3, 3, 3] for c in completions)


def test_dflash_caps_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap changes the products of probabilities, and so the tree; what is written stays."""
    drafts, asked = {}, requests(2, max_new_tokens=4)
    for cap in (None, 2.0):
        drafter = random_drafter(block_size=5)
        drafter.config = replace(drafter.config, logit_soft_cap=cap)
        monkeypatch.setattr("algorithms.dflash.loading.load_dflash", lambda *_, drafter=drafter: drafter)
        algorithm = DFlash(DFlash.Config(topk=3, num_nodes=8), TARGET, "random")
        watched = Watched(algorithm)
        written = [c.token_ids for c in run(algorithm, asked, Setup(), TARGET).completions]
        assert written == answers(asked, Setup(), TARGET)
        drafts[cap] = watched.drafts
    assert drafts[None] != drafts[2.0]
    logits = torch.tensor([-300.0, 0.0, 1.0, 300.0])
    torch.testing.assert_close(drafter.cap(logits), 2 * torch.tanh(logits / 2))
