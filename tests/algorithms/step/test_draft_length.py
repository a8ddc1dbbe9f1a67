"""Which number of nodes is chosen: small tables of costs and acceptance whose answer is plain to see, and the recorded
decisions of the float32 torch implementation that the policy was ported from."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from algorithms.step.draft_length import LEAST_GAIN, DraftLengthPolicy

SIZES = (1, 2, 4, 8)
FLAT, STEEP = (1.0, 1.03, 1.06, 1.12), (1.0, 2.0, 4.0, 8.0)
"""Times of a step of 1, 2, 4 and 8 nodes: of a card that waits for weights, and of one that is full."""
RECORDED = {
    False: "1" + "0" * 43 + "1" * 8 + "2" * 6 + "1" * 27 + "2" * 15 + "4" * 100,
    True: "1" + "0" * 42 + "1" * 47 + "2" * 10 + "1" * 50 + "4" * 10 + "3" * 40,
}
"""Chosen sizes of `session(chain)`, step by step."""


def step(
    policy: DraftLengthPolicy,
    accepted: Sequence[int],
    times: Sequence[float] = FLAT,
    size: int = 3,
    path_probs: Sequence[float] | None = None,
) -> list[int | None]:
    """A step in which request b accepts the first `accepted[b]` drafts; the choice after it."""
    nodes = int(policy.sizes[size])
    path = probs = None
    if path_probs is not None:
        path = np.tile(np.arange(nodes), (len(accepted), 1))
        probs = np.array([path_probs[:nodes]] * len(accepted), np.float32)
    policy.update(accepted, size, times, path, probs)
    return [policy.choice, policy.drafting]


def repeat(count: int, policy: DraftLengthPolicy, *arguments: Any, **options: Any) -> list[int | None]:
    """`count` steps alike; the choice after the last."""
    return [step(policy, *arguments, **options) for _ in range(count)][-1]


def tokens_of(policy: DraftLengthPolicy) -> list[float]:
    """Tokens per step of each size that drafts, as the evidence has them."""
    return np.divide(policy.smaller, policy.own).cumprod().tolist()


def session(chain: bool) -> list[int | None]:
    """200 steps of all sizes over 1 to 8 requests, whose acceptance and cost change; the choice after each."""
    sizes, random, chosen = (1, 2, 4, 8, 12), np.random.default_rng(0), []
    policy = DraftLengthPolicy(sizes)
    for number in range(200):
        requests, size = int(random.integers(1, 9)), int(random.integers(1, len(sizes)))
        nodes, ease = sizes[size], (number // 40 % 3) / 2 * 0.9
        if number % 50 == 0:
            slope = float(random.choice([0.02, 0.2, 0.5]))
        depth = nodes - 1 if chain else min(5, nodes - 1)
        accepted = (random.random((requests, depth)) < ease).cumprod(1).sum(1)
        probs = random.integers(0, 20, (requests, nodes)).astype(np.float32) / 20
        probs[:, 0] = 1
        path = np.tile(np.arange(depth + 1), (requests, 1))
        if not chain:
            for row in path:
                row[1:] = np.sort(random.permutation(np.arange(1, nodes))[:depth])
        times = [1 + slope * (nodes - 1) for nodes in sizes]
        policy.update(accepted.tolist(), size, times, None if chain else path, None if chain else probs)
        chosen.append(policy.choice)
    return chosen


@pytest.mark.parametrize("chain", [False, True])
def test_choices_are_those_recorded(chain: bool) -> None:
    assert "".join(map(str, session(chain))) == RECORDED[chain]


@pytest.mark.parametrize(
    ("accepted", "times", "choice"),
    [
        ([0, 0], FLAT, 0),
        ([0, 0], STEEP, 0),
        ([7, 7], FLAT, 3),
        # Two of seven drafts are accepted: the third and fourth node pay on an idle card, and not on a full one.
        ([2] * 8, FLAT, 2),
        ([2] * 8, (1.0, 1.5, 2.9, 6.0), 1),
        ([2] * 8, STEEP, 0),
        # One request that accepts everything pays for another that accepts nothing, and not for 31 others.
        ([7, 0], (1.0, 1.3, 1.6, 2.2), 3),
        ([7, *[0] * 31], (1.0, 1.3, 1.6, 2.2), 0),
    ],
)
def test_the_size_that_pays_is_chosen(accepted: list[int], times: tuple[float, ...], choice: int) -> None:
    assert repeat(60, DraftLengthPolicy(SIZES), accepted, times)[0] == choice


def test_what_a_smaller_size_leaves_out_is_written_by_later_steps() -> None:
    """Half of the rows accept 7 drafts and half none: 9 tokens in two rows. Steps of 4 nodes need three for them, and
    steps of 2 nodes five. If what they leave out were lost, they would write 5 / 2 and 3 / 2 tokens a step."""
    policy = DraftLengthPolicy(SIZES)
    repeat(200, policy, [7, 0] * 8)
    assert tokens_of(policy) == pytest.approx([9 / 5, 9 / 3, 9 / 2], rel=0.01)


def test_steps_of_a_chain_often_end_at_the_same_wrong_draft() -> None:
    """Three tokens a step: steps of 2 nodes need 3 / 2 for them, of which a tree saves a tenth of what is above 1. Of a
    chain a quarter of them end where the larger step does, and take two."""
    falling = [0.9**rank for rank in range(8)]
    for path_probs, steps in ((falling, 1 + 0.9 / 2), (None, 3 / 2 + (2 - 3 / 2) / 4)):
        policy = DraftLengthPolicy(SIZES)
        repeat(200, policy, [2] * 16, path_probs=path_probs)
        assert tokens_of(policy) == pytest.approx([3 / steps, 3.0, 3.0], rel=0.01)


def test_a_small_gain_changes_nothing() -> None:
    """The last choice stays where a larger size promises less than 2 % more, and a smaller one less than 1 %."""
    policy = DraftLengthPolicy(SIZES)
    choice = repeat(100, policy, [7] * 8, (1.0, 1.9, 3.7, 7.3))
    rates = [tokens / spent for tokens, spent in zip(tokens_of(policy), (1.9, 3.7, 7.3), strict=True)]
    assert rates == pytest.approx([1.05, 1.08, 1.10], abs=0.01) and choice == [2, 3]
    assert step(policy, [7] * 8, (1.0, 1.9, 3.7, 7.2)) == [3, 3]
    assert step(policy, [7] * 8, (1.0, 1.9, 3.7, 7.45)) == [3, 2]
    assert step(policy, [7] * 8, (1.0, 1.9, 3.7, 7.5)) == [2, 2]


def test_no_size_writes_more_tokens_than_it_has_nodes() -> None:
    """The ratios alone say 8 tokens for 5 nodes, which would be worth 1.5 times the time of 4."""
    policy = DraftLengthPolicy((1, 2, 4, 5))
    policy.smaller, policy.own = [8.0] * 3, [4.0] * 3
    assert step(policy, [1] * 4, (1.0, 1.0, 1.0, 1.5), size=1) == [2, 2]


def test_a_few_trials_outweigh_what_is_long_past() -> None:
    """Larger sizes gained nothing. After steps of a smaller size, two of the largest are enough to tell otherwise."""
    policy = DraftLengthPolicy(SIZES)
    times = (1.0, 1.2, 1.5, 2.0)
    repeat(100, policy, [1] * 32, times)
    repeat(130, policy, [1] * 32, times, size=1)
    assert tokens_of(policy) == pytest.approx([2.0, 2.0, 2.0], rel=0.01)
    assert policy.own[1:] == pytest.approx([16.5, 16.5], abs=0.5)
    assert repeat(2, policy, [7] * 32, times)[0] == 3


def test_larger_sizes_gain_more_where_the_size_of_the_step_does() -> None:
    """Small steps say that it goes better now; the gain of larger sizes grows as many times."""
    policy = DraftLengthPolicy(SIZES)
    repeat(30, policy, [7, 0, 0, 0, 0, 0, 0, 0], size=3)
    before = [policy.gain(size) for size in (1, 2, 3)]
    repeat(200, policy, [1] * 8, size=1)
    first, *larger = (policy.gain(size) for size in (1, 2, 3))
    growth = (first + LEAST_GAIN) / (before[0] + LEAST_GAIN)
    assert first == pytest.approx(1, rel=0.01) and growth > 2
    assert larger == pytest.approx([gain * growth for gain in before[1:]], rel=1e-4)


def test_nodes_rank_by_path_probs() -> None:
    """The second node of the tree is its last by path_probs, so that the largest size alone verifies it. Of the step
    more that smaller ones take, nine tenths are counted."""
    sure = [1.0, 0.1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    policy = DraftLengthPolicy(SIZES)
    repeat(200, policy, [1] * 8, path_probs=sure)
    assert tokens_of(policy) == pytest.approx([2 / 1.9, 2 / 1.9, 2], rel=0.01)
