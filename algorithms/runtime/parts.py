"""What every forward of a run works with."""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.runtime.adaptive import Sizing
from algorithms.runtime.algorithm import Algorithm, Observation, Resources
from algorithms.runtime.backlog import Backlog
from algorithms.runtime.batch import BatchState
from algorithms.runtime.cache import KVCache


@dataclass(frozen=True)
class StepParts:
    """The algorithm of a run, the target's cache, the state of the batch, and what the engine lends."""

    algorithm: Algorithm
    cache: KVCache
    state: BatchState
    resources: Resources
    sizing: Sizing | None = None
    """Who chooses the size of a step; None: every step has the algorithm's own."""
    backlog: Backlog | None = None
    """What plain steps keep for the drafter; there with `sizing`."""

    def observe(self, seen: Observation) -> None:
        """Show the drafter what was committed, and write it into the texts that it reads."""
        self.algorithm.observe(seen)
        for texts in self.resources.texts:
            texts.observe(seen)

    def move_row(self, source: int, target: int) -> None:
        """Move what is kept of the request of row `source` to row `target`, whose request has ended."""
        self.algorithm.move_row(source, target)
        for texts in self.resources.texts:
            texts.store.move_row(source, target)
        if self.backlog is not None:
            self.backlog.move(source, target)

    def forget(self) -> None:
        """Drop what former requests taught about text."""
        self.algorithm.forget()
        for texts in self.resources.texts:
            texts.store.clear()
