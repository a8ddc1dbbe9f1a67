"""Drafters with a model: their output is exact whatever they draft, and they draft what the model says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from algorithms.algorithm import Algorithm, Batch, DraftTree
from algorithms.attention.paged_attention import PagedMixer
from algorithms.dflash.drafting import DFlash
from algorithms.drafting.tree_drafter import RunLevel, TreeDrafter
from algorithms.eagle.drafting import Eagle, Eagle3, NaiveEagle
from algorithms.eagle.model import Eagle3Drafter, EagleDrafter
from algorithms.models.dense_mixer import DenseMixer
from algorithms.standalone import Standalone
from tests.algorithms.drafters import (
    LOADING,
    TARGET,
    Watched,
    eagle3_head,
)
from tests.algorithms.toy import CONFIG, Setup, answers, engine_of, random_drafter, requests, run

pytestmark = pytest.mark.usefixtures("random_drafters")


def dense_features(text: list[int], layers: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """The hidden states, and the outputs of `layers`, of which -1 is the embedding."""
    tokens, after = torch.tensor([text]), [layer for layer in layers if layer >= 0]
    hidden, outputs = TARGET.model(tokens, DenseMixer(CONFIG, len(text), "cpu"), tuple(after))
    found = dict(zip(after, outputs, strict=True)) | {-1: TARGET.model.embed(tokens)}
    return hidden, [found[layer] for layer in layers]


class SpiedTree:
    """A `TreeDrafter` that keeps what every level of its first tree was given and gave."""

    def __init__(self, drafter: TreeDrafter) -> None:
        self._drafter = drafter
        self.levels: list[tuple[list[int], list[int], Tensor]] = []
        self.text: list[int] = []

    def tree(self, batch: Batch, logits: Tensor, run_level: RunLevel) -> DraftTree:
        first = not self.text
        if first:
            self.text = batch.history[0, : int(batch.lengths[0]) + 1].tolist()

        def spied(tokens: Tensor, parents: Tensor | None, mixer: PagedMixer) -> Tensor:
            result = run_level(tokens, parents, mixer)
            if first:
                above = [0] * tokens.shape[1] if parents is None else parents[0].tolist()
                self.levels.append((tokens[0].tolist(), above, result[0].clone()))
            return result

        return self._drafter.tree(batch, logits, spied)


def test_tokens_of_wide_trees_see_their_paths_alone() -> None:
    """The logits of every token of the last level, stored at slot 64 and above, are those of its path as a chain."""
    algorithm = Eagle3(Eagle3.Config(steps=6, topk=16, num_nodes=40), TARGET, "random")
    engine = engine_of(algorithm, Setup(max_batch=1, page_size=8, max_length=32), TARGET)
    spy = algorithm._tree = SpiedTree(algorithm._tree)  # type: ignore[assignment]
    engine.generate(requests(1, max_new_tokens=1))
    assert len(spy.levels) == 5
    head, (tokens, _, logits) = eagle3_head(), spy.levels[-1]
    for column in range(len(tokens)):
        path, at = [], column
        for level, above, _ in reversed(spy.levels):
            path, at = [level[at], *path], above[at]
        found = dense_path_logits(head, spy.text, path)
        torch.testing.assert_close(logits[column], found, atol=1e-4, rtol=1e-4)


def dense_path_logits(head: EagleDrafter | Eagle3Drafter, text: list[int], path: list[int]) -> Tensor:
    """[V]: the head's logits behind `text` and `path`, by the head over the whole text, then over its own features."""
    hidden, features = dense_features(text, getattr(head, "layer_ids", ()))
    feature, tokens = head.fuse(features, hidden)[:, :-1], list(text[1:])
    for token in [None, *path]:
        tokens += [] if token is None else [token]
        out = head(torch.tensor([tokens]), feature, DenseMixer(CONFIG, len(tokens), "cpu"))
        feature = torch.cat([feature, out[:, -1:]], 1)
    return head.logits(out[0, -1])


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
