"""Which number of nodes is chosen: small tables of costs and acceptance whose answer is plain to see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from specdec_kernels import SizeState, choose_size

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (2, 4, 8)
FLAT, STEEP = (1.0, 1.03, 1.06, 1.12), (1.0, 2.0, 4.0, 8.0)
"""Times of a step of 1, 2, 4 and 8 nodes: of a card that waits for weights, and of one that is full."""


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


def after(steps: int, impl: str, accepted: Sequence[int], times: Sequence[float] = FLAT, **options: object) -> int:
    state = SizeState.create(SIZES, DEVICE)
    for _ in range(steps):
        choice, _ = step(state, impl, accepted, times, **options)  # type: ignore[arg-type]
    return choice


def test_before_any_step_the_largest_is_chosen(impl: str) -> None:
    assert SizeState.create(SIZES, DEVICE).choice.tolist() == [3, 3]


@pytest.mark.parametrize("times", [FLAT, STEEP])
def test_nothing_is_drafted_where_nothing_is_accepted(impl: str, times: tuple[float, ...]) -> None:
    assert after(3, impl, [0, 0], times) == 0


def test_all_is_drafted_where_all_is_accepted(impl: str) -> None:
    assert after(3, impl, [7, 7]) == 3


def test_a_node_that_costs_more_than_it_brings_is_left_out(impl: str) -> None:
    """Two of seven drafts are accepted: the third and fourth node pay on an idle card, and not on a full one."""
    assert after(3, impl, [2, 2], FLAT) == 2
    assert after(3, impl, [2, 2], (1.0, 1.5, 2.9, 6.0)) == 1
    assert after(3, impl, [2, 2], STEEP) == 0


def test_a_larger_size_that_costs_the_same_is_taken_for_what_it_tells(impl: str) -> None:
    assert after(3, impl, [2, 2], (1.0, 1.5, 2.0, 2.03)) == 3
    assert after(3, impl, [0, 0], (1.0, 1.01, 1.01, 1.01)) == 0


def test_the_batch_is_judged_as_a_whole(impl: str) -> None:
    """One request that accepts everything pays for another that accepts nothing, and not for seven others."""
    times = (1.0, 1.3, 1.6, 2.2)
    assert after(3, impl, [7, 0], times) == 3
    assert after(3, impl, [7, 0, 0, 0, 0, 0, 0, 0], times) == 0


def test_padding_is_not_judged(impl: str) -> None:
    assert after(3, impl, [7, 0, 0, 0], (1.0, 1.5, 2.0, 3.0), active=[1, 0, 0, 0]) == 3
    state = SizeState.create(SIZES, DEVICE)
    assert step(state, impl, [0, 0], active=[0, 0]) == [3, 3] and not state.evidence[:, :4].any()


def test_the_choice_follows_the_text(impl: str) -> None:
    """Within the half-life of the signal, not that of the calibration."""
    state = SizeState.create(SIZES, DEVICE)
    for _ in range(10):
        step(state, impl, [0] * 8, STEEP)
    times = (1.0, 1.2, 1.5, 2.0)
    late = [step(state, impl, [7] * 8, times)[0] for _ in range(8)]
    assert late[-1] == 3


def test_an_overconfident_drafter_is_corrected(impl: str) -> None:
    sure = [1.0, *[0.95] * 7]
    times = (1.0, 1.5, 1.9, 2.5)
    assert after(1, impl, [0], times, confidence=sure) == 3
    assert after(6, impl, [0], times, confidence=sure) == 0


def test_confidence_tells_one_rejected_draft_from_another(impl: str) -> None:
    times = (1.0, 1.5, 1.9, 2.5)
    assert after(1, impl, [0], times, confidence=[1.0, *[0.95] * 7]) == 3
    assert after(1, impl, [0], times, confidence=[1.0, *[0.1] * 7]) == 0


def test_larger_sizes_are_judged_by_the_ratio_that_they_had(impl: str) -> None:
    """Small steps say that it goes better now; what larger ones would gain follows in proportion."""
    state = SizeState.create(SIZES, DEVICE)
    for accepted in ([7, 0, 0, 0], [0, 7, 0, 0]):
        step(state, impl, accepted, size=3)
    assert state.evidence[:, 4].tolist() == pytest.approx([0, 2, 4], rel=0.05)
    for _ in range(12):
        choice = step(state, impl, [1, 1, 1, 1], (1.0, 1.5, 1.6, 1.7), size=1)
    assert choice == [3, 3]


def test_nodes_rank_by_confidence(impl: str) -> None:
    """The second node of the tree is its last by confidence, so that it belongs to the last band."""
    state = SizeState.create(SIZES, DEVICE)
    step(state, impl, [1], confidence=[1.0, 0.1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    accepted, expected = state.evidence[:, 2].tolist(), state.evidence[:, 3].tolist()
    assert accepted == [0, 0, 1] and expected == pytest.approx([0.9, 1.5, 1.6])


@pytest.mark.parametrize("sizes", [(), (1, 2), (4, 2), (2, 2), (2, 300), tuple(range(2, 20))])
def test_sizes_rise_from_two(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sizes: expected"):
        SizeState.create(sizes, DEVICE)
