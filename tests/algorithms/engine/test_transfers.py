"""What the host tells the device arrives, whole and unmixed; tables of steps on their way to the host, and what is
read."""

import numpy as np
import pytest
import torch

from algorithms.engine.request import Draft, SlotResult
from algorithms.engine.transfers import NUM_BUFFERS, Readback, Staging, StepResult

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
    result = StepResult.of_table(np.array(rows), {"top": 12})
    top = [[(11, -0.5), (12, -1.5)], [(13, -0.25), (14, -2.5)]]
    assert result.of(0) == SlotResult([7, 8], [-0.5, -0.25], True, 2, False, top)
    assert result.of(1) == SlotResult([9], [-4.0], False, 1, True, top[:1])
    assert result.of(0).without_bonus() == SlotResult([7], [-0.5], True, 2, False, top[:1])


def test_evidence_comes_last() -> None:
    """Accepted nodes, and path probabilities where the drafter gives them."""
    table = [7, 8, *bits(-0.5, -0.25), 1, 1, 1, 0]
    nodes, probs = [0, 2], bits(1.0, 0.5, 0.25)
    both = StepResult.of_table(np.array([[*table, *nodes, *probs]]), {"path": 2, "path_probs": 3})
    assert both.path is not None and both.path_probs is not None and both.of(0).tokens == [7, 8]
    assert (both.path.tolist(), both.path_probs.tolist()) == ([nodes], [[1.0, 0.5, 0.25]])
    alone = StepResult.of_table(np.array([[*table, *nodes]]), {"path": 2})
    assert alone.path is not None and alone.path.tolist() == [nodes] and alone.path_probs is None


def test_drafts_come_with_their_place_in_the_tree() -> None:
    """Node 3 is not in the tree; the accepted path is nodes 2 and 4, whose tokens other nodes have too."""
    table = [8, 7, 5, *bits(0.0, 0.0, 0.0), 2, 1, 4, 1]
    nodes = [
        [1, 7, 8, 0, 7, 8], [-1, 0, 0, -1, 2, 2], bits(0, -1, -2, 0, -3, float("-inf")), bits(1, 0.5, 0.5, 0, -1, 0),
    ]  # fmt: skip
    result = StepResult.of_table(np.array([[*table, *(entry for row in nodes for entry in row)]]), {"drafts": 24})
    assert result.drafts_of(0) == [
        Draft(7, -1, False, -1.0, 0.5),
        Draft(8, -1, True, -2.0, 0.5),
        Draft(7, 1, True, -3.0, None),
        Draft(8, 1, False, None, 0.0),
    ]
    assert result.of(0).tokens == [8, 7, 5]


@pytest.mark.parametrize("behind", [0, 1, 2])
@pytest.mark.parametrize("num_top", [0, 3])
def test_results_come_in_order_and_as_late_as_asked(behind: int, num_top: int) -> None:
    """Every result has a buffer of its own while it is in flight."""
    depth, rows, steps = 2, 3, 8
    width = 2 * (depth + 1) * (1 + num_top) + 4
    readback: Readback[int] = Readback(behind, rows * width, CPU)
    widths = {"top": 2 * (depth + 1) * num_top} if num_top else {}
    read: list[tuple[int, int]] = []
    table = torch.empty(rows, width, dtype=torch.int64)
    for step in range(steps):
        readback.push(table.fill_(step), widths, step)
        assert [tag for _, tag in readback.in_flight()] == list(range(max(0, step - behind), step + 1))
        read += [(tag, result.tokens[-1][0]) for result, tag in readback.due()]
        assert readback.num_pending == min(behind, step + 1) and len(read) == max(0, step + 1 - behind)
    read += [(tag, result.tokens[-1][0]) for result, tag in readback.due(all_of_them=True)]
    assert read == [(step, step) for step in range(steps)] and readback.num_pending == 0


def test_what_is_dropped_is_not_read() -> None:
    readback: Readback[int] = Readback(1, 6, CPU)
    readback.push(torch.zeros(1, 6, dtype=torch.int64), {}, 0)
    readback.drop()
    assert readback.num_pending == 0 and list(readback.due(all_of_them=True)) == []


def test_what_is_staged_arrives() -> None:
    """Fields of any dtype and shape, side by side; a buffer that is on its way is not the one that is written."""
    fields = {"a": ((3,), torch.int32), "none": ((0, 4), torch.int64), "b": ((2, 5), torch.int64)}
    staging = Staging(fields, torch.device("cpu"))
    written = []
    for turn in range(NUM_BUFFERS + 1):
        arrays = staging.arrays()
        written.append(arrays["a"])
        arrays["a"][:], arrays["b"][:] = turn, np.arange(10).reshape(2, 5) - turn
        staging.send()
        assert staging.tensors["a"].tolist() == [turn] * 3
        assert torch.equal(staging.tensors["b"], torch.arange(10).view(2, 5) - turn)
    assert len({id(array) for array in written}) == NUM_BUFFERS
    for name, (shape, dtype) in fields.items():
        tensor = staging.tensors[name]
        assert (tensor.shape, tensor.dtype) == (shape, dtype) and tensor.storage_offset() * dtype.itemsize % 128 == 0
