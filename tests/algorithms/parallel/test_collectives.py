"""Which sums go through the memory that devices share, and which through the process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algorithms.parallel import collectives
from algorithms.parallel.collectives import exchange_of, sum_over_ranks


class OnAGpu:
    """Stands for a tensor of `count` numbers on a GPU."""

    is_cuda, device = True, "cuda:1"

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.count, self.dtype, self.shape = count, dtype, (count,)

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return self.dtype.itemsize

    def contiguous(self) -> OnAGpu:
        return self


@pytest.mark.parametrize(
    ("count", "dtype", "shared", "one_shot"),
    [
        (8, torch.bfloat16, True, True),
        (4, torch.float32, True, True),
        (9, torch.bfloat16, True, False),  # 18 bytes
        (8, torch.float16, True, False),
        (0, torch.float32, True, False),
        (1 << 18, torch.float32, True, True),
        ((1 << 18) + 4, torch.float32, True, False),
        (8, torch.bfloat16, False, False),
    ],
)
def test_small_aligned_sums_are_read_from_the_memory_of_others(
    monkeypatch: pytest.MonkeyPatch, count: int, dtype: torch.dtype, shared: bool, one_shot: bool
) -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    reduced: list[Any] = []
    monkeypatch.setattr(collectives, "_shared_memory", lambda device: memory if shared and device == "cuda:1" else None)
    monkeypatch.setattr(collectives.dist, "all_reduce", reduced.append)
    monkeypatch.setattr(collectives.dist, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name="all")))
    ops = SimpleNamespace(one_shot_all_reduce_copy=lambda *given: given)
    monkeypatch.setattr(collectives.torch, "ops", SimpleNamespace(symm_mem=ops))
    x: Any = OnAGpu(count, dtype)
    found: Any = sum_over_ranks(x)
    if one_shot:
        place, *others = found
        assert place.shape == (count,) and place.dtype == dtype and place.data_ptr() == memory.data_ptr()
        assert others == [x, "sum", "all"] and not reduced
    else:
        assert found is x and reduced == [x]


@pytest.mark.parametrize(
    ("rows", "on_gpu", "width", "asked"),
    [(1, True, None, 8), (64, True, None, 8), (64, True, 2, 2), (65, True, None, None), (3, False, None, None)],
)
def test_few_rows_are_exchanged_inside_a_kernel(
    monkeypatch: pytest.MonkeyPatch, rows: int, on_gpu: bool, width: int | None, asked: int | None
) -> None:
    monkeypatch.setattr(collectives, "_exchange", lambda device, width: (device, width))
    x: Any = SimpleNamespace(is_cuda=on_gpu, device="cuda:1", shape=(rows, 8), numel=lambda: 8 * rows)
    assert exchange_of(x, width) == (None if asked is None else ("cuda:1", asked))
    x.numel = lambda: 0
    assert exchange_of(x, width) is None
