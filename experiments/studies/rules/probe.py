"""Computes what every acceptance rule would accept of sampled drafts.

The engine runs with the rule `target_only`: the target's own choice at a seed decides, for every draft. So the
output is autoregressive sampling for every drafter and every way of sampling. In each step all rules are applied to the
same drafts after the same tokens, and their expectations over the uniforms are exact, so that only outputs and drafts
are random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

from torch import Tensor

from algorithms.algorithm import Algorithm, Batch, DraftTree, Observation, Resources
from experiments.report.intervals import ratio_interval
from specdec_kernels import SamplingTensors
from specdec_kernels.verify import draft_by_node, expected_accepted


class Probe(Algorithm):
    """`inner` drafts and learns; `rules` are applied to its samples."""

    name = "rules_probe"
    graph = "none"

    def __init__(self, inner: Algorithm, rules: Sequence[str]) -> None:
        self._inner, self._rules = inner, rules
        self.chain, self.num_nodes, self.max_depth = inner.chain, inner.num_nodes, inner.max_depth
        self.target_layers, self.draft_slots, self.needs_draft_model = inner.target_layers, inner.draft_slots, True
        self.found: dict[int, list[list[float]]] = {}
        """Seed of the request to, for each step, the expected number of accepted drafts under each rule."""

    def bind(self, resources: Resources) -> None:
        self._inner.bind(resources)

    def propose(self, batch: Batch) -> DraftTree:
        self._sampled = self._inner.propose(batch)
        return replace(self._sampled, draft_probs=None, draft_rows=None)

    def inspect(self, batch: Batch, tree: DraftTree, logits: Tensor, sampling: SamplingTensors) -> None:
        sampled = self._sampled
        assert sampled.draft_probs is not None and batch.sampling.seeds is not None
        draft = draft_by_node(sampled.draft_probs, sampled.draft_rows, self.num_nodes)
        arguments = (tree.tokens, tree.links, logits, self.max_depth, sampling, draft)
        means = [expected_accepted(rule, *arguments).tolist() for rule in self._rules]
        seeds, active = batch.sampling.seeds.tolist(), batch.active.tolist()
        for seed, runs, *of_rules in zip(seeds, active, *means, strict=True):
            if runs:
                self.found.setdefault(seed, []).append(of_rules)

    def observe(self, seen: Observation) -> None:
        self._inner.observe(seen)

    def move_slot(self, source: int, target: int) -> None:
        self._inner.move_slot(source, target)

    def reset(self) -> None:
        self._inner.reset()
        self.found.clear()


def summary(found: dict[int, list[list[float]]], rule: int, first: int) -> dict[str, Any]:
    """Figures of the rule with this number; its gain is over the rule `first`. Intervals of 95 % take requests as
    independent, and no steps."""
    steps = [len(of_request) for of_request in found.values()]
    sums = [sum(step[rule] for step in of_request) for of_request in found.values()]
    gains = [sum(step[rule] - step[first] for step in of_request) for of_request in found.values()]
    total = sum(steps)
    return {
        "expected_accepted": sum(sums) / total,
        "expected_accepted_interval": ratio_interval(sums, steps),
        "gain": sum(gains) / total,
        "gain_interval": None if rule == first else ratio_interval(gains, steps, least=-inf),
        "row_steps": total,
        "num_requests": len(steps),
    }
