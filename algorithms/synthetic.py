"""Drafts that are accepted at given rates, to measure the speed of a drafter before it is trained.

record    The engine first decodes the requests autoregressively, outside of the measured time.
propose   Draft i is the target's own token with probability `rate[i - 1]` if all before it are, and another token
          otherwise. With `drafter`, that algorithm runs and its tree is verified, with these tokens on the path of
          first children and wrong ones beside it; without it the drafts are a chain.

Output and acceptance rule are the target's own, so a step emits 1 + r1 + r1 r2 + … tokens on average, less what the end
of a request cuts off. Whether a draft is right follows from the request's seed and the position alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import specdec_kernels as kernels
from algorithms.algorithm import Batch, DraftTree, Resources
from algorithms.autoregressive import Autoregressive
from algorithms.lazy import torch
from algorithms.mixed import Part, Wrapper, part_of
from specdec_kernels.checks import expect_between

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.models.loading import Target


class Synthetic(Wrapper):
    name = "synthetic"
    verifies_others = True

    @dataclass
    class Config:
        name: str = "synthetic"
        rate: list[float] = field(default_factory=lambda: [0.8, 0.7, 0.6])
        """How often draft 1, 2, … is accepted if all before it are. Deeper drafts of `drafter` have the last rate."""
        drafter: dict[str, Any] = field(default_factory=dict)
        """Name and settings of the algorithm that runs; `draft_path` is its folder if not the model's own. Empty: none,
        and a chain of as many drafts as there are rates is verified."""

        def __post_init__(self) -> None:
            if not self.rate:
                raise ValueError("algo.rate: expected at least one rate, got none")
            for place, rate in enumerate(self.rate):
                expect_between(f"algo.rate[{place}]", rate, 0, 1)

    @classmethod
    def parts(cls, config: Config) -> list[Part]:
        return [part_of("drafter", config.drafter, (cls.name,))] if config.drafter else []

    def __init__(self, config: Config, target: Target, draft_path: str | None) -> None:
        super().__init__(config, target, draft_path)
        self.recorder = Autoregressive(Autoregressive.Config(), target, None)
        self._vocab = target.config.vocab_size
        self.num_nodes, self.max_depth = len(config.rate) + 1, len(config.rate)
        for inner in self.inner:
            self.num_nodes, self.max_depth, self.chain = inner.num_nodes, inner.max_depth, inner.chain
        self._rates = [*config.rate, *config.rate[-1:] * self.max_depth][: self.max_depth]

    def bind(self, resources: Resources) -> None:
        self._thresholds = torch.tensor(self._rates, dtype=torch.float32, device=resources.device)
        super().bind(resources)

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        """The tree of the drafter, or a chain: right tokens on the first path as far as drawn, wrong ones elsewhere."""
        if not self.inner:
            links = kernels.build_chain(batch.lengths, num_nodes, impl=self._impl)
        else:
            links = self.drafted(batch, num_nodes)[0].links
        depth = links.depth.long()
        right = batch.history.gather(1, links.positions.clamp(0, batch.history.shape[1] - 1))
        seeds = batch.sampling.seeds
        assert seeds is not None, "every request has a seed"
        drawn = uniforms(seeds, batch.lengths, self.max_depth) < self._thresholds
        # Depth 0, the last committed token, is always right.
        reached = torch.nn.functional.pad(drawn.long().cumprod(1), (1, 0), value=1).bool()
        on_path = self._on_path(links)
        keep = reached.gather(1, depth) & on_path
        tokens = torch.where(keep, right, (right + 1) % self._vocab)
        tokens[:, 0] = batch.last_tokens
        path_probs = None
        if self._needs_path_probs:
            likely = torch.nn.functional.pad(self._thresholds.cumprod(0), (1, 0), value=1.0)
            path_probs = torch.where(on_path, likely[depth], 0.0)
        return DraftTree(tokens, links, path_probs=path_probs)

    def _on_path(self, links: kernels.TreeLinks) -> Tensor:
        """[B, N] bool: whether a node is node 0, its first child, the first child of that, and so on."""
        if self.chain:
            return torch.ones_like(links.first_child, dtype=torch.bool)
        num_nodes = links.first_child.shape[1]
        # Column N stands for no node and is its own child.
        child = links.first_child.long()
        child = torch.nn.functional.pad(torch.where(child < 0, num_nodes, child), (0, 1), value=num_nodes)
        on_path = torch.zeros_like(child, dtype=torch.bool)
        node = torch.zeros_like(child[:, :1])
        for _ in range(self.max_depth + 1):
            on_path.scatter_(1, node, True)
            node = child.gather(1, node)
        return on_path[:, :num_nodes]


def uniforms(seeds: Tensor, lengths: Tensor, count: int) -> Tensor:
    """[B, count] float32 in [0, 1) for `seeds`, `lengths` [B] int64, by SplitMix64 (Steele et al., OOPSLA 2014)."""
    places = torch.arange(count, device=seeds.device)
    state = seeds[:, None] * -0x61C8864680B583EB + lengths[:, None] * 1_000_003 + places
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        state = (state ^ _shifted(state, shift)) * factor
    return _shifted(state ^ _shifted(state, 31), 40).float() * 2.0**-24


def _shifted(values: Tensor, bits: int) -> Tensor:
    """`values` int64 as unsigned numbers, shifted right."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
