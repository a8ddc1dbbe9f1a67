"""Drafts that are drawn: the engine's text follows the target's distribution, and nothing else changes with them."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from algorithms.algorithm import Algorithm, Batch, DraftTree
from algorithms.dflash.config import GRU, NEXT, RNN, SELECTOR, ConvConfig, HeadConfig
from algorithms.dflash.drafting import DFlash
from algorithms.eagle.drafting import Eagle, Eagle3, PEagle
from algorithms.models.dense_mixer import DenseMixer
from algorithms.mtp.drafting import MTP
from algorithms.registry import available
from algorithms.standalone import Standalone
from tests.algorithms.drafters import LOADING, TARGET, blurred_target, chi_square_tail
from tests.algorithms.toy import CONFIG, VOCAB, Setup, answers, changed, random_drafter, requests, run

pytestmark = pytest.mark.usefixtures("random_drafters")

Kind = type[Standalone] | type[Eagle] | type[MTP] | type[DFlash]


def made(kind: Kind, **settings: object) -> Algorithm:
    return kind(kind.Config(**settings), TARGET, "random")


TREES: dict[str, Callable[[], Algorithm]] = {
    "standalone": partial(made, Standalone, steps=3, topk=2, num_nodes=8, draft_sampling="without_replacement"),
    "standalone_k_seq": partial(made, Standalone, steps=2, topk=3, num_nodes=9, rule="k_seq"),
    "eagle": partial(made, Eagle, steps=3, topk=3, num_nodes=12, draft_sampling="sample", rule="multi_round"),
    "eagle3": partial(made, Eagle3, steps=3, topk=2, num_nodes=9, rule="without_replacement"),
    "eagle3_chain": partial(made, Eagle3, steps=3, draft_sampling="sample"),
    "peagle": partial(made, PEagle, steps=3, topk=2, num_nodes=8, draft_sampling="without_replacement"),
    "peagle_chain": partial(made, PEagle, steps=3, draft_sampling="sample"),
    "mtp": partial(made, MTP, steps=3, topk=2, num_nodes=8, draft_sampling="sample"),
    "dflash": partial(made, DFlash, block_size=4, topk=3, num_nodes=10, draft_sampling="without_replacement"),
    "dflash_again": partial(made, DFlash, block_size=4, topk=2, num_nodes=8, draft_sampling="sample"),
    "dflash_chain": partial(made, DFlash, block_size=4, draft_sampling="sample", rule="rejection"),
    "dflash_markov": partial(made, DFlash, block_size=4, topk=2, num_nodes=9, draft_sampling="without_replacement"),
    "dflash_rnn": partial(made, DFlash, block_size=4, topk=2, num_nodes=9, draft_sampling="sample"),
    "dflash_gru": partial(made, DFlash, block_size=4, draft_sampling="sample"),
    "dflash_selector": partial(made, DFlash, block_size=4, draft_sampling="sample"),
    "dflash_reduced": partial(made, DFlash, block_size=4, topk=2, num_nodes=8, draft_sampling="without_replacement"),
    "standalone_rejection": partial(made, Standalone, steps=3, rule="rejection"),
    "standalone_block": partial(made, Standalone, steps=3, rule="block"),
}
PARTS: dict[str, dict[str, Any]] = {
    "dflash_markov": {"markov_rank": 5},
    "dflash_rnn": {"head": HeadConfig(RNN, 5), "slots": NEXT},
    "dflash_gru": {"head": HeadConfig(GRU, 5, state_size=6, num_plain=1)},
    "dflash_selector": {"head": HeadConfig(SELECTOR, 5, num_candidates=16), "conv": ConvConfig(2, 8)},
    "dflash_reduced": {"draft_vocab_size": 37, "owns_head": True},
}
"""What a block drafter has besides its layers."""


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Algorithm]:
    monkeypatch.setattr(f"{LOADING}.load_draft", lambda *_: blurred_target())

    def maker(name: str) -> Algorithm:
        if name in PARTS:
            monkeypatch.setattr("algorithms.dflash.loading.load_dflash", lambda *_: random_drafter(**PARTS[name]))
        return TREES[name if name in TREES else "eagle"]()

    return maker


@cache
def greedy_answers() -> list[list[int]]:
    return answers(requests(4, max_new_tokens=6), Setup(backend="torch", max_batch=1), TARGET)


@pytest.mark.parametrize("name", ["standalone", "eagle3_chain", "dflash_again"])
def test_greedy_rows_and_captured_steps(make: Callable[[str], Algorithm], name: str) -> None:
    """Greedy rows stay the target's own beside sampled ones. Captured steps with padding rows, and other neighbours in
    the batch, draw the same."""
    asked = [changed(r, temperature=(0.0, 0.8)[r.id % 2]) for r in requests(4, max_new_tokens=6)]
    plain, captured = (
        [c.token_ids for c in run(make(name), asked, setup, TARGET).completions]
        for setup in (Setup(max_batch=2), Setup(max_batch=3, graph="step", async_steps=1, page_size=1))
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
SEEDS_AT_ONCE = Setup(max_batch=500, prefill_tile=4)
BIAS = {3: 4.0, 17: -6.0, 40: 2.5}


@cache
def class_distribution(biased: bool, top_k: int) -> torch.Tensor:
    """[4, 4, 4] float64: the classes of the first three tokens of autoregressive sampling, with `BIAS` and top-k."""
    bias = torch.zeros(VOCAB, dtype=torch.float64)
    bias[list(BIAS)] = torch.tensor(list(BIAS.values()), dtype=torch.float64) * biased
    prompt = torch.tensor(requests(1)[0].prompt_ids)
    joint, texts = torch.ones(1, dtype=torch.float64), prompt[None]
    for place in range(NUM_TOKENS):
        if place:
            token = torch.arange(VOCAB).repeat(len(texts))[:, None]
            texts = torch.cat([texts.repeat_interleave(VOCAB, 0), token], 1)
        hidden, _ = TARGET.model(texts, DenseMixer(CONFIG, texts.shape[1], "cpu"))
        logits = TARGET.model.logits(hidden[:, -1]).double() + bias
        least = logits.topk(top_k).values[:, -1:]
        following = torch.softmax(logits.where(logits >= least, -torch.inf) / TEMPERATURE, -1)
        joint = (joint[:, None] * following).flatten()
    classes = torch.nn.functional.one_hot(torch.arange(VOCAB) % CLASSES).double()
    return torch.einsum("abc,ai,bj,ck->ijk", joint.view(VOCAB, VOCAB, VOCAB), classes, classes, classes)


BIASED = ("standalone", "eagle3_chain", "peagle", "dflash", "dflash_rnn", "dflash_reduced")
FILTERED = ("eagle3_chain", "dflash_selector", "standalone_rejection")
SHOWN_BY_OTHERS = ("dflash_again", "eagle3", "peagle_chain")
"""Trees and chains whose drafter, shape of draft and way of sampling others have."""


@pytest.mark.parametrize("name", [name for name in TREES if name not in SHOWN_BY_OTHERS])
def test_three_tokens_follow_the_targets_distribution(make: Callable[[str], Algorithm], name: str) -> None:
    """The classes of the first three tokens over many seeds; a true engine fails once in a million runs. One algorithm
    for each way in which drafts take part in a bias or a filter has one."""
    biased, top_k, seeds = name in BIASED, 9 if name in FILTERED else 0, 1000
    first = changed(requests(1, NUM_TOKENS)[0], temperature=TEMPERATURE, top_k=top_k, logit_bias=BIAS if biased else {})
    asked = [changed(first, id=seed, seed=seed) for seed in range(seeds)]
    expected, completions = (
        class_distribution(biased, top_k or VOCAB),
        run(make(name), asked, SEEDS_AT_ONCE, TARGET).completions,
    )
    written = torch.tensor([c.token_ids for c in completions]) % CLASSES
    counts = torch.bincount((written * torch.tensor([CLASSES**2, CLASSES, 1])).sum(1), minlength=CLASSES**3)
    accepted = sum(sum(c.accepted_counts) for c in completions)
    assert accepted > seeds / 20, "a test of drafts that are hardly ever accepted shows nothing"
    can_be = expected.flatten() > 0
    assert not counts[~can_be].any(), "a class without probability"
    assert chi_square_tail(expected.flatten()[can_be] * seeds, counts[can_be]) > 1e-6


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        (name, ("sample", "without_replacement")[number % 2])
        for number, name in enumerate(
            ("standalone", "eagle", "eagle3", "naive_eagle", "peagle", "mtp", "dflash", "dflash_markov")
        )
    ],
)
def test_a_tree_of_three_nodes_is_a_chain(make: Callable[[str], Algorithm], name: str, draw: str) -> None:
    """Levels have `topk` columns still, and distributions of columns that no node has."""
    kind = {"dflash_markov": DFlash}.get(name) or available()[name]
    make(name)
    depth = {"block_size": 3} if kind is DFlash else {"steps": 2}
    algorithm = made(kind, topk=2, num_nodes=3, draft_sampling=draw, **depth)
    asked = [changed(request, temperature=(0.0, 1.0)[request.id % 2]) for request in requests(2, max_new_tokens=6)]
    assert algorithm._nodes.parents == (-1, 0, 1)
    assert run(algorithm, asked, Setup(), TARGET).completions[0].token_ids == greedy_answers()[0]


@pytest.mark.parametrize("name", ["eagle3", "dflash", "standalone"])
def test_the_shape_does_not_depend_on_what_is_sampled(make: Callable[[str], Algorithm], name: str) -> None:
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
