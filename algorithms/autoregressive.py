"""The baseline: a tree that is the root alone, so every step verifies nothing and emits one token."""

from __future__ import annotations

from dataclasses import dataclass

import specdec_kernels as kernels
from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree, Resources


class Autoregressive(Algorithm):
    """Plain decoding of the target on the engine, attention and clock of every other algorithm."""

    name = "autoregressive"

    @dataclass
    class Config:
        name: str = "autoregressive"

    def attach(self, resources: Resources) -> None:
        self._impl = resources.impl

    def propose(self, batch: Batch) -> DraftTree:
        return DraftTree(batch.last_tokens[:, None], kernels.build_chain(batch.lengths, 1, impl=self._impl))
