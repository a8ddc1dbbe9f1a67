"""Runs drafters over recorded outputs, one token a step, and records how much of each draft they confirm.

To the engine this is an algorithm without drafts. In each step every drafter proposes its tree, which is compared with
the recorded tokens and not verified. Then the engine commits one token, which the recorder replaces by the recorded
one. So every position is the start of a step, and all drafters see the recorded tokens.

The target's own token depends on context, seed and position alone. So a draft is accepted where it is the recorded
token, greedy or sampled, for every drafter with the rule `target_only`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from algorithms.algorithm import Algorithm, Batch, DraftTree, Observation, Resources
from specdec_kernels import build_chain

UNKNOWN = -1  # entry of the script where no token is recorded. No draft equals it.
FIGURES = ("accepted", "ran_out")


class Recorder(Algorithm):
    """Lets `algorithms` draft at every position of `recorded`: prompts with outputs, by the seed of the request."""

    name = "replay"

    def __init__(self, algorithms: Sequence[Algorithm], recorded: Sequence[Sequence[int]]) -> None:
        self._algorithms, self._recorded = algorithms, recorded
        self.target_layers = tuple(sorted({layer for algorithm in algorithms for layer in algorithm.target_layers}))
        self.draft_slots = max(max(algorithm.draft_slots, algorithm.num_nodes) for algorithm in algorithms)
        self.needs_draft_model = any(algorithm.needs_draft_model for algorithm in algorithms)

    def bind(self, resources: Resources) -> None:
        for algorithm in self._algorithms:
            algorithm.bind(resources)
        self._impl, spare = resources.impl, len(self._recorded)
        width = resources.context + 1 + max(algorithm.max_depth for algorithm in self._algorithms)
        script = torch.full((spare + 1, width), UNKNOWN, dtype=torch.int64)
        for number, tokens in enumerate(self._recorded):
            script[number, : len(tokens)] = torch.tensor(tokens)
        self._script = script.to(resources.device)
        shape = (len(self._algorithms), len(FIGURES), spare + 1, resources.context)
        self._found = torch.zeros(shape, dtype=torch.int32, device=resources.device)

    def figures(self) -> Tensor:
        """[drafters, 2, outputs, positions] int32 on the host: `FIGURES` of a step whose last token is there."""
        return self._found[:, :, :-1].cpu()

    def propose(self, batch: Batch) -> DraftTree:
        numbers = self._numbers_of(batch)
        for number, algorithm in enumerate(self._algorithms):
            figures = confirmed(algorithm.propose(batch), batch.lengths, self._script[numbers])
            self._found[number][:, numbers, batch.lengths] = figures.int()
        return DraftTree(batch.last_tokens[:, None], build_chain(batch.lengths, 1, impl=self._impl))

    def observe(self, seen: Observation) -> None:
        if not seen.is_prefill:
            seen = self._corrected(seen)
        for algorithm in self._algorithms:
            features = [seen.features[self.target_layers.index(layer)] for layer in algorithm.target_layers]
            algorithm.observe(replace(seen, features=features))

    def _numbers_of(self, batch: Batch) -> Tensor:
        """[B] int64: the output of each batch slot; the spare one where no request is."""
        assert batch.sampling.seeds is not None
        return torch.where(batch.active > 0, batch.sampling.seeds, len(self._recorded))

    def _corrected(self, seen: Observation) -> Observation:
        """Replace the target's own token by the recorded one, where one is recorded."""
        batch, place = seen.batch, (seen.batch.lengths + 1)[:, None]
        recorded = self._script[self._numbers_of(batch)].gather(1, place)
        token = torch.where(recorded == UNKNOWN, batch.last_tokens[:, None], recorded)
        kept = torch.where((batch.active > 0)[:, None], token, batch.history.gather(1, place))
        batch.history.scatter_(1, place, kept)
        batch.last_tokens.copy_(token[:, 0])
        return replace(seen, next_tokens=token)

    def reset(self) -> None:
        for algorithm in self._algorithms:
            algorithm.reset()

    def move_slot(self, source: int, target: int) -> None:
        for algorithm in self._algorithms:
            algorithm.move_slot(source, target)


def confirmed(tree: DraftTree, lengths: Tensor, script: Tensor) -> Tensor:
    """`FIGURES` [2, B] of `tree` after the tokens at `lengths [B]`, where `script [B, positions]` is recorded."""
    depth, node = tree.links.depth.long(), torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    inside = (depth > 0) | (node == 0)  # a node outside of the tree has depth 0 and is not the root
    seen = (tree.links.mask[:, :, node // 64] >> (node % 64)) & 1 > 0  # [B, N, N]: itself and its ancestors
    wrong = tree.tokens != script.gather(1, torch.where(inside, lengths[:, None] + depth, 0))
    wrong[:, 0] = False
    errors = (seen & wrong[:, None, :]).sum(-1)
    accepted = torch.where(inside & (errors == 0), depth, 0).amax(1)
    # Drafts whose parents are all accepted.
    offered = inside & (errors == wrong.int()) & (depth == accepted[:, None] + 1)
    return torch.stack([accepted, ~offered.any(1)])
