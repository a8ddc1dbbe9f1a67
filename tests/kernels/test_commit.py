"""A worked commit: the state of each request after a step."""

import torch

from specdec_kernels import commit_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ints(values: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def test_a_step_by_hand(impl: str) -> None:
    # Two chains of three nodes: the first request accepts one draft of two, the second is a padding slot.
    lengths, last_tokens = ints([2, 3]), ints([12, 23])
    history = ints([[10, 11, 12, 0, 0, 0], [20, 21, 22, 23, 0, 0]])
    committed = commit_step(
        ints([[12, 13, 14], [23, 24, 25]]), ints([[1, 2, -1], [1, 2, -1]], torch.int32),
        ints([[-1, -1, -1], [-1, -1, -1]], torch.int32), ints([[13, 19, -1], [24, 25, 26]]), ints([1, 2], torch.int32),
        ints([[0, 1, -1], [0, 1, 2]], torch.int32), torch.tensor([True, True], device=DEVICE), None,
        active=ints([1, 0], torch.int32), lengths=lengths, last_tokens=last_tokens, history=history, impl=impl,
    )  # fmt: skip
    assert lengths.tolist() == [4, 3]
    assert last_tokens.tolist() == [19, 23]
    assert history.tolist() == [[10, 11, 12, 13, 19, 0], [20, 21, 22, 23, 0, 0]]
    assert committed.start.tolist() == [2, 3]
    assert committed.counts.tolist() == [2, 0]
    assert committed.tokens[0, :2].tolist() == [12, 13]
    assert committed.next_tokens[0, :2].tolist() == [13, 19]
    assert committed.nodes.tolist() == [[0, 1, -1], [-1, -1, -1]]
