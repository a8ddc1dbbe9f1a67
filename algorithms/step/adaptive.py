"""Adaptive draft length (`runtime.adaptive`): the sizes of steps, what a step of each costs, and the choice.

    size 0         no draft: node 0 alone
    sizes 1 to S   2, 4, 8, ... nodes and the algorithm's own number

A step of each size is a CUDA graph of its own. The host reads the accepted drafts of every step, with which
`DraftLengthPolicy` estimates the tokens per time of each size; its choice is taken over every fourth step. `Pacing`
adds exploration: a step without a draft says nothing about drafts, and a small one little about larger ones, so now and
then a step has the next larger size. The next smaller size, whose cost is known by real steps alone, runs a few times
soon where it may be the better one, and then as often as the time that it is expected to lose allows.

Costs are timed on random tokens before the first request. What a step of a mixture of experts costs depends on the
experts that its tokens touch, so the times of real steps correct them: r_s, the fading mean of real over timed
milliseconds of size s, multiplies the timed cost. Between sizes with real steps r follows straight lines over s, from
r_0 = 1 on, or the r of the least size where that is larger. If r falls up to the largest size, it falls as much with
the next one; beyond it is constant.

An output does not depend on the sizes, because the target's argmax or sample decides at every node.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from algorithms.engine.transfers import StepResult
from algorithms.parallel.collectives import from_rank_0, parallel
from algorithms.step.draft_length import DraftLengthPolicy, prior_tokens

StepCosts = Callable[[int, int], float]
"""(slots, nodes) -> milliseconds of a step; 1 node is a step without a draft."""
NO_DRAFT = 0  # index of the size without a draft
EXPLORED_SLOTS = 4  # requests whose drafts are judged by one exploration after steps without a draft
EXPLORATION_SHARE = 0.0075  # bound on the time of exploration steps, as a share of all time
LEAST_PAUSE, LEAST_STEPS = 16, 2
"""Least number of steps without a draft, and of steps of one size, between two explorations."""
DECIDE_EVERY = 4  # steps between two choices
KNOWN_STEPS = 4  # real steps after which the cost of a size is about known
SMALLER_PAUSE = 8  # least number of steps between two of the size below the chosen one, once its cost is about known
FIRST_WEIGHT, LARGEST_WEIGHT = 2, 64
"""Steps of a size that its cost counts for before its first real step, and that its mean remembers."""
LARGEST_RATIO = 1.5  # of a step's time over its expected cost; more is the host's delay
SHARE_EVERY = 64  # steps between two times that the ranks of a target take over rank 0's costs


def step_sizes(num_nodes: int) -> tuple[int, ...]:
    """Nodes of a step of each size: 1, then powers of two up to `num_nodes`, which is the last."""
    powers = (1 << bit for bit in range(num_nodes.bit_length()))
    return tuple(sorted({*powers, num_nodes}))


class Pacing:
    """The size of the next step: the policy's choice, and an exploration now and then."""

    def __init__(self, nodes: Sequence[int]) -> None:
        """`nodes` of each size. Before the first choice, the size is taken that would be best if drafts were accepted
        as `prior_tokens` assumes."""
        self._prior_tokens = [prior_tokens(count) for count in nodes]
        self._largest = len(nodes) - 1
        self.fixed: int | None = None
        """A size that every step has, instead of the choice; None: none."""
        self.reset()

    def reset(self) -> None:
        """Start as with the first step."""
        self._choice: int | None = None
        self._drafting = self._largest
        self._num_plain, self._explorations, self._since_larger, self._since_smaller = 0, 0, 0, 0

    def update(self, choice: int | None, drafting: int) -> None:
        """Take over a choice, and the best size that drafts; None before there is one."""
        if choice is None:
            return
        self._choice, self._drafting = choice, drafting
        if choice != NO_DRAFT:
            self._num_plain, self._explorations = 0, 0

    def next(self, requests: int, step_ms: Sequence[float], smaller_pause: float = math.inf) -> int:
        """The size of the next step, over `requests` requests, where a step of each size takes `step_ms`.
        `smaller_pause`: steps between two of the size below the chosen one."""
        if self.fixed is not None:
            return self.fixed
        if self._choice is None:
            rates = [tokens / spent_ms for tokens, spent_ms in zip(self._prior_tokens, step_ms, strict=True)]
            return rates.index(max(rates[1:]), 1)
        if self._choice != NO_DRAFT:
            return self._beside(self._choice, step_ms, smaller_pause)
        explorations = math.ceil(EXPLORED_SLOTS / requests)
        extra = explorations * (step_ms[self._drafting] / step_ms[NO_DRAFT] - 1)
        if self._num_plain >= max(LEAST_PAUSE, extra / EXPLORATION_SHARE):
            self._num_plain, self._explorations = 0, explorations
        if self._explorations:
            self._explorations -= 1
            return self._drafting
        self._num_plain += 1
        return NO_DRAFT

    def _beside(self, choice: int, step_ms: Sequence[float], smaller_pause: float) -> int:
        """A size that drafts, or the next one to it: the larger shows what more drafts bring, the smaller what it
        costs."""
        self._since_larger += 1
        self._since_smaller += 1
        if choice < self._largest:
            extra = step_ms[choice + 1] / step_ms[choice] - 1
            if self._since_larger >= max(LEAST_STEPS, extra / EXPLORATION_SHARE):
                self._since_larger = 0
                return choice + 1
        if self._since_smaller >= smaller_pause:
            self._since_smaller = 0
            return choice - 1
        return choice


class RealCosts:
    """What steps of one batch size cost, by size: timed ones, corrected by the times of real steps."""

    def __init__(self, timed_ms: Sequence[float]) -> None:
        self.timed_ms = timed_ms
        self.reset()

    def reset(self) -> None:
        """Forget the real steps."""
        self._ratios: dict[int, float] = {}
        self._weights: dict[int, int] = {}

    def of_sizes(self) -> list[float]:
        """Milliseconds of a step of each size."""
        return [ms * self._ratio(size) for size, ms in enumerate(self.timed_ms)]

    def num_steps(self) -> list[int]:
        """Real steps of each size, of which no more are counted than the mean remembers."""
        return [self._weights.get(size, FIRST_WEIGHT) - FIRST_WEIGHT for size in range(len(self.timed_ms))]

    def update(self, size: int, spent_ms: float) -> None:
        """Take in a step."""
        before = self._ratio(size)
        weight = min(self._weights.get(size, FIRST_WEIGHT) + 1, LARGEST_WEIGHT)
        ratio = min(spent_ms / self.timed_ms[size], LARGEST_RATIO * before)
        self._ratios[size] = before + (ratio - before) / weight
        self._weights[size] = weight

    def _ratio(self, size: int) -> float:
        """Real over timed milliseconds of a step of `size`."""
        if not self._ratios:
            return 1.0
        largest = max(self._ratios)
        ratio = self._ratios[largest]
        line = {NO_DRAFT: max(1.0, self._ratios[min(self._ratios)])} | self._ratios
        if largest != NO_DRAFT:
            # Half of it at least, because the fall from one or two sizes is uncertain.
            line[largest + 1] = min(ratio, max(ratio / 2, ratio - (1 - ratio) / largest))
        sizes = sorted(line)
        return float(np.interp(size, sizes, [line[each] for each in sizes]))


class Sizing:
    """The sizes of the steps of one engine, and the choice between them."""

    def __init__(self, num_nodes: int, batches: tuple[int, ...], device: torch.device | str = "cpu") -> None:
        """For the trees of an algorithm. `batches` are the batch sizes, rising to the largest, whose steps have a
        cost. Ranks share costs through `device`."""
        self.nodes = step_sizes(num_nodes)
        self._batches = batches
        self._device = device
        self.costs_ms: dict[int, list[float]] = {}
        """By batch size, of a step of each size; empty where the cost of steps is not known yet."""
        self._real: dict[int, RealCosts] = {}
        self.policy, self.pacing = DraftLengthPolicy(self.nodes), Pacing(self.nodes)
        self.num_steps: Counter[int] = Counter()
        """Steps of each number of nodes."""

    def set_costs(self, costs: StepCosts) -> None:
        """Set what steps cost."""
        self._real = {batch: RealCosts([costs(batch, nodes) for nodes in self.nodes]) for batch in self._batches}
        self._refresh()

    def next(self, requests: int) -> int:
        """Nodes of the next step, over `requests` requests; it is counted."""
        step_ms = self._step_ms(requests)
        size = self.pacing.next(requests, step_ms, self._smaller_pause(requests, step_ms))
        nodes = self.nodes[size]
        self.num_steps[nodes] += 1
        return nodes

    def _smaller_pause(self, requests: int, step_ms: Sequence[float]) -> float:
        """Steps between two of the size below the chosen one, infinite where its cost decides nothing. More nodes touch
        fewer new experts each, so it costs no less than the line between a plain step and one of the chosen size."""
        chosen = self.policy.choice or NO_DRAFT
        real = self._real[self._batch_of(requests)]
        steps = real.num_steps()
        if chosen == NO_DRAFT or not steps[chosen]:
            return math.inf
        plain, known, smaller = min(step_ms[NO_DRAFT], real.timed_ms[NO_DRAFT]), step_ms[chosen], step_ms[chosen - 1]
        line = plain + (known - plain) * (self.nodes[chosen - 1] - 1) / (self.nodes[chosen] - 1)
        needed = 1 + self.policy.gain(chosen)  # steps of it for the tokens of one
        if min(line, smaller) * needed >= known:
            return math.inf
        if steps[chosen - 1] < KNOWN_STEPS:
            return DECIDE_EVERY
        lost = smaller / known - 1 / needed  # of the time of a step of the chosen size, for the same tokens
        return max(SMALLER_PAUSE, lost / EXPLORATION_SHARE)

    def _batch_of(self, requests: int) -> int:
        return next(batch for batch in self._batches if batch >= requests)

    def _step_ms(self, requests: int) -> list[float]:
        return self.costs_ms[self._batch_of(requests)]

    def _refresh(self, batches: Iterable[int] | None = None) -> None:
        """Take over the costs of `batches`, by default all."""
        for batch in self._batches if batches is None else batches:
            self.costs_ms[batch] = self._real[batch].of_sizes()

    def _share(self) -> None:
        """Take over rank 0's costs, on all ranks: their clocks differ, and they must choose alike."""
        self._refresh()
        (costs,) = from_rank_0([torch.tensor([self.costs_ms[batch] for batch in self._batches], device=self._device)])
        self.costs_ms = dict(zip(self._batches, costs.tolist(), strict=True))

    def update(self, result: StepResult, number: int, nodes: int, spent_ms: float | None = None) -> None:
        """Take in the step of that `number`, from 1 on, over `nodes` nodes. `spent_ms` is its time, None where it says
        nothing about the cost of such a step."""
        if spent_ms is not None:
            batch = self._batch_of(len(result.figures))
            self._real[batch].update(self.nodes.index(nodes), spent_ms)
            if not parallel():
                self._refresh([batch])
        if parallel() and number % SHARE_EVERY == 0:
            self._share()
        if nodes > 1:
            accepted = [figures[0] for figures in result.figures]
            times = self._step_ms(len(accepted))
            self.policy.update(accepted, self.nodes.index(nodes), times, result.path, result.path_probs)
        if number % DECIDE_EVERY == 1:
            self.pacing.update(self.policy.choice, self.policy.drafting)

    def reset(self) -> None:
        """Drop the evidence of all steps. Their timed cost stays."""
        self.policy.reset()
        self.pacing.reset()
        for real in self._real.values():
            real.reset()
        self._refresh(self._real)

    def report(self) -> dict[str, Any]:
        """Steps by nodes so far, and the cost that the choice is made with."""
        costs = [
            {"batch": batch, "nodes": nodes, "step_ms": ms}
            for batch, times in self.costs_ms.items()
            for nodes, ms in zip(self.nodes, times, strict=True)
        ]
        return {"steps_by_nodes": {str(nodes): self.num_steps[nodes] for nodes in self.nodes}, "costs": costs}
