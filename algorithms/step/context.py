"""The objects that every step of a run shares."""

from dataclasses import dataclass

from algorithms.algorithm import Algorithm, Observation, Resources
from algorithms.attention.memory import Memory
from algorithms.models.experts.ledger import ExpertLedger
from algorithms.step.adaptive import Sizing
from algorithms.step.batch import BatchState
from algorithms.step.deferred_observation import DeferredObservation


@dataclass(frozen=True)
class StepParts:
    """The algorithm of a run, what the target keeps of texts, the state of the batch, and what the engine lends."""

    algorithm: Algorithm
    memory: Memory
    state: BatchState
    resources: Resources
    sizing: Sizing | None = None  # the choice of the size of a step; None: every step has the algorithm's own
    backlog: DeferredObservation | None = None  # observations of steps without a draft; present with `sizing`
    experts: ExpertLedger | None = None  # counts of touched experts, of a target that has any

    def observe(self, seen: Observation) -> None:
        """Show the drafter what was committed, and write it into the texts that it reads."""
        self.algorithm.observe(seen)
        for texts in self.resources.histories:
            texts.observe(seen)

    def move_slot(self, source: int, target: int) -> None:
        """Move what is kept of the request of slot `source` to slot `target`, whose request has ended."""
        self.memory.move_slot(source, target)
        self.algorithm.move_slot(source, target)
        for texts in self.resources.histories:
            texts.store.move_slot(source, target)
        if self.backlog is not None:
            self.backlog.move(source, target)

    def reset(self) -> None:
        """Drop what former requests taught about text."""
        self.algorithm.reset()
        for texts in self.resources.histories:
            texts.store.clear()
