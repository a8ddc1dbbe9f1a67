"""Runs drafters over recorded text, one token a step, and notes how much of each draft the text confirms.

To the engine this is an algorithm that drafts nothing. In each step every drafter proposes its tree, which is compared
with the recorded text and not verified. Then the engine commits one token, and the recorder puts the recorded token in
its place. So every position of the text is the start of a step, and all drafters see the text that was recorded,
whatever the target would write now.

The target's own token is chosen with the context, the seed and the position alone. So a draft is accepted where it is
the recorded token, greedy or sampled, for every drafter with the rule `target_only`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree, Observation, Resources
from specdec_kernels import build_chain

UNKNOWN = -1
"""Stands in the script where no token is recorded. No draft equals it."""
FIGURES = ("accepted", "ran_out")


class Recorder(Algorithm):
    """Lets `algorithms` draft at every position of `texts`. The seed of a request is the number of its text."""

    name = "replay"

    def __init__(self, algorithms: Sequence[Algorithm], texts: Sequence[Sequence[int]]) -> None:
        self._algorithms, self._texts = algorithms, texts
        self.capture = tuple(sorted({layer for algorithm in algorithms for layer in algorithm.capture}))
        self.draft_slots = max(max(algorithm.draft_slots, algorithm.num_nodes) for algorithm in algorithms)
        self.needs_draft_model = any(algorithm.needs_draft_model for algorithm in algorithms)
        self.graph = next((algorithm.graph for algorithm in algorithms if algorithm.graph), None)

    def attach(self, resources: Resources) -> None:
        for algorithm in self._algorithms:
            algorithm.attach(resources)
        self._impl, spare = resources.impl, len(self._texts)
        width = resources.context + 1 + max(algorithm.max_depth for algorithm in self._algorithms)
        script = torch.full((spare + 1, width), UNKNOWN, dtype=torch.int64)
        for number, text in enumerate(self._texts):
            script[number, : len(text)] = torch.tensor(text)
        self._script = script.to(resources.device)
        shape = (len(self._algorithms), len(FIGURES), spare + 1, resources.context)
        self._found = torch.zeros(shape, dtype=torch.int32, device=resources.device)

    def figures(self) -> Tensor:
        """[drafters, 2, texts, positions] int32 on the host: `FIGURES` of a step whose last token stands there."""
        return self._found[:, :, :-1].cpu()

    def propose(self, batch: Batch) -> DraftTree:
        texts = self._texts_of(batch)
        for number, algorithm in enumerate(self._algorithms):
            figures = confirmed(algorithm.propose(batch), batch.lengths, self._script[texts])
            self._found[number][:, texts, batch.lengths] = figures.int()
        return DraftTree(batch.last_tokens[:, None], build_chain(batch.lengths, 1, impl=self._impl))

    def observe(self, seen: Observation) -> None:
        if not seen.is_prefill:
            seen = self._corrected(seen)
        for algorithm in self._algorithms:
            features = [seen.features[self.capture.index(layer)] for layer in algorithm.capture]
            algorithm.observe(replace(seen, features=features))

    def _texts_of(self, batch: Batch) -> Tensor:
        """[B] int64: the text of each row; for padding the spare one."""
        assert batch.sampling.seeds is not None
        return torch.where(batch.active > 0, batch.sampling.seeds, len(self._texts))

    def _corrected(self, seen: Observation) -> Observation:
        """Put the recorded token in the place of the target's own, where one is recorded."""
        batch, place = seen.batch, (seen.batch.lengths + 1)[:, None]
        recorded = self._script[self._texts_of(batch)].gather(1, place)
        token = torch.where(recorded == UNKNOWN, batch.last_tokens[:, None], recorded)
        kept = torch.where((batch.active > 0)[:, None], token, batch.history.gather(1, place))
        batch.history.scatter_(1, place, kept)
        batch.last_tokens.copy_(token[:, 0])
        return replace(seen, next_tokens=token)

    def forget(self) -> None:
        for algorithm in self._algorithms:
            algorithm.forget()

    def move_row(self, source: int, target: int) -> None:
        for algorithm in self._algorithms:
            algorithm.move_row(source, target)


def confirmed(tree: DraftTree, lengths: Tensor, script: Tensor) -> Tensor:
    """`FIGURES` [2, B] of `tree` behind the tokens at `lengths [B]`, where `script [B, positions]` is the text."""
    inside, seen, depth = used(tree), sees(tree) > 0, tree.links.depth.long()
    wrong = tree.tokens != script.gather(1, torch.where(inside, lengths[:, None] + depth, 0))
    wrong[:, 0] = False
    errors = (seen & wrong[:, None, :]).sum(-1)
    accepted = torch.where(inside & (errors == 0), depth, 0).amax(1)
    # A draft that the accepted path leads to: nothing above it is wrong.
    offered = inside & (errors == wrong.int()) & (depth == accepted[:, None] + 1)
    return torch.stack([accepted, ~offered.any(1)])


def sees(tree: DraftTree) -> Tensor:
    """[B, N, N] int64: 1 where node i sees node j: itself and its ancestors."""
    node = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    return (tree.links.mask[:, :, node // 64] >> (node % 64)) & 1


def used(tree: DraftTree) -> Tensor:
    """[B, N] bool: a node outside of the tree has depth 0 and is not the root."""
    return (tree.links.depth > 0) | (torch.arange(tree.tokens.shape[1], device=tree.tokens.device) == 0)
