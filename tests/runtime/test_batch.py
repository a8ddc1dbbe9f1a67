"""Rows of the state: what enters them, how they move, and what padding holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algorithms.runtime.batch import PRETENDED_TOKENS, BatchState, RowStore, number_fields, write_numbers
from algorithms.runtime.request import Request
from algorithms.runtime.sampling_params import SamplingNeeds, SamplingParams
from algorithms.runtime.staging import Staging

CPU = torch.device("cpu")
CONTEXT, VOCAB, PAGES = 12, 9, 3
SAMPLED = SamplingParams(temperature=0.5, top_k=4, top_p=0.75, min_p=0.125, seed=77, max_new_tokens=2)


@pytest.fixture
def state() -> BatchState:
    return BatchState(3, 1, PAGES, CONTEXT, VOCAB, CPU)


def enter(state: BatchState, row: int) -> None:
    """Put a request that says its row everywhere into `row`."""
    staging = Staging(number_fields(1) | {"pages": ((1, PAGES), torch.int32)}, CPU)
    arrays = staging.arrays()
    write_numbers(arrays, 0, SAMPLED, length=row + 1, last=row + 2, active=True)
    arrays["pages"].fill(row + 3)
    staging.send()
    state.enter(torch.tensor([row]), staging.tensors)
    state.write_text(torch.tensor([row]), torch.tensor([[0, 1]]), torch.tensor([[row + 4, 0]]), torch.tensor([1]))


def held(state: BatchState, row: int) -> tuple[int, ...]:
    """What a row of the running requests holds: active, length, last token, a page, the first of its text."""
    batch = state.batch(row, row + 1, CONTEXT)
    numbers = (batch.active, batch.lengths, batch.last_tokens, batch.page_table[:, 0], batch.history[:, 0])
    return tuple(int(number) for number in numbers)


def test_numbers_of_a_request_are_found_where_steps_read_them(state: BatchState) -> None:
    enter(state, 1)
    sampling = state.batch(1, 2, CONTEXT).sampling
    assert held(state, 1) == (1, 2, 3, 4, 5) and held(state, 0) == held(state, 2) == (0,) * 5
    found = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seeds)
    assert [tensor.tolist() for tensor in found] == [[0.5], [4], [0.75], [0.125], [77]]  # type: ignore[union-attr]
    padding = state.batch(0, 1, CONTEXT).sampling
    found = (padding.temperature, padding.top_k, padding.top_p, padding.min_p)
    assert [tensor.tolist() for tensor in found] == [[0.0], [0], [1.0], [0.0]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("moves", "rows"),
    [
        ([(2, 0)], (2, 1, None)),
        ([(1, 1)], (0, None, 2)),
        ([(3, 1)], (0, 3, 2)),
        ([(2, 1), (1, 0)], (2, None, None)),
        ([(1, 0), (2, 1)], (1, 2, None)),
        ([(2, 2), (1, 1), (0, 0)], (None, None, None)),
        ([], (0, 1, 2)),
    ],
)
def test_rows_move_in_turn(state: BatchState, moves: list[tuple[int, int]], rows: tuple[int | None, ...]) -> None:
    """What leaves a row leaves padding behind; a request that waits in row 3 takes the row of one that has ended."""
    for row in range(4):
        enter(state, row)
    state.rearrange(moves)
    for row, source in enumerate(rows):
        expected = (0,) * 5 if source is None else (1, source + 1, source + 2, source + 3, source + 4)
        assert held(state, row) == expected, row


def test_complete_prompts_take_part_in_steps(state: BatchState) -> None:
    """The others stay padding, in whatever order they come."""
    state.activate(torch.tensor([2, 0, 4]), torch.tensor([1, 0, 0], dtype=torch.int32))
    assert state.active.tolist() == [0, 0, 1]


def test_grammars_have_room_for_every_node(state: BatchState) -> None:
    state.make_room(SamplingNeeds(constrained=True), 5, 2)
    assert state.constraints is not None
    assert state.constraints.bits.shape[:2] == (3, 5) and state.constraints.forced.shape == (3, 2)


def test_penalties_and_forbidden_words_move_with_their_row(state: BatchState) -> None:
    needs = SamplingNeeds(penalised=True, forbids=True)
    state.make_room(needs, 1, 0)
    params = SamplingParams(max_new_tokens=2, presence_penalty=0.5, bad_words=((5, 6),))
    state.fill(2, Request(0, (3, 4), params), needs)
    assert state.penalties is not None and state.forbidden is not None
    assert state.penalties.prompt_seen[2].nonzero()[:, 0].tolist() == [3, 4]
    assert [word for word in state.forbidden.words[2, 0].tolist() if word >= 0] == [5, 6]
    state.rearrange([(2, 0)])
    assert state.penalties.presence.tolist()[:3] == [0.5, 0.0, 0.0]
    assert state.penalties.prompt_seen[0].nonzero()[:, 0].tolist() == [3, 4]
    assert bool((state.forbidden.words[2] == -1).all()) and bool((state.forbidden.words[0] >= 0).any())


def test_padding_of_a_text_goes_to_the_spare_row(state: BatchState) -> None:
    rows, positions = torch.tensor([0, 1]), torch.tensor([[0, 1, 2], [3, 4, 5]])
    state.write_text(rows, positions, torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([2, 0]))
    assert state.history[0, :3].tolist() == [1, 2, 0] and not bool(state.history[1:].any())


def test_tiles_are_rows_of_a_batch(state: BatchState) -> None:
    """A tile without tokens is padding."""
    enter(state, 1)
    tiles = state.tiles(torch.tensor([1, 1, 0]), torch.tensor([0, 4, 0]), torch.tensor([4, 1, 0]), CONTEXT)
    assert tiles.active.tolist() == [1, 1, 0] and tiles.last_tokens.tolist() == [3, 3, 0]
    assert tiles.page_table[:, 0].tolist() == [4, 4, 0] and tiles.history[:, 0].tolist() == [5, 5, 0]
    assert tiles.sampling.temperature is not None and tiles.sampling.temperature.tolist() == [0.5, 0.5, 0.0]


def test_a_pretended_request_has_half_of_a_short_context(state: BatchState) -> None:
    lengths = [state.pretended_length(longest) for longest in (10, 2 * PRETENDED_TOKENS, 4096)]
    assert lengths == [5, PRETENDED_TOKENS, PRETENDED_TOKENS]


def test_pretended_requests_have_pages_of_their_own_and_leave_no_trace(state: BatchState) -> None:
    state.pretend(2, 7, num_pages=5, generator=torch.Generator().manual_seed(0))
    texts = state.history[:2, :8]
    assert not torch.equal(texts[0], texts[1]) and torch.equal(state.last_tokens[:2], texts[:, 7])
    assert state.page_table.tolist() == [[0, 1, 2], [3, 4, 0], [0, 0, 0]]
    assert state.lengths.tolist() == [7, 7, 0] and state.active.tolist() == [1, 1, 0]
    state.reset()
    assert all(held(state, row) == (0,) * 5 for row in range(3))


def seen(values: torch.Tensor, counts: list[int], prompts: Any = None) -> Any:
    batch = SimpleNamespace(rows=slice(0, len(counts)))
    return SimpleNamespace(batch=batch, counts=torch.tensor(counts, dtype=torch.int32), prompts=prompts)


def test_a_row_store_keeps_the_last_observed() -> None:
    """Of prompts too, whose rows go up to the spare row; a prompt of which nothing is observed starts from zeros."""
    resources: Any = SimpleNamespace(max_batch=2, dtype=torch.float32, device=CPU, impl="reference")
    store, values = RowStore(1, resources), torch.arange(1.0, 7.0).view(2, 3, 1)
    store.keep_last(seen(values, [2, 0]), values)
    assert store.rows(slice(0, 3))[:, 0].tolist() == [2, 0, 0]
    store.keep_last(seen(values, [3, 1]), values)
    assert store.rows(slice(0, 3))[:, 0].tolist() == [3, 4, 0]
    prompts = SimpleNamespace(
        rows=torch.tensor([0, 1, 2]), last=torch.tensor([0, 4, 0]), counts=torch.tensor([0, 2, 0])
    )
    store.keep_last(seen(values, [3, 3], prompts), values)
    assert store.rows(slice(0, 3))[:, 0].tolist() == [0, 5, 0]
    store.move(1, 0)
    assert store.rows(slice(0, 3))[:, 0].tolist() == [5, 5, 0]
