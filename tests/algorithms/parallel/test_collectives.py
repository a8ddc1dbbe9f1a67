"""Which sums go through the memory that devices share, and which through the process group;
a rank that has died is named."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from algorithms.parallel import collectives, heartbeat
from algorithms.parallel.collectives import exchange_of, sum_over_ranks
from algorithms.parallel.heartbeat import Heartbeat, RankDiedError


class OnAGpu(torch.Tensor):
    """Stands for a tensor on a GPU."""

    is_cuda, device = True, "cuda:1"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("count", "dtype", "shared", "in_memory"),
    [
        (8, torch.bfloat16, True, True),
        (4, torch.float32, True, True),
        (9, torch.bfloat16, True, False),  # 18 bytes
        (8, torch.float16, True, False),
        (0, torch.float32, True, False),
        (1 << 23, torch.float32, True, True),
        ((1 << 23) + 4, torch.float32, True, False),
        (8, torch.bfloat16, False, False),
    ],
)
def test_aligned_sums_go_through_the_memory_of_all(
    monkeypatch: pytest.MonkeyPatch, count: int, dtype: torch.dtype, shared: bool, in_memory: bool
) -> None:
    memory = torch.zeros(1 << 25, dtype=torch.uint8)
    reduced: list[Any] = []
    monkeypatch.setattr(collectives, "_shared_memory", lambda device: memory if shared and device == "cuda:1" else None)
    monkeypatch.setattr(collectives.dist, "all_reduce", reduced.append)
    monkeypatch.setattr(collectives.dist, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name="all")))
    x = torch.arange(count).to(dtype).as_subclass(OnAGpu)

    def two_shot(place: torch.Tensor, *how: str) -> torch.Tensor:
        assert place.data_ptr() == memory.data_ptr() and torch.equal(place, torch.arange(count).to(dtype))
        assert how == ("sum", "all")
        return place.add_(1)

    ops = SimpleNamespace(two_shot_all_reduce_=two_shot)
    monkeypatch.setattr(collectives.torch, "ops", SimpleNamespace(symm_mem=ops))
    found = sum_over_ranks(x)
    if in_memory:
        assert not reduced and found.dtype == dtype and torch.equal(found, (torch.arange(count).to(dtype) + 1))
    else:
        assert found is x and len(reduced) == 1 and reduced[0] is x


@pytest.mark.parametrize(
    ("rows", "on_gpu", "width", "asked"),
    [
        (1, True, None, (128, 8)), (128, True, None, (128, 8)), (129, True, None, None), (129, True, 2, (2048, 2)),
        (2049, True, 2, None), (3, False, None, None),
    ],
)  # fmt: skip
def test_few_rows_are_exchanged_inside_a_kernel(
    monkeypatch: pytest.MonkeyPatch, rows: int, on_gpu: bool, width: int | None, asked: tuple[int, int] | None
) -> None:
    monkeypatch.setattr(collectives, "_exchange", lambda device, *sizes: (device, *sizes))
    x: Any = SimpleNamespace(is_cuda=on_gpu, device="cuda:1", shape=(rows, 8), numel=lambda: 8 * rows)
    assert exchange_of(x, width) == (None if asked is None else ("cuda:1", *asked))
    x.numel = lambda: 0
    assert exchange_of(x, width) is None


def event(ends_after: int) -> Any:
    left = [ends_after]

    def query() -> bool:
        left[0] -= 1
        return left[0] < 0

    return SimpleNamespace(query=query, synchronize=lambda: None)


def test_a_dead_rank_is_named_and_a_slow_one_is_waited_for() -> None:
    store = dist.HashStore()
    ranks = [Heartbeat(store, rank, 3, beat_s=0.02) for rank in (0, 1)]
    store.set(ranks[0]._key(2), "7")  # its process has died
    assert ranks[0].dead() == [2]
    with pytest.raises(RankDiedError, match="no sign of life from rank 2"):
        ranks[0].wait(event(10**9), patience_s=0.01)
    Heartbeat(store, 2, 3, beat_s=0.02)
    assert ranks[1].dead() == []
    ranks[1].wait(event(5), patience_s=1e-6)


def test_one_process_waits_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(heartbeat, "_own", None)
    heartbeat.wait_for(SimpleNamespace(query=None, synchronize=lambda: waited.append("whole")))
    assert waited == ["whole"]
