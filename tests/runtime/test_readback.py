"""Tables of steps on their way to the host, and what is read from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from algorithms.runtime.readback import Readback, RowResult, StepResult

CPU = torch.device("cpu")


def bits(*values: float) -> list[int]:
    return np.array(values, np.float32).view(np.int32).astype(np.int64).tolist()


def test_a_row_is_read_up_to_its_bonus_token() -> None:
    """Two of three places are emitted; the likeliest tokens stand behind the figures, place by place."""
    likeliest = [11, 12, 13, 14, -1, -1, *bits(-0.5, -1.5, -0.25, -2.5, 0.0, 0.0)]
    rows = [
        [7, 8, -1, *bits(-0.5, -0.25, 0.0), 1, 1, 2, 0, *likeliest],
        [9, -1, -1, *bits(-4.0, 0.0, 0.0), 0, 0, 1, 1, *likeliest],
    ]
    result = StepResult.of_table(np.array(rows), num_top=2)
    top = [[(11, -0.5), (12, -1.5)], [(13, -0.25), (14, -2.5)]]
    assert result.of(0) == RowResult([7, 8], [-0.5, -0.25], True, 2, False, top)
    assert result.of(1) == RowResult([9], [-4.0], False, 1, True, top[:1])
    assert result.of(0).without_bonus() == RowResult([7], [-0.5], True, 2, False, top[:1])


def test_without_the_likeliest_tokens_a_table_ends_with_the_figures() -> None:
    result = StepResult.of_table(np.array([[7, 8, *bits(-0.5, -0.25), 1, 1, 1, 0]]))
    assert result.of(0) == RowResult([7, 8], [-0.5, -0.25], True, 1, False, [])


@pytest.mark.parametrize("behind", [0, 1, 2])
@pytest.mark.parametrize("num_top", [0, 3])
def test_results_come_in_order_and_as_late_as_asked(behind: int, num_top: int) -> None:
    """Every result has a buffer of its own while it is in flight, and so has the choice that came with it."""
    depth, rows, steps = 2, 3, 8
    readback: Readback[int] = Readback(behind, rows, depth, CPU, num_top)
    width = 2 * (depth + 1) * (1 + num_top) + 4
    read: list[tuple[int, int, tuple[int, int] | None]] = []
    table, choice = torch.empty(rows, width, dtype=torch.int64), torch.empty(2, dtype=torch.int32)

    def take(all_of_them: bool = False) -> None:
        for result, tag in readback.due(all_of_them):
            read.append((tag, result.tokens[-1][0], readback.choice))

    for step in range(steps):
        readback.push(table.fill_(step), step, choice.fill_(step))
        assert [tag for _, tag in readback.in_flight()] == list(range(max(0, step - behind), step + 1))
        take()
        assert readback.num_pending == min(behind, step + 1) and len(read) == max(0, step + 1 - behind)
    take(all_of_them=True)
    assert read == [(step, step, (step, step)) for step in range(steps)] and readback.num_pending == 0


def test_a_choice_stays_until_the_next_one_is_read() -> None:
    readback: Readback[None] = Readback(0, 1, 1, CPU)
    table, seen = torch.zeros(1, 8, dtype=torch.int64), []
    for choice in (None, torch.tensor([3, 4], dtype=torch.int32), None):
        readback.push(table, None, choice)
        assert len(list(readback.due())) == 1
        seen.append(readback.choice)
    assert seen == [None, (3, 4), (3, 4)]


def test_what_is_dropped_is_not_read() -> None:
    readback: Readback[int] = Readback(1, 1, 0, CPU)
    readback.push(torch.zeros(1, 6, dtype=torch.int64), 0)
    readback.drop()
    assert readback.num_pending == 0 and list(readback.due(all_of_them=True)) == []
