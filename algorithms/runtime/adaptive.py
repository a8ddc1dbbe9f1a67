"""How many nodes each step verifies (`runtime.adaptive`): sizes, what a step of each costs, and who decides.

    size 0         a plain step: node 0 alone, and no draft
    sizes 1 to S   2, 4, 8, ... nodes and the algorithm's own number

A step of each size is a graph of its own. At the end of every step the device learns what the step says about each
size, and chooses the one with the most tokens per time, see `specdec_kernels.choose_size`. The host reads the choice
with the tokens of every fourth step, so it follows by a few steps and nothing waits for it. `Pacing` adds what the
device cannot learn by itself: a plain step says nothing about drafts, and a small one little about larger ones, so now
and then a step of another size is tried.

The text does not depend on the sizes: the target's own choice decides at every node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree, Resources
from specdec_kernels import Accepted, SizeState, choose_size, prior_tokens

PLAIN = 0
"""Index of the size without a draft."""
TRIED_ROWS = 4
"""Rows whose drafts are judged when drafting is tried again."""
TRIAL_SHARE = 0.0075
"""Time that trials of other sizes may cost, as a share of all time."""
LEAST_PAUSE, LEAST_STEPS = 16, 2
"""Plain steps, and steps of one size, between two trials at least."""
READ_EVERY = 4
"""The choice is read with every fourth step, because the copy takes as long as a small kernel."""


def step_sizes(num_nodes: int) -> tuple[int, ...]:
    """Nodes of a step, from the plain one on: 1, then powers of two up to `num_nodes`, which is the last."""
    powers = (1 << bit for bit in range(num_nodes.bit_length()))
    return tuple(sorted({*powers, num_nodes}))


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a step by (rows, nodes); 1 node is a plain step."""

    step_ms: Mapping[tuple[int, int], float]

    def of(self, rows: int, nodes: int) -> float:
        """The time of a step, between measured numbers of rows and of nodes by straight lines; beyond them, that of the
        nearest. Raises ValueError where no time of a plain step, or of one that drafts, is known."""
        known = [(r, n) for r, n in self.step_ms if (n == 1) == (nodes == 1)]
        if not known:
            kind = "without a draft" if nodes == 1 else "with a draft"
            raise ValueError(f"runtime.adaptive_cost: expected the time of a step {kind}, found none")
        by_rows = {}
        for measured in sorted({r for r, _ in known}):
            here = {n: self.step_ms[measured, n] for r, n in known if r == measured}
            by_rows[measured] = _between(here, nodes)
        return _between(by_rows, rows)


def _between(values: Mapping[int, float], place: int) -> float:
    """The value at `place` on straight lines through `values`, constant beyond the ends."""
    keys = sorted(values)
    return float(np.interp(place, keys, [values[key] for key in keys]))


class Pacing:
    """Which size the next step takes: the device's choice, and a trial now and then."""

    def __init__(self, nodes: Sequence[int]) -> None:
        """Of steps of so many `nodes`, the first without a draft. Before the device has chosen, the size is taken that
        would be best to draft with if drafts were likely to be accepted."""
        self._prior_tokens = [prior_tokens(count) for count in nodes]
        self._largest = len(nodes) - 1
        self.held: int | None = None
        """A size that every step takes, whatever is chosen; None: none."""
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._choice: int | None = None
        self._drafting = self._largest
        self._num_plain, self._trials, self._since_larger = 0, 0, 0

    def told(self, choice: int, drafting: int) -> None:
        """The device's latest choice, and its choice among the sizes that draft; below 0 if there is none yet."""
        if choice < 0:
            return
        self._choice, self._drafting = choice, drafting
        if choice != PLAIN:
            self._num_plain, self._trials = 0, 0

    def next(self, rows: int, step_ms: Sequence[float]) -> int:
        """The size of the next step, of `rows` requests, where a step of each size takes `step_ms`."""
        if self.held is not None:
            return self.held
        if self._choice is None:
            rates = [tokens / spent_ms for tokens, spent_ms in zip(self._prior_tokens, step_ms, strict=True)]
            return rates.index(max(rates[1:]), 1)
        if self._choice != PLAIN:
            self._since_larger += 1
            if self._choice < self._largest and self._since_larger >= _steps_between(self._choice, step_ms):
                self._since_larger = 0
                return self._choice + 1
            return self._choice
        trials = math.ceil(TRIED_ROWS / rows)
        extra = trials * (step_ms[self._drafting] / step_ms[PLAIN] - 1)
        if self._num_plain >= max(LEAST_PAUSE, extra / TRIAL_SHARE):
            self._num_plain, self._trials = 0, trials
        if self._trials:
            self._trials -= 1
            return self._drafting
        self._num_plain += 1
        return PLAIN


def _steps_between(choice: int, step_ms: Sequence[float]) -> float:
    """Steps of the chosen size after which one of the next larger size is taken."""
    extra = step_ms[choice + 1] / step_ms[choice] - 1
    return max(LEAST_STEPS, extra / TRIAL_SHARE)


class Sizing:
    """Sizes of the steps of one engine, and the state that decides between them."""

    def __init__(self, algorithm: Algorithm, resources: Resources, batches: tuple[int, ...]) -> None:
        """`batches` are the numbers of rows, rising to the largest, of which the cost of a step is told."""
        self.nodes = step_sizes(algorithm.num_nodes)
        self._state = SizeState.create(self.nodes[1:], resources.device)
        self._impl, self._batches = resources.impl, batches
        self._costs = {rows: torch.ones(len(self.nodes), device=resources.device) for rows in batches}
        self._costs_ms: dict[tuple[int, int], float] = {}
        self.pacing = Pacing(self.nodes)
        self.num_steps: Counter[int] = Counter()
        """Steps of each number of nodes."""

    @property
    def has_costs(self) -> bool:
        """Whether the cost of steps is known."""
        return bool(self._costs_ms)

    @property
    def choice(self) -> Tensor | None:
        """[2] int32 on the device, see `SizeState.choice`; None where it is not to be read with this step."""
        return self._state.choice if self.num_steps.total() % READ_EVERY == 1 else None

    def set_costs(self, costs: StepCosts) -> None:
        """What steps cost; in place, because steps may be captured."""
        for rows in self._batches:
            known = {nodes: costs.of(rows, nodes) for nodes in self.nodes}
            self._costs_ms |= {(rows, nodes): spent_ms for nodes, spent_ms in known.items()}
            self._costs[rows].copy_(torch.tensor(list(known.values()), dtype=torch.float32))

    def next(self, num_rows: int) -> int:
        """Nodes of the next step, over `num_rows` requests; it is counted."""
        rows = self._batch_of(num_rows)
        nodes = self.nodes[self.pacing.next(num_rows, [self._costs_ms[rows, nodes] for nodes in self.nodes])]
        self.num_steps[nodes] += 1
        return nodes

    def _batch_of(self, num_rows: int) -> int:
        """The batch whose cost is known that holds so many rows."""
        return next(rows for rows in self._batches if rows >= num_rows)

    def learn(self, batch: Batch, tree: DraftTree, accepted: Accepted, nodes: int) -> None:
        """Take in a step of so many nodes, which may be captured; the choice follows."""
        choose_size(
            self._state,
            tree.confidence,
            accepted.nodes,
            accepted.num_accepted,
            batch.active,
            self._costs[self._batch_of(len(batch.lengths))],
            self.nodes.index(nodes),
            nodes,
            impl=self._impl,
        )

    def forget(self) -> None:
        """Forget all steps, but not their cost."""
        self._state.clear()
        self.pacing.forget()

    def report(self) -> dict[str, Any]:
        """Steps by nodes so far, and the cost that the choice is made with."""
        costs = [{"batch": rows, "nodes": nodes, "step_ms": ms} for (rows, nodes), ms in self._costs_ms.items()]
        return {"steps_by_nodes": {str(nodes): self.num_steps[nodes] for nodes in self.nodes}, "costs": costs}
