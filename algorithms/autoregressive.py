"""The baseline: a tree of node 0 alone, so every step verifies no draft and emits one token."""

from dataclasses import dataclass

import specdec_kernels as kernels
from algorithms.algorithm import Algorithm, Batch, DraftTree, Resources


class Autoregressive(Algorithm):
    name = "autoregressive"

    @dataclass
    class Config:
        name: str = "autoregressive"

    def bind(self, resources: Resources) -> None:
        self._impl = resources.impl

    def propose(self, batch: Batch) -> DraftTree:
        return DraftTree(batch.last_tokens[:, None], kernels.build_chain(batch.lengths, 1, impl=self._impl))
