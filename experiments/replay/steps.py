"""From what is accepted at each position to the steps of the engine, and the figures of these steps.

A step that begins where `i` of `n` tokens are written, and accepts `a` drafts there, writes a + 1 of them. The next one
begins at i + a + 1. The last step may reach past the end; its tokens count as far as they are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any

from experiments.report import metrics, repeats


@dataclass(frozen=True)
class Drafts:
    """What one drafter drafts for one text of n tokens: entry i is of a step that begins where i are written."""

    accepted: list[int]
    ran_out: list[bool]
    """Whether the accepted path ends where nothing is drafted, or where the text ends."""

    def shortened(self, length: int) -> Drafts:
        """The same drafts, of which only the first `length` of each chain are verified."""
        pairs = zip(self.accepted, self.ran_out, strict=True)
        return Drafts([min(a, length) for a in self.accepted], [a >= length or out for a, out in pairs])


@dataclass(frozen=True)
class Step:
    """One step: the drafter that it takes, by number, what it accepts, whether nothing more was drafted, and the tokens
    that it writes."""

    choice: int
    accepted: int
    ran_out: bool
    tokens: int


def steps_of(choices: Sequence[Drafts], costs: Sequence[float]) -> list[Step]:
    """The cheapest steps that write one text, each by one of the drafters `choices`, of which a step costs `costs`.

    Dynamic programming from the end of the text; of equally cheap choices the one that accepts more, then the first.
    """
    length = len(choices[0].accepted)
    total, taken = [0.0] * (length + 1), [0] * length
    for start in reversed(range(length)):

        def rank(number: int, start: int = start) -> tuple[float, int]:
            accepted = choices[number].accepted[start]
            return costs[number] + total[min(length, start + accepted + 1)], -accepted

        taken[start] = min(range(len(choices)), key=rank)
        total[start] = rank(taken[start])[0]
    steps, start = [], 0
    while start < length:
        drafts = choices[taken[start]]
        accepted = drafts.accepted[start]
        tokens = min(accepted + 1, length - start)
        steps.append(Step(taken[start], accepted, drafts.ran_out[start], tokens))
        start += accepted + 1
    return steps


def union(parts: Sequence[Drafts]) -> Drafts:
    """The drafts of a tree that holds all the trees of `parts`: the longest accepted path is in one of them."""
    accepted, ran_out = [], []
    for start in range(len(parts[0].accepted)):
        most = max(part.accepted[start] for part in parts)
        accepted.append(most)
        # A part that accepts less has no node behind the accepted path.
        ran_out.append(all(part.ran_out[start] for part in parts if part.accepted[start] == most))
    return Drafts(accepted, ran_out)


def perfect(num_tokens: int, depth: int) -> Drafts:
    """A chain of `depth` drafts that are always right."""
    accepted = [min(depth, num_tokens - start) for start in range(num_tokens)]
    return Drafts(accepted, [True] * num_tokens)


def summary(texts: Sequence[Sequence[Step]], max_depth: int) -> dict[str, Any]:
    """The figures of the steps of all texts; intervals are of 95 %.

    Steps of one text are alike, so the interval of tokens per step takes texts as independent, and no steps. Those of
    the acceptance by position are Wilson's, which take the steps as independent.
    """
    steps = [step for text in texts for step in text]
    ends = [(step.accepted, step.ran_out) for step in steps]
    positions = metrics.acceptance_by_position(ends, max_depth)
    tokens = [sum(step.tokens for step in text) for text in texts]
    return {
        "num_requests": len(texts),
        "output_tokens": sum(tokens),
        "row_steps": len(steps),
        "tokens_per_step": metrics.ratio(sum(tokens), len(steps)),
        "tokens_per_step_interval": repeats.ratio_interval(tokens, [len(text) for text in texts]),
        "num_accepted_histogram": metrics.num_accepted_histogram([step.accepted for step in steps], max_depth),
        "acceptance": positions,
        "acceptance_at": metrics.conditional_acceptance(positions),
        "acceptance_at_interval": metrics.acceptance_intervals(positions),
    }


def engine_steps(num_steps: Sequence[int], batch: int, late: float = 0.0) -> float:
    """Steps of an engine that serves texts of so many steps each, up to `batch` at a time, first in, first out. Each
    keeps its row for `late` steps behind its end, until that is read."""
    ends = [0.0] * batch
    for steps in num_steps:
        heapreplace(ends, ends[0] + steps + late)
    return max(ends)


def all_steps(
    methods: Sequence[Sequence[Drafts]], cost_of: Callable[[int], float] = lambda number: 1.0
) -> list[list[Step]]:
    """`steps_of` for every text; `methods` has the texts of each drafter, and `cost_of(number)` is of one step."""
    costs = [cost_of(number) for number in range(len(methods))]
    return [steps_of(choices, costs) for choices in zip(*methods, strict=True)]
