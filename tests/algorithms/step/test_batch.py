"""Rows of the state: what enters them, how they move, and what padding holds."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algorithms.engine.transfers import Staging
from algorithms.step.batch import ACTIVE, BatchState, SlotStore, number_fields, write_numbers
from algorithms.step.sampling_params import SamplingParams

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
    write_numbers(arrays, 0, SAMPLED, length=row + 1, last=row + 2)
    arrays["words"][ACTIVE] = 1
    arrays["pages"].fill(row + 3)
    staging.send()
    state.enter(torch.tensor([row]), staging.tensors)
    state.write_text(torch.tensor([row]), torch.tensor([[0, 1]]), torch.tensor([[row + 4, 0]]), torch.tensor([1]))


def held(state: BatchState, row: int) -> tuple[int, ...]:
    """What a row of the running requests holds: active, length, last token, a page, the first of its text."""
    batch = state.batch(row, row + 1, CONTEXT)
    numbers = (batch.active, batch.lengths, batch.last_tokens, batch.page_table[:, 0], batch.history[:, 0])
    return tuple(int(number) for number in numbers)


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


def seen(values: torch.Tensor, counts: list[int], prompts: Any = None) -> Any:
    batch = SimpleNamespace(slots=slice(0, len(counts)))
    return SimpleNamespace(batch=batch, counts=torch.tensor(counts, dtype=torch.int32), prompts=prompts)


def test_a_row_store_keeps_the_last_observed() -> None:
    """Of prompts too, whose rows go up to the dummy slot; a prompt of which nothing is observed starts from zeros."""
    resources: Any = SimpleNamespace(max_batch=2, dtype=torch.float32, device=CPU, impl="reference")
    store, values = SlotStore(1, resources), torch.arange(1.0, 7.0).view(2, 3, 1)
    store.keep_last(seen(values, [2, 0]), values)
    assert store.read(slice(0, 3))[:, 0].tolist() == [2, 0, 0]
    store.keep_last(seen(values, [3, 1]), values)
    assert store.read(slice(0, 3))[:, 0].tolist() == [3, 4, 0]
    prompts = SimpleNamespace(
        slots=torch.tensor([0, 1, 2]), last=torch.tensor([0, 4, 0]), counts=torch.tensor([0, 2, 0])
    )
    store.keep_last(seen(values, [3, 3], prompts), values)
    assert store.read(slice(0, 3))[:, 0].tolist() == [0, 5, 0]
    store.move(1, 0)
    assert store.read(slice(0, 3))[:, 0].tolist() == [5, 5, 0]
