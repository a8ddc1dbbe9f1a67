"""The policy of adaptive draft length: tokens per step of every size, estimated from the steps before.

A size is a number of nodes that a step verifies; size 0 is one node, no draft. Nodes rank by falling path probability,
among equals by number; nodes of a chain by number. The step over `sizes[s]` nodes that emitted t tokens for a request
would have emitted m_i of them with size i <= s: the accepted drafts of rank below `sizes[i]`, and the bonus token. A
smaller size emits the same t tokens in more steps:

    tree     1 + 0.9 (t / m_i - 1), but t / m_i without a draft: a tree after an unlikely token has better drafts
    chain    t / m_i; for a quarter of the steps the next whole number, because steps of all sizes often end at the same
             wrong draft

With u_i = sum of these steps over the R requests and w = 2^(-1 / h), h = 16 + 112 / R steps:

    smaller_i = w smaller_i + u_(i - 1)     own_i = w own_i + u_i             for sizes 1 to s
    tokens_i  = min(product of smaller_j / own_j for j = 1 to i, sizes[i])

Both sums are of the same steps, so their ratio varies little. About the sizes i > s a step says nothing, but their gain
smaller_i / own_i - 1 grows in proportion to the gain of size s (plus 0.05, so that gains near 0 do not differ many
times); both sums fade too while own_i exceeds 16. After the choice of no draft a step is an exploration: larger sizes
keep their ratio, and h is 16 / R. The sums begin with 4 steps of a chain whose drafts are accepted with
probability 0.85. The choice is the size of the largest tokens_i / step_ms_i. The last choice stays while the best size
promises less than 1 % more, or 2 % where it is larger.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

LEAST_HALF_LIFE, SLOT_HALF_LIFE = 16.0, 112.0
EXPLORED_HALF_LIFE = 16.0
LEAST_EVIDENCE = 16.0
CHAIN_WHOLE = 0.25
TREE_EXTRA = 0.9
PRIOR_STEPS, PRIOR_ACCEPTANCE = 4.0, 0.85
KEEP_SMALLER, KEEP_LARGER = 1.01, 1.02
LEAST_GAIN = 0.05


def prior_tokens(nodes: int) -> float:
    """Tokens per step of a size of `nodes` nodes, before there is evidence."""
    return (1 - PRIOR_ACCEPTANCE**nodes) / (1 - PRIOR_ACCEPTANCE)


class DraftLengthPolicy:
    """Chooses among `sizes`, nodes of a step, which rise from 1. Sums over sizes are lists, because numpy's calls cost
    more than so few numbers."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._bounds, self._numbers = np.array(sizes), np.arange(sizes[-1])
        self._chain_steps: dict[tuple[int, int], list[float]] = {}
        self.reset()

    def reset(self) -> None:
        """Drop all evidence."""
        tokens = [prior_tokens(nodes) for nodes in self.sizes]
        self.smaller = [PRIOR_STEPS * tokens[i + 1] / tokens[i] for i in range(len(tokens) - 1)]
        self.own = [PRIOR_STEPS] * len(self.smaller)
        self.choice: int | None = None
        """Index of the chosen size; None before any evidence."""
        self.drafting = len(self.smaller)
        """Index of the best size that drafts."""

    def gain(self, size: int) -> float:
        """How many times more tokens per step `size` emits than the size before, less 1."""
        return self.smaller[size - 1] / self.own[size - 1] - 1

    def update(
        self,
        num_accepted: Sequence[int],
        size: int,
        step_ms: Sequence[float],
        path: Array | None = None,
        path_probs: Array | None = None,
    ) -> None:
        """Take in a step of size `size`, and choose. Of each of R requests, `num_accepted` drafts were accepted: those
        of a chain, or the nodes of `path [R, D + 1]` after node 0, which rank by `path_probs [R, N]`. A step of size i
        takes `step_ms[i]`."""
        requests = len(num_accepted)
        if not requests:
            return
        if path is None:
            steps = self._steps_of_chains(num_accepted, size)
        else:
            steps = self._steps_of_trees(np.array(num_accepted), size, path, path_probs)
        explored = self.choice == 0
        half_life = EXPLORED_HALF_LIFE / requests if explored else LEAST_HALF_LIFE + SLOT_HALF_LIFE / requests
        keep = 2.0 ** (-1 / half_life)
        gained, smaller, own = self.gain(size), self.smaller, self.own
        for i in range(len(own)):
            if i < size or keep * own[i] > LEAST_EVIDENCE:
                smaller[i] *= keep
                own[i] *= keep
        for i in range(size):
            smaller[i] += steps[i]
            own[i] += steps[i + 1]
        if not explored:
            growth = (self.gain(size) + LEAST_GAIN) / (gained + LEAST_GAIN)
            for i in range(size, len(own)):
                smaller[i] = own[i] + (smaller[i] - own[i]) * growth
        self._choose(step_ms)

    def _steps_of_chains(self, num_accepted: Sequence[int], size: int) -> list[float]:
        """Steps in which each size up to `size` emits the tokens of all requests."""
        total = [0.0] * (size + 1)
        for accepted, count in Counter(num_accepted).items():
            steps = self._chain_steps.get((accepted, size))
            if steps is None:
                exact = [(1 + accepted) / min(1 + accepted, nodes) for nodes in self.sizes[: size + 1]]
                steps = [each + CHAIN_WHOLE * (math.ceil(each) - each) for each in exact]
                self._chain_steps[accepted, size] = steps
            for i, each in enumerate(steps):
                total[i] += count * each
        return total

    def _steps_of_trees(self, num_accepted: Array, size: int, path: Array, path_probs: Array | None) -> list[float]:
        bounds = self._bounds[: size + 1]
        if path_probs is None:
            within = path[:, 1:, None] < bounds
        else:
            # Float bits of probabilities order as they do; equal ones by falling number of the node.
            keys = (path_probs.view(np.int32).astype(np.int64) << 9) - self._numbers[: path_probs.shape[1]]
            rising = keys.copy()
            rising.sort(1)
            own = keys[np.arange(len(path))[:, None], path[:, 1:]]
            within = own[:, :, None] >= rising[:, None, -bounds]
        within &= (self._numbers[: path.shape[1] - 1] < num_accepted[:, None])[:, :, None]
        tokens = 1 + within.sum(1)
        first, *steps = (tokens[:, -1:] / tokens).sum(0).tolist()
        return [first, *(TREE_EXTRA * each + (1 - TREE_EXTRA) * len(path) for each in steps)]

    def _choose(self, step_ms: Sequence[float]) -> None:
        rates, tokens, last = [1 / step_ms[0]], 1.0, self.choice
        for smaller, own, nodes, spent_ms in zip(self.smaller, self.own, self.sizes[1:], step_ms[1:], strict=True):
            tokens *= smaller / own
            rates.append(min(tokens, nodes) / spent_ms)
        best = rates.index(max(rates))
        if last is None or rates[best] >= rates[last] * (KEEP_LARGER if best > last else KEEP_SMALLER):
            self.choice = best
        self.drafting = rates.index(max(rates[1:]), 1)
