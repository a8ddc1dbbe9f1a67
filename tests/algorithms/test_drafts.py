"""Drafted tokens that requests report: the tree that was drafted, what was accepted of it, and both probabilities."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from algorithms.algorithm import Batch, DraftTree
from algorithms.engine.request import Draft
from algorithms.models.dense_mixer import DenseMixer
from algorithms.standalone import Standalone
from tests.algorithms.drafters import ALL_MAKERS, TARGET, draft_model
from tests.algorithms.reference_loop import following
from tests.algorithms.toy import CONFIG, Scripted, Setup, answers, requests, run, scripts

pytestmark = pytest.mark.usefixtures("random_drafters")


def logits_of(model: Any, text: list[int]) -> torch.Tensor:
    hidden, _ = model(torch.tensor([text]), DenseMixer(CONFIG, len(text), "cpu"))
    return model.logits(hidden[0, -1]).double()


def texts_before(drafts: list[Draft], committed: list[int]) -> list[list[int]]:
    """The text before each draft: the committed one and the drafts above it."""
    before: list[list[int]] = []
    for draft in drafts:
        above = committed if draft.parent < 0 else [*before[draft.parent], drafts[draft.parent].token]
        before.append(above)
    return before


CAPTURED = Setup(graph="step", async_steps=1, max_batch=2)


@pytest.mark.parametrize(
    ("name", "setup"),
    [("standalone_chain", CAPTURED), ("dflash_tree", CAPTURED), ("ngram", Setup()), ("autoregressive", Setup())],
)
def test_drafts_of_every_step(name: str, setup: Setup) -> None:
    algorithm = ALL_MAKERS[name]()
    asked = requests(4, 12, drafts=True)
    completions = run(algorithm, asked, setup, TARGET).completions
    assert [c.token_ids for c in completions] == answers(requests(4, 12), Setup(), TARGET)
    for request, completion in zip(asked, completions, strict=True):
        assert [sum(d.accepted for d in drafts) for drafts in completion.drafts] == completion.accepted_counts
        assert [len(drafts) for drafts in completion.drafts] == completion.drafted_counts
        committed = list(request.prompt_ids)
        for drafts, count in zip(completion.drafts, completion.accepted_counts, strict=True):
            path = [draft.token for draft in drafts if draft.accepted]
            written = completion.token_ids[len(committed) - len(request.prompt_ids) :][: count + 1]
            assert written[:count] == path[: len(written)]
            for draft, before in list(zip(drafts, texts_before(drafts, committed), strict=True))[:4]:
                exact = following(before).log_softmax(0)[draft.token]
                assert draft.target_logprob == pytest.approx(float(exact), abs=1e-4)
            committed += written


@pytest.mark.parametrize("settings", [{"rule": "block"}, {"topk": 2, "num_nodes": 6, "draft_sampling": "sample"}])
def test_sampled_drafts_have_the_probability_that_they_were_drawn_with(settings: dict[str, Any]) -> None:
    algorithm = Standalone(Standalone.Config(steps=2, **settings), TARGET, "random")
    asked = requests(3, 8, temperature=0.7, drafts=True)
    draft = draft_model().model
    for request, completion in zip(asked, run(algorithm, asked, Setup(), TARGET).completions, strict=True):
        committed = list(request.prompt_ids)
        for drafts, count in zip(completion.drafts, completion.accepted_counts, strict=True):
            for each, before in zip(drafts, texts_before(drafts, committed), strict=True):
                exact = (logits_of(draft, before) / 0.7).softmax(0)[each.token]
                assert each.draft_prob == pytest.approx(float(exact), rel=1e-3, abs=1e-6)
            committed += completion.token_ids[len(committed) - len(request.prompt_ids) :][: count + 1]


def test_a_tree_with_path_probabilities_reports_those_of_its_tokens() -> None:
    """A drafter that ranks its nodes tells the probability of a token given the path to it."""
    algorithm = ALL_MAKERS["ngram"]()
    propose = algorithm.propose

    def ranked(batch: Batch) -> DraftTree:
        tree = propose(batch)
        depth = tree.links.depth.float()
        return replace(tree, path_probs=torch.where(tree.links.depth >= 0, 0.5**depth, 0.0))

    algorithm.propose = ranked  # type: ignore[method-assign]
    found = run(algorithm, requests(4, 16, drafts=True), Setup(), TARGET).completions
    probs = [draft.draft_prob for c in found for drafts in c.drafts for draft in drafts]
    assert probs and all(prob == pytest.approx(0.5) for prob in probs)


def test_only_requests_that_ask_have_drafts_and_forbidden_tokens_have_no_probability() -> None:
    asked = requests(3, 8)
    free = answers(asked, Setup(max_batch=1), TARGET)
    asked[1] = asked[1].with_sampling(drafts=True, bad_words=tuple((token,) for token in range(0, 40)))
    completions = run(Scripted(scripts(asked, free), depth=3), asked, Setup(), TARGET).completions
    assert [bool(c.drafts) for c in completions] == [False, True, False]
    logprobs = [d.target_logprob for drafts in completions[1].drafts for d in drafts if d.token < 40]
    assert logprobs and set(logprobs) == {None}
