"""Drafters with a model: their output is exact whatever they draft, and they draft what the model says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from algorithms.algorithm import Algorithm
from algorithms.dflash.drafting import DFlash
from algorithms.eagle.drafting import Eagle, Eagle3, NaiveEagle
from algorithms.standalone import Standalone
from tests.algorithms.drafters import (
    LOADING,
    TARGET,
    Watched,
)
from tests.algorithms.toy import Setup, answers, random_drafter, requests, run

pytestmark = pytest.mark.usefixtures("random_drafters")


@pytest.mark.parametrize("topk", [1, 2])
def test_a_drafter_that_is_the_target_is_always_accepted(monkeypatch: pytest.MonkeyPatch, topk: int) -> None:
    """Acceptance 1.0 with the target as its own drafter: nothing is lost between draft, verify and commit."""
    monkeypatch.setattr(f"{LOADING}.load_draft", lambda *_: TARGET)
    algorithm = Standalone(Standalone.Config(steps=3, topk=topk, num_nodes=None if topk == 1 else 11), TARGET, "self")
    completions = run(algorithm, requests(5, max_new_tokens=16), Setup(max_batch=3, page_size=4), TARGET).completions
    assert all(c.accepted_counts == [3, 3, 3, 3] for c in completions)


def test_dflash_caps_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap changes the products of probabilities, and so the tree; what is written stays."""
    drafts = {}
    for cap in (None, 2.0):
        drafter = random_drafter(block_size=5)
        drafter.config = replace(drafter.config, logit_soft_cap=cap)
        monkeypatch.setattr("algorithms.dflash.loading.load_dflash", lambda *_, drafter=drafter: drafter)
        algorithm = DFlash(DFlash.Config(topk=3, num_nodes=8), TARGET, "random")
        watched, asked = Watched(algorithm), requests(2, max_new_tokens=4)
        wanted = answers(asked, Setup(), TARGET)
        assert [c.token_ids for c in run(algorithm, asked, Setup(), TARGET).completions] == wanted
        drafts[cap] = watched.drafts
    assert drafts[None] != drafts[2.0]
    logits = torch.tensor([-300.0, 0.0, 1.0, 300.0])
    torch.testing.assert_close(drafter.cap(logits), 2 * torch.tanh(logits / 2))


@pytest.mark.parametrize("algorithm", [Eagle, Eagle3, NaiveEagle, Standalone, DFlash])
def test_a_drafter_must_be_named(algorithm: type[Algorithm]) -> None:
    with pytest.raises(ValueError, match="set model.draft_path"):
        algorithm(algorithm.Config(), TARGET, None)
