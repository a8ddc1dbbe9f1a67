"""Drafts what followed the last token earlier in the text: the latest followers, as siblings under the root."""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree, Resources


class Bigram(Algorithm):
    """One level of guesses from the request's own text; no model, no state."""

    name = "bigram"
    chain = False
    max_depth = 1

    @dataclass
    class Config:
        name: str = "bigram"
        width: int = 3
        """Followers that are tried."""

        def __post_init__(self) -> None:
            if not 1 <= self.width <= 64:
                raise ValueError(f"algo.width: expected 1 to 64, got {self.width}")

    def __init__(self, config: Config, target: object, draft_path: str | None) -> None:
        self.num_nodes = 1 + config.width

    def attach(self, resources: Resources) -> None:
        self._impl = resources.impl

    def propose(self, batch: Batch) -> DraftTree:
        import torch

        import specdec_kernels as kernels

        text = batch.history[:, :-1]
        place = torch.arange(text.shape[1], device=text.device)
        earlier = (text == batch.last_tokens[:, None]) & (place < batch.lengths[:, None])
        found, index = torch.where(earlier, place, -1).topk(self.num_nodes - 1)
        followers = batch.history.gather(1, index + 1)
        parents = torch.where(found >= 0, 0, -2)  # -2: an unused node, never verified
        parents = torch.cat([torch.full_like(parents[:, :1], -1), parents], 1).to(torch.int32)
        tokens = torch.cat([batch.last_tokens[:, None], followers], 1)
        return DraftTree(tokens, kernels.build_tree(parents, batch.lengths, impl=self._impl))
