"""Drafts of given acceptance: the target's own output, at the asked rates."""

import math
from dataclasses import replace

import pytest
import torch

from algorithms.algorithm import Batch, DraftTree
from algorithms.engine.request import EngineError
from algorithms.synthetic import Synthetic, uniforms
from tests.algorithms.drafters import TARGET
from tests.algorithms.toy import Setup, answers, changed, engine_of, requests, run

pytestmark = pytest.mark.usefixtures("random_drafters")

RATE = [0.9, 0.8, 0.6]
TREE = {"name": "dflash", "block_size": 5, "topk": 3, "num_nodes": 11}


def synthetic(rate: list[float], **settings: object) -> Synthetic:
    return Synthetic(Synthetic.Config(rate=rate, **settings), TARGET, "random")


@pytest.mark.parametrize("drafter", [{}, TREE, {"name": "ngram", "num_nodes": 6}], ids=["chain", "tree", "ngram"])
def test_output_is_the_targets(drafter: dict[str, object]) -> None:
    asked = [changed(request, temperature=float(request.id % 2)) for request in requests(5)]
    setup = Setup(page_size=4, graph="step", async_steps=1)
    found = run(synthetic(RATE, drafter=drafter), asked, replace(setup, adaptive=not drafter), TARGET)
    assert [c.token_ids for c in found.completions] == answers(asked, setup, TARGET)


@pytest.mark.parametrize("drafter", [{}, TREE], ids=["chain", "tree"])
def test_drafts_are_accepted_at_the_given_rates(drafter: dict[str, object]) -> None:
    """Of the steps that accepted all before it, the share that accepts draft i lies within four deviations."""
    setup, asked = Setup(max_batch=96), requests(96, 30)
    found = run(synthetic(RATE, drafter=drafter), asked, setup, TARGET)
    # The end of a request cuts its last drafts off, and a path of a tree may be short.
    steps = [step for c in found.completions for step in list(zip(c.accepted_counts, c.ran_out, strict=True))[:-1]]
    for depth, rate in enumerate([*RATE, RATE[-1]][: 4 if drafter else 3], start=1):
        right = sum(n >= depth for n, _ in steps)
        tried = right + sum(n == depth - 1 and not ran_out for n, ran_out in steps)
        assert tried >= 20 and abs(right - rate * tried) <= 4 * math.sqrt(rate * (1 - rate) * tried)


def test_one_draft_of_a_depth_is_right() -> None:
    """What stands beside the path of first children is never accepted."""
    algorithm, counts = synthetic([1.0, 0.9], drafter=TREE), []
    propose = algorithm.propose

    def watched(batch: Batch) -> DraftTree:
        tree = propose(batch)
        right = tree.tokens == batch.history.gather(1, tree.links.positions.clamp(max=batch.history.shape[1] - 1))
        counts.extend(int((right[:, 1:] & (tree.links.depth[:, 1:] == depth)).sum(1).max()) for depth in (1, 2, 3))
        return tree

    algorithm.propose = watched  # type: ignore[method-assign]
    run(algorithm, requests(3), Setup(), TARGET)
    assert set(counts) == {0, 1}


def test_sure_drafts_are_accepted_and_hopeless_ones_are_not() -> None:
    asked = requests(3, 24)
    for rate, accepted in ([1.0, 1.0], 2), ([0.0, 1.0], 0):
        found = run(synthetic(rate), asked, Setup(), TARGET)
        assert {n for c in found.completions for n in c.accepted_counts[:-1]} == {accepted}


def test_numbers_are_uniform_and_independent() -> None:
    seeds, lengths = torch.arange(200).repeat_interleave(200), torch.arange(200).repeat(200)
    drawn = uniforms(seeds, lengths, 4).double()
    assert drawn.min() >= 0 and drawn.max() < 1
    cells = (drawn * 10).long()
    for one, other in ((0, 1), (1, 3)):
        counts = torch.bincount(cells[:, one] * 10 + cells[:, other], minlength=100)
        assert ((counts - 400).double().square() / 400).sum() < 160  # 99 degrees of freedom
    by_seed = drawn[:, 0].view(200, 200)
    for later, earlier in ((by_seed[1:], by_seed[:-1]), (by_seed[:, 1:], by_seed[:, :-1])):
        pair = torch.stack([later.flatten(), earlier.flatten()])
        assert abs(torch.corrcoef(pair)[0, 1]) < 0.02  # four deviations of 40,000 pairs


def test_a_later_turn_is_refused() -> None:
    engine = engine_of(synthetic(RATE), Setup(), TARGET)
    first, second = requests(2, 4)
    with pytest.raises(EngineError, match="algo=synthetic: expected prompts of one turn"):
        engine.generate([first], follow=lambda done: second if done.request_id == first.id else None)
