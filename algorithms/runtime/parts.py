"""What every forward of a run works with."""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.runtime.adaptive import Sizing
from algorithms.runtime.algorithm import Algorithm, Resources
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
