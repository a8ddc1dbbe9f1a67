"""A rank that has died is named by those that wait."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from algorithms.parallel import heartbeat
from algorithms.parallel.heartbeat import Heartbeat, RankDiedError


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
