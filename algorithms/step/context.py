"""The objects that every step of a run shares, and what steps without a draft keep for the drafter."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algorithms.algorithm import Algorithm, Batch, Observation, Resources
from algorithms.attention.memory import Memory
from algorithms.models.experts.module import ExpertLedger
from algorithms.step.adaptive import Sizing
from algorithms.step.batch import BatchState

COLUMNS = 32  # steps without a draft between two observations, at most


class DeferredObservation:
    """Results of the target in steps without a draft, in up to `COLUMNS` columns per slot. Before a draft, and when the
    columns are full, the drafter observes all of them in one pass."""

    def __init__(self, num_features: int, resources: Resources) -> None:
        """`num_features` is the number of the algorithm's target layers."""
        self._width = resources.target.config.hidden_size
        shape = (resources.max_batch, COLUMNS, (1 + num_features) * self._width)
        self._kept = torch.zeros(shape, dtype=resources.dtype, device=resources.device)
        self._counts = torch.zeros(resources.max_batch, dtype=torch.int64, device=resources.device)
        self._columns = torch.arange(COLUMNS, device=resources.device)

    def keep(self, batch: Batch, hidden: Tensor, features: list[Tensor]) -> None:
        """Append the one token of each active slot; [B, 1, hidden] each."""
        counts, joined = self._counts[batch.slots], torch.cat([hidden, *features], -1)
        self._kept[batch.slots].scatter_(1, counts[:, None, None].expand(joined.shape), joined)
        counts += batch.active

    def take(self, batch: Batch) -> Observation:
        """All that is kept of the slots of `batch`; nothing is kept afterwards."""
        counts = self._counts[batch.slots].clone()
        self._counts[batch.slots].zero_()
        start = batch.lengths - counts
        positions = (start[:, None] + self._columns).clamp(max=batch.history.shape[1] - 2)
        hidden, *features = (part.contiguous() for part in self._kept[batch.slots].split(self._width, -1))
        return Observation(
            batch=replace(batch, lengths=start),
            tokens=batch.history.gather(1, positions),
            next_tokens=batch.history.gather(1, positions + 1),
            features=features,
            hidden=hidden,
            positions=positions,
            counts=counts.int(),
            drafts_stale=True,
        )

    def move(self, source: int, target: int) -> None:
        for tensor in (self._kept, self._counts):
            tensor[target] = tensor[source]

    def clear(self, slots: int | slice) -> None:
        self._counts[slots].zero_()


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

    @property
    def longest(self) -> int:
        """What the page table of a request can hold: the bound for replays, which serve requests of any length."""
        return self.state.page_table.shape[1] * self.resources.page_size

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
        self.algorithm.reset()
        for texts in self.resources.histories:
            texts.store.clear()
