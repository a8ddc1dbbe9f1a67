"""From what is accepted at each position to the steps of the engine, and the figures of these steps.

A step that begins where `i` of `n` tokens are committed, and accepts `a` drafts there, produces a + 1 of them. The next
one begins at i + a + 1. The last step may reach past the end; its tokens count as far as they are recorded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.report.metrics import AcceptanceFigures
from experiments.report.summarize import acceptance_figures


@dataclass(frozen=True)
class Drafts:
    """The drafts of one drafter for one output of n tokens: entry i is of a step that begins where i are committed."""

    accepted: list[int]
    ran_out: list[bool]  # whether the accepted path ends where nothing is drafted, or where the output ends


@dataclass(frozen=True)
class Step:
    """One step: accepted drafts, whether nothing more was drafted, tokens produced."""

    accepted: int
    ran_out: bool
    tokens: int


def steps_of(choices: Sequence[Drafts]) -> list[Step]:
    """The fewest steps that produce one output, each by one of the drafters `choices`. Dynamic programming from the end
    of the output; of equally short choices the one that accepts more, then the first."""
    length = len(choices[0].accepted)
    total, taken = [0] * (length + 1), list[Drafts]()
    for start in reversed(range(length)):

        def rank(drafts: Drafts, start: int = start) -> tuple[int, int]:
            accepted = drafts.accepted[start]
            return 1 + total[min(length, start + accepted + 1)], -accepted

        taken.insert(0, min(choices, key=rank))
        total[start] = rank(taken[0])[0]
    steps, start = [], 0
    while start < length:
        accepted = taken[start].accepted[start]
        steps.append(Step(accepted, taken[start].ran_out[start], min(accepted + 1, length - start)))
        start += accepted + 1
    return steps


def all_steps(methods: Sequence[Sequence[Drafts]]) -> list[list[Step]]:
    """`steps_of` for every output; `methods` has the outputs of each drafter."""
    return [steps_of(choices) for choices in zip(*methods, strict=True)]


def perfect(num_tokens: int, depth: int) -> Drafts:
    """A chain of `depth` drafts that are always right."""
    return Drafts([min(depth, num_tokens - start) for start in range(num_tokens)], [True] * num_tokens)


def summary(outputs: Sequence[Sequence[Step]], max_depth: int) -> AcceptanceFigures:
    """The figures of the steps of all outputs. The interval of tokens per step takes outputs as independent, not
    steps: those of one output are alike."""
    ends = [(step.accepted, step.ran_out) for steps in outputs for step in steps]
    tokens = [sum(step.tokens for step in steps) for steps in outputs]
    return acceptance_figures(ends, tokens, [len(steps) for steps in outputs], sum(tokens), max_depth)
