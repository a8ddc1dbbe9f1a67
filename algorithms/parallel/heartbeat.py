"""Finds ranks that have died: a kernel that exchanges data with a dead rank never ends, and no collective reports it.

Every rank counts up in the store of the process group, in a thread. A rank that waits long for its device looks which
counts have stopped.
"""

import threading
import time
from typing import Any

import torch.distributed as dist

BEAT_S = 2.0
PATIENCE_S = 60.0
"""Time to wait for a step before the ranks' counts are checked. A step may take longer, such as one that compiles."""


class RankDiedError(RuntimeError):
    """A process that shares the target has died; names it."""


class Heartbeat:
    def __init__(self, store: Any, rank: int, world_size: int, beat_s: float = BEAT_S) -> None:
        self._store, self._rank, self._world_size, self._beat_s = store, rank, world_size, beat_s
        self._store.set(self._key(rank), "0")
        threading.Thread(target=self._beat, daemon=True).start()

    def _key(self, rank: int) -> str:
        return f"specdec/beat/{rank}"

    def _beat(self) -> None:
        while True:
            time.sleep(self._beat_s)
            try:
                self._store.add(self._key(self._rank), 1)
            except RuntimeError:  # the store has closed: the run is over
                return

    def dead(self) -> list[int]:
        """Ranks that do not count up for three beats, which this takes."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        before = [self._store.get(self._key(rank)) for rank in others]
        time.sleep(3 * self._beat_s)
        return [rank for rank, count in zip(others, before, strict=True) if self._store.get(self._key(rank)) == count]

    def wait(self, event: Any, patience_s: float = PATIENCE_S) -> None:
        """Wait for `event`, a CUDA event. Raises RankDiedError where a rank has died meanwhile."""
        deadline = time.monotonic() + patience_s
        while not event.query():
            if time.monotonic() > deadline:
                if dead := self.dead():
                    names = ", ".join(map(str, dead))
                    raise RankDiedError(
                        f"tensor parallelism: a step does not end, and no sign of life from rank {names}"
                    )
                deadline = time.monotonic() + patience_s


_own: Heartbeat | None = None


def start() -> None:
    """Begin to count for this rank, in an initialised process group; every rank calls this before its first step."""
    global _own
    store = dist.distributed_c10d._get_default_store()
    _own = Heartbeat(store, dist.get_rank(), dist.get_world_size())
    dist.barrier()


def wait_for(event: Any) -> None:
    """Wait for a CUDA event of this rank's device; where ranks count, not beyond the death of one."""
    if _own is None:
        event.synchronize()
    else:
        _own.wait(event)
