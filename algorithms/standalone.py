"""Speculative decoding with a small language model (arXiv 2211.17192, 2302.01318).

observe   The draft model reads the prompt. After a step its cache already holds the accepted part of a chain; behind
          an accepted tree it reads the accepted tokens once more, because its cache holds them scattered.
propose   The draft model writes `steps` tokens behind the root: a chain, or a tree as EAGLE-2 grows it.

A greedy chain and every tree is a deterministic function of the context, so the target's own choice decides
(`target_only`). A chain may instead be drawn from the draft model with the request's own sampling parameters and be
verified by `rejection` or `block`, which emit the target's law as well and accept more when both models are unsure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from algorithms import runtime
from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree, Observation, Resources
from algorithms.runtime.tree_shape import TreeShape

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.runtime.models.loading import Target, TargetShape

RULES = ("target_only", "rejection", "block")


class Standalone(Algorithm):
    """A small model drafts what a large one verifies."""

    name = "standalone"
    needs_draft_model = True

    @dataclass
    class Config:
        name: str = "standalone"
        steps: int = 4
        """Tokens drafted one behind the other, at most (K)."""
        topk: int = 1
        """Children that a token offers; 1 drafts a chain."""
        num_nodes: int | None = None
        """Nodes verified, the root included; None takes steps + 1 for a chain, else at most 32."""
        rule: str = "target_only"
        """target_only, rejection or block; the last two draw a chain from the draft model."""

        def __post_init__(self) -> None:
            shape = TreeShape.of(self.steps, self.topk, self.num_nodes)
            if self.rule not in RULES:
                raise ValueError(f"algo.rule must be one of {', '.join(RULES)}, got {self.rule!r}")
            if self.rule != "target_only" and not shape.chain:
                raise ValueError(f"algo.rule={self.rule} verifies chains: expected algo.topk=1, got {self.topk}")

    @classmethod
    def check(cls, config: Any, target: TargetShape, draft_path: str | None) -> None:
        runtime.read_draft(cls.drafter_folder(draft_path), target)

    def __init__(self, config: Config, target: Target, draft_path: str | None) -> None:
        weight = target.model.model.norm.weight
        self._draft = runtime.load_draft(self.drafter_folder(draft_path), target, weight.device, weight.dtype)
        self._shape = TreeShape.of(config.steps, config.topk, config.num_nodes)
        self.rule = config.rule
        self.chain, self.max_depth = self._shape.chain, self._shape.max_depth
        self.num_nodes = self.max_depth + 1 if self.chain else self._shape.num_nodes
        # A chain also stores its last draft.
        self.draft_slots = self._shape.draft_slots(1) + self.chain

    def attach(self, resources: Resources) -> None:
        self._resources = resources
        self._cache = runtime.KVCache.allocate(self._draft.config, resources)
        self._expansion = runtime.TreeDrafter(self._shape, self._cache, resources, base=1)

    def observe(self, seen: Observation) -> None:
        if seen.is_prefill or not self.chain:
            self._draft.model(seen.tokens, runtime.PagedMixer.following(seen, self._cache, self._resources))

    def propose(self, batch: Batch) -> DraftTree:
        logits = self._run(batch.last_tokens[:, None], None, self._expansion.chain_mixer(batch, 0))[:, 0]
        grow = self._expansion.grow if self.rule == "target_only" else self._expansion.draw
        draft = grow(batch, logits, self._run)
        if self.chain:
            # Stores the last draft, in case all are accepted; what would follow it is not asked.
            self._draft.model(draft.tokens[:, -1:], self._expansion.chain_mixer(batch, self.max_depth))
        return draft

    def _run(self, tokens: Tensor, parents: Tensor | None, mixer: Any) -> Tensor:
        hidden, _ = self._draft.model(tokens, mixer)
        return self._draft.model.logits(hidden)
