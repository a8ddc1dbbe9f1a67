"""Drafts that are drawn: the engine's text follows the target's distribution, and nothing else changes with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from scipy.stats import chisquare

from algorithms.dflash import DFlash
from algorithms.eagle import Eagle
from algorithms.eagle3 import Eagle3
from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree
from algorithms.runtime.models.dense_mixer import DenseMixer
from algorithms.standalone import Standalone
from tests.algorithms.drafters import LOADING, TARGET, blurred_target, load_random_drafters
from tests.algorithms.toy import CONFIG, VOCAB, Setup, answers, changed, random_drafter, requests, run

Kind = type[Standalone] | type[Eagle] | type[DFlash]


def made(kind: Kind, **settings: object) -> Algorithm:
    return kind(kind.Config(**settings), TARGET, "random")


TREES: dict[str, Callable[[], Algorithm]] = {
    "standalone": partial(made, Standalone, steps=3, topk=2, num_nodes=8, draw="without_replacement"),
    "standalone_k_seq": partial(made, Standalone, steps=2, topk=3, num_nodes=9, rule="k_seq"),
    "eagle": partial(made, Eagle, steps=3, topk=3, num_nodes=12, draw="sample", rule="multi_round"),
    "eagle3": partial(made, Eagle3, steps=3, topk=2, num_nodes=9, rule="without_replacement"),
    "eagle3_chain": partial(made, Eagle3, steps=3, draw="sample"),
    "dflash": partial(made, DFlash, block_size=4, topk=3, num_nodes=10, draw="without_replacement"),
    "dflash_again": partial(made, DFlash, block_size=4, topk=2, num_nodes=8, draw="sample"),
    "dflash_chain": partial(made, DFlash, block_size=4, draw="sample", rule="rejection"),
    "dflash_markov": partial(made, DFlash, block_size=4, topk=2, num_nodes=9, draw="without_replacement"),
}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Algorithm]:
    load_random_drafters(monkeypatch)
    monkeypatch.setattr(f"{LOADING}.load_draft", lambda *_: blurred_target())

    def maker(name: str) -> Algorithm:
        if name == "dflash_markov":
            monkeypatch.setattr(f"{LOADING}.load_dflash", lambda *_: random_drafter(markov_rank=5))
        return TREES[name]()

    return maker


@cache
def greedy_answers() -> list[list[int]]:
    return answers(requests(6, max_new_tokens=9), Setup(backend="torch", max_batch=1), TARGET)


@pytest.mark.parametrize("name", ["standalone", "eagle", "eagle3_chain", "dflash_again", "dflash_markov"])
def test_greedy_rows_and_captured_steps(make: Callable[[str], Algorithm], name: str) -> None:
    """Greedy rows stay the target's own beside sampled ones. Captured steps with padding rows, and other neighbours in
    the batch, draw the same."""
    asked = [changed(r, temperature=(0.0, 0.8)[r.id % 2]) for r in requests(6, max_new_tokens=9)]
    plain, captured = (
        [c.token_ids for c in run(make(name), asked, setup, TARGET).completions]
        for setup in (Setup(max_batch=2), Setup(max_batch=3, graph="step", overlap=1, page_size=1))
    )
    assert plain == captured
    assert plain[::2] == greedy_answers()[::2]


def test_kernels_in_the_engine(make: Callable[[str], Algorithm]) -> None:
    """Filters, and drafts through the Triton kernels."""
    asked = [changed(r, temperature=0.9, top_k=7, top_p=0.95, min_p=0.01) for r in requests(2, max_new_tokens=2)]
    kernel, reference = (
        [c.token_ids for c in run(make("eagle3"), asked, Setup(impl=impl, max_batch=2), TARGET).completions]
        for impl in ("triton", "reference")
    )
    assert kernel == reference


CLASSES = 4  # a token's class is its id modulo this
NUM_TOKENS = 3
TEMPERATURE = 1.5


@cache
def class_distribution() -> torch.Tensor:
    """[4, 4, 4] float64: the classes of the first three tokens of autoregressive sampling."""
    prompt = torch.tensor(requests(1)[0].prompt_ids)
    joint, texts = torch.ones(1, dtype=torch.float64), prompt[None]
    for place in range(NUM_TOKENS):
        if place:
            token = torch.arange(VOCAB).repeat(len(texts))[:, None]
            texts = torch.cat([texts.repeat_interleave(VOCAB, 0), token], 1)
        hidden, _ = TARGET.model(texts, DenseMixer(CONFIG, texts.shape[1], "cpu"))
        following = torch.softmax(TARGET.model.logits(hidden[:, -1]).double() / TEMPERATURE, -1)
        joint = (joint[:, None] * following).flatten()
    classes = torch.nn.functional.one_hot(torch.arange(VOCAB) % CLASSES).double()
    return torch.einsum("abc,ai,bj,ck->ijk", joint.view(VOCAB, VOCAB, VOCAB), classes, classes, classes)


@pytest.mark.parametrize("name", TREES)
def test_three_tokens_follow_the_targets_distribution(make: Callable[[str], Algorithm], name: str) -> None:
    """The classes of the first three tokens over many seeds; a true engine fails once in a million runs."""
    seeds = 1000
    first = changed(requests(1, NUM_TOKENS)[0], temperature=TEMPERATURE)
    asked = [changed(first, id=seed, seed=seed) for seed in range(seeds)]
    completions = run(make(name), asked, Setup(max_batch=500), TARGET).completions
    written = torch.tensor([c.token_ids for c in completions]) % CLASSES
    counts = torch.bincount((written * torch.tensor([CLASSES**2, CLASSES, 1])).sum(1), minlength=CLASSES**3)
    accepted = sum(sum(c.accepted_counts) for c in completions)
    assert accepted > seeds / 20, "a test of drafts that are hardly ever accepted shows nothing"
    assert chisquare(counts, class_distribution().flatten() * seeds, sum_check=False).pvalue > 1e-6


@pytest.mark.parametrize("name", ["eagle3", "dflash", "standalone"])
def test_the_shape_does_not_depend_on_what_is_drawn(make: Callable[[str], Algorithm], name: str) -> None:
    algorithm, shapes = make(name), set()
    propose = algorithm.propose

    def watched(batch: Batch) -> DraftTree:
        draft = propose(batch)
        shapes.update(map(tuple, draft.links.first_child.tolist()))
        rows = draft.draft_rows
        assert draft.draft_probs is not None and rows is not None
        # Every child of a sampled row was drawn from the row that its parent names.
        for row in range(len(draft.tokens)):
            for node, parent in enumerate(algorithm._nodes.parents[1:], start=1):
                probs = draft.draft_probs[row, rows[row, parent]]
                assert batch.sampling.temperature[row] == 0 or probs[draft.tokens[row, node]] > 0
                assert abs(float(probs.sum()) - 1) < 1e-5
        return draft

    algorithm.propose = watched  # type: ignore[method-assign]
    # Few tokens can be drawn, and other ones from another row.
    asked = [changed(r, temperature=1.0, top_k=6) for r in requests(3, max_new_tokens=6)]
    run(algorithm, asked, Setup(), TARGET)
    assert len(shapes) == 1
