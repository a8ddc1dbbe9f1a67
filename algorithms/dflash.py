"""DFlash (arXiv 2602.06036): a whole block of drafts from one pass of a block-diffusion drafter.

observe   After prefill and after every verify, the target's hidden states at a few layers are fused into one context
          vector per committed token, and the keys and values of every draft layer are computed from it and stored
          in the drafter's own pages ("materialised"). The drafter never runs over the text.
propose   [root, mask, …, mask] at positions L … L + B - 1 attends without causality to [context; block]. The argmax of
          the target's LM head at the masks is the draft: a chain of B - 1 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import specdec_kernels as kernels
from algorithms import runtime
from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree, Observation, Resources

if TYPE_CHECKING:
    from algorithms.runtime.models.config import DFlashConfig
    from algorithms.runtime.models.loading import Target


class DFlash(Algorithm):
    """Block-diffusion drafting; the draft is a deterministic function of the context."""

    name = "dflash"

    @dataclass
    class Config:
        name: str = "dflash"
        block_size: int | None = None
        """Tokens of a block, the root included; None takes the size the drafter was trained with."""

        def __post_init__(self) -> None:
            if self.block_size is not None and not 1 <= self.block_size <= 256:
                raise ValueError(f"algo.block_size: expected 1 to 256 or null, got {self.block_size}")

    def __init__(self, config: Config, target: Target, draft_path: str | None) -> None:
        if draft_path is None:
            raise ValueError("algo=dflash needs a drafter: set model.draft_path to a DFlash folder or hub name")
        weight = target.model.model.norm.weight
        self._drafter = runtime.load_dflash(draft_path, target, weight.device, weight.dtype)
        self._target = target.model
        _expect_full_attention(self._drafter.config)
        trained = self._drafter.config.block_size
        self.num_nodes = config.block_size or trained
        if self.num_nodes > trained:
            raise ValueError(f"algo.block_size: expected at most {trained}, as trained, got {self.num_nodes}")
        self.max_depth = self.num_nodes - 1
        self.capture = self._drafter.config.target_layer_ids

    def attach(self, resources: Resources) -> None:
        self._resources = resources
        self._cache = runtime.KVCache.allocate(self._drafter.config.decoder, resources)
        self._stacked = self._drafter.stack_kv()

    def propose(self, batch: Batch) -> DraftTree:
        links = kernels.build_chain(batch.lengths, self.num_nodes, impl=self._resources.impl)
        tokens = batch.roots.new_full(links.positions.shape, self._drafter.config.mask_token_id)
        tokens[:, 0] = batch.roots
        if self.num_nodes > 1:
            mixer = runtime.PagedMixer.over(
                batch, links.positions, self._cache, self._resources, mode="block", phase="draft"
            )
            hidden = self._drafter(self._target.embed(tokens), mixer)
            tokens[:, 1:] = self._target.logits(hidden[:, 1:]).argmax(-1)
        return DraftTree(tokens, links)

    def observe(self, seen: Observation) -> None:
        impl, width = self._resources.impl, seen.tokens.shape[1]
        keys, values = self._drafter.context_kv(self._drafter.context(seen.features), self._stacked)
        slots = kernels.token_slots(seen.page_table, seen.start, seen.counts, width, self._cache.page_size, impl=impl)
        kernels.materialize_kv(
            keys.flatten(0, 1),
            values.flatten(0, 1),
            self._cache.kv,
            slots.flatten(),
            seen.positions.flatten(),
            self._cache.rope,
            k_norm=self._stacked.k_norm,
            eps=self._cache.eps,
            impl=impl,
        )


def _expect_full_attention(config: DFlashConfig) -> None:
    if set(config.layer_types) != {"full_attention"} or any(config.causal_layers):
        raise ValueError(
            "algo=dflash: expected full, non-causal attention in every draft layer, got layer_types="
            f"{list(config.layer_types)}, causal={list(config.causal_layers)}"
        )
