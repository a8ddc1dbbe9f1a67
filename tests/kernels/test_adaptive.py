"""Which number of nodes is chosen: small tables of costs and acceptance whose answer is plain to see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from specdec_kernels import SizeState, choose_size
from specdec_kernels.adaptive.types import LEAST_GAIN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (2, 4, 8)
FLAT, STEEP = (1.0, 1.03, 1.06, 1.12), (1.0, 2.0, 4.0, 8.0)
"""Times of a step of 1, 2, 4 and 8 nodes: of a card that waits for weights, and of one that is full."""
LAST = 12
"""Steps behind a long history that the implementation under test computes itself."""


@pytest.fixture(autouse=True, params=["reference", "triton"])
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    with torch.device(DEVICE):
        yield request.param


def step(
    state: SizeState,
    impl: str,
    accepted: Sequence[int],
    times: Sequence[float] = FLAT,
    size: int = 3,
    confidence: Sequence[float] | None = None,
    active: Sequence[int] | None = None,
) -> list[int]:
    """A step of chains in which row b accepts `accepted[b]` drafts; the choice after it."""
    nodes, rows = int(state.sizes[size]), len(accepted)
    column = torch.arange(nodes)
    counts = torch.tensor(accepted, dtype=torch.int32)
    path = torch.where(column <= counts[:, None], column, -1).int()
    told = None if confidence is None else torch.tensor([list(confidence[:nodes])] * rows)
    live = torch.tensor(active or [1] * rows, dtype=torch.int32)
    step_ms = torch.tensor(times, dtype=torch.float32)
    choose_size(state, told, path, counts, live, step_ms, size, nodes, impl=impl)
    return state.choice.tolist()


def repeat(count: int, state: SizeState, impl: str, *arguments: Any, **options: Any) -> list[int]:
    """`count` steps alike; the choice after the last. Those before the last few are the reference's, which leaves the
    same state in less time."""
    for left in range(count, 0, -1):
        choice = step(state, impl if left <= LAST else "reference", *arguments, **options)
    return choice


def after(steps: int, impl: str, accepted: Sequence[int], times: Sequence[float] = FLAT, **options: Any) -> int:
    return repeat(steps, SizeState.create(SIZES, DEVICE), impl, accepted, times, **options)[0]


def tokens_of(state: SizeState) -> list[float]:
    """Tokens per step of each size that drafts, as the evidence has them."""
    ratios = state.evidence[:, 0] / state.evidence[:, 1]
    return ratios.cumprod(0).tolist()


def gains_of(state: SizeState) -> list[float]:
    """How many times more tokens per step each size writes than the one before, less 1."""
    return (state.evidence[:, 0] / state.evidence[:, 1] - 1).tolist()


def test_before_any_step_nothing_is_chosen(impl: str) -> None:
    """And a chain of drafts that are accepted with probability 0.85 is expected."""
    state = SizeState.create(SIZES, DEVICE)
    assert state.choice.tolist() == [-1, -1]
    assert tokens_of(state) == pytest.approx([1.85, 3.187, 4.850], abs=1e-3)


@pytest.mark.parametrize("times", [FLAT, STEEP])
def test_nothing_is_drafted_where_nothing_is_accepted(impl: str, times: tuple[float, ...]) -> None:
    assert after(60, impl, [0, 0], times) == 0


def test_all_is_drafted_where_all_is_accepted(impl: str) -> None:
    assert after(3, impl, [7, 7]) == 3


def test_a_node_that_costs_more_than_it_brings_is_left_out(impl: str) -> None:
    """Two of seven drafts are accepted: the third and fourth node pay on an idle card, and not on a full one."""
    assert after(30, impl, [2] * 8, FLAT) == 2
    assert after(30, impl, [2] * 8, (1.0, 1.5, 2.9, 6.0)) == 1
    assert after(30, impl, [2] * 8, STEEP) == 0


def test_what_a_smaller_size_leaves_out_is_written_by_later_steps(impl: str) -> None:
    """Half of the rows accept 7 drafts and half none: 9 tokens in two rows. Steps of 4 nodes need three for them, and
    steps of 2 nodes five. If what they leave out were lost, they would write 5 / 2 and 3 / 2 tokens a step."""
    state = SizeState.create(SIZES, DEVICE)
    repeat(200, state, impl, [7, 0] * 8)
    assert tokens_of(state) == pytest.approx([9 / 5, 9 / 3, 9 / 2], rel=0.01)


def test_steps_of_a_chain_often_end_at_the_same_wrong_draft(impl: str) -> None:
    """Three tokens a step: steps of 2 nodes need 3 / 2 for them, of which a tree saves a tenth of what is above 1. Of a
    chain a quarter of them end where the larger step does, and take two."""
    falling = [0.9**rank for rank in range(8)]
    for confidence, steps in ((falling, 1 + 0.9 / 2), (None, 3 / 2 + (2 - 3 / 2) / 4)):
        state = SizeState.create(SIZES, DEVICE)
        repeat(200, state, impl, [2] * 16, confidence=confidence)
        assert tokens_of(state) == pytest.approx([3 / steps, 3.0, 3.0], rel=0.01)


def test_a_small_gain_changes_nothing(impl: str) -> None:
    """The last choice stays where a larger size promises less than 2 % more, and a smaller one less than 1 %."""
    state = SizeState.create(SIZES, DEVICE)
    choice = repeat(100, state, impl, [7] * 8, (1.0, 1.9, 3.7, 7.3))
    rates = [tokens / spent for tokens, spent in zip(tokens_of(state), (1.9, 3.7, 7.3), strict=True)]
    assert rates == pytest.approx([1.05, 1.08, 1.10], abs=0.01) and choice == [2, 3]
    assert step(state, impl, [7] * 8, (1.0, 1.9, 3.7, 7.2)) == [3, 3]
    assert step(state, impl, [7] * 8, (1.0, 1.9, 3.7, 7.45)) == [3, 2]
    assert step(state, impl, [7] * 8, (1.0, 1.9, 3.7, 7.5)) == [2, 2]


def test_a_small_gain_of_drafting_changes_nothing(impl: str) -> None:
    state = SizeState.create((2,), DEVICE)
    state.choice.copy_(torch.tensor([0, 1]))
    assert step(state, impl, [1] * 64, (1.0, 1.98), size=1) == [0, 1]
    assert step(state, impl, [1] * 64, (1.0, 1.9), size=1) == [1, 1]


def test_no_size_writes_more_tokens_than_it_has_nodes(impl: str) -> None:
    """The ratios alone say 8 tokens for 5 nodes, which would be worth 1.5 times the time of 4."""
    state = SizeState.create((2, 4, 5), DEVICE)
    state.evidence.copy_(torch.tensor([[8.0, 4.0]] * 3))
    assert step(state, impl, [1] * 4, (1.0, 1.0, 1.0, 1.5), size=1) == [2, 2]


def test_the_batch_is_judged_as_a_whole(impl: str) -> None:
    """One request that accepts everything pays for another that accepts nothing, and not for seven others."""
    times = (1.0, 1.3, 1.6, 2.2)
    assert after(60, impl, [7, 0], times) == 3
    assert after(60, impl, [7, *[0] * 31], times) == 0


def test_padding_is_not_judged(impl: str) -> None:
    assert after(30, impl, [7, 0, 0, 0], (1.0, 1.5, 2.0, 3.0), active=[1, 0, 0, 0]) == 3
    state = SizeState.create(SIZES, DEVICE)
    before = state.evidence.clone()
    for rows in (2, 3):
        assert step(state, impl, [0] * rows, active=[0] * rows) == [-1, -1] and torch.equal(state.evidence, before)


def test_the_choice_follows_the_text(impl: str) -> None:
    state = SizeState.create(SIZES, DEVICE)
    times = (1.0, 1.2, 1.5, 2.0)
    repeat(60, state, impl, [1] * 8, times)
    assert int(state.choice[0]) == 1
    late = [step(state, impl, [7] * 8, times)[0] for _ in range(30)]
    assert late[-1] == 3


def test_a_trial_outweighs_what_was_before(impl: str) -> None:
    """Where nothing is drafted, few rows that accept are enough to take drafting up again."""
    state = SizeState.create(SIZES, DEVICE)
    times = (1.0, 1.2, 1.5, 2.0)
    repeat(200, state, impl, [0] * 4, times)
    assert state.choice.tolist() == [0, 1]
    assert [step(state, impl, [1] * 4, times, size=1)[0] for _ in range(8)][-1] > 0


def test_a_few_trials_outweigh_what_is_long_past(impl: str) -> None:
    """Larger sizes gained nothing. After steps of a smaller size, two of the largest are enough to tell otherwise."""
    state = SizeState.create(SIZES, DEVICE)
    times = (1.0, 1.2, 1.5, 2.0)
    repeat(100, state, impl, [1] * 32, times)
    repeat(130, state, impl, [1] * 32, times, size=1)
    assert tokens_of(state) == pytest.approx([2.0, 2.0, 2.0], rel=0.01)
    assert state.evidence[1:, 1].tolist() == pytest.approx([16.5, 16.5], abs=0.5)
    assert repeat(2, state, impl, [7] * 32, times)[0] == 3


def test_larger_sizes_gain_more_where_the_size_of_the_step_does(impl: str) -> None:
    """Small steps say that it goes better now; the gain of larger sizes grows as many times."""
    state = SizeState.create(SIZES, DEVICE)
    repeat(30, state, impl, [7, 0, 0, 0, 0, 0, 0, 0], size=3)
    before = gains_of(state)
    repeat(200, state, impl, [1] * 8, size=1)
    first, *larger = gains_of(state)
    growth = (first + LEAST_GAIN) / (before[0] + LEAST_GAIN)
    assert first == pytest.approx(1, rel=0.01) and growth > 2
    assert larger == pytest.approx([gain * growth for gain in before[1:]], rel=1e-4)


def test_nodes_rank_by_confidence(impl: str) -> None:
    """The second node of the tree is its last by confidence, so that the largest size alone verifies it. Of the step
    more that smaller ones take, nine tenths are counted."""
    sure = [1.0, 0.1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    state = SizeState.create(SIZES, DEVICE)
    repeat(200, state, impl, [1] * 8, confidence=sure)
    assert tokens_of(state) == pytest.approx([2 / 1.9, 2 / 1.9, 2], rel=0.01)


@pytest.mark.parametrize("sizes", [(), (1, 2), (4, 2), (2, 2), (2, 300), tuple(range(2, 20))])
def test_sizes_rise_from_two(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sizes: expected"):
        SizeState.create(sizes, DEVICE)
