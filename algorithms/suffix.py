"""Drafting by suffix: what followed the longest suffix of the request before is likely to follow it again.

observe   Committed tokens are written into the text of their request. The texts of the latest requests that have ended
          are kept beside those of the running ones.
propose   The end of the request is looked for in all texts. What followed the longest matches is merged into one tree
          by frequency; short matches draft short paths, and are trusted less.

There is no drafter to load. With `shared` the drafts depend on what other requests have written so far, and so on the
order of requests and on the batch; without it they are a function of the request's own text. The text that is written
depends on neither, because the target's own choice decides (`target_only`). Rules of matches and trees:
`specdec_kernels.suffix`. Source: SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import specdec_kernels as kernels
from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree, Observation, Resources
from algorithms.runtime.tree_shape import expect_size

if TYPE_CHECKING:
    from algorithms.runtime.models.loading import Target


class Suffix(Algorithm):
    """Trees from the texts of requests."""

    name = "suffix"
    chain = False
    tells_strength = True

    @dataclass
    class Config:
        name: str = "suffix"
        num_nodes: int = 16
        """Nodes verified, node 0 included."""
        window: int = 32
        """Longest suffix that is compared, in tokens."""
        texts: int = 64
        """Requests that have ended whose texts are kept."""
        shared: bool = True
        """Look in the texts of all requests, or in the request's own only."""
        matches: int = 32
        """Places that vote for what follows."""
        per_text: int = 8
        """Most of them in one text."""
        factor: float = 4.0
        """Longest path per token of the longest match."""
        min_share: float = 0.0
        """Least share of the votes that a draft needs."""

        def __post_init__(self) -> None:
            expect_size("num_nodes", self.num_nodes, 2, 256)
            expect_size("window", self.window, 1, 63)
            expect_size("texts", self.texts, 0, 256)
            expect_size("matches", self.matches, 1, 64)
            expect_size("per_text", self.per_text, 1, 16)
            if not self.factor > 0:
                raise ValueError(f"algo.factor: expected above 0, got {self.factor}")
            if not 0 <= self.min_share <= 1:
                raise ValueError(f"algo.min_share: expected 0 to 1, got {self.min_share}")

    def __init__(self, config: Config, target: Target, draft_path: str | None) -> None:
        self._config = config
        self.num_nodes, self.max_depth = config.num_nodes, config.num_nodes - 1

    def attach(self, resources: Resources) -> None:
        import torch

        rows = resources.max_batch + 1  # prompts that are padding name the row behind the last
        texts = self._config.texts if self._config.shared else 0
        self._impl = resources.impl
        self._rows = torch.arange(rows, device=resources.device)
        self._store = kernels.SuffixStore.create(rows, texts, resources.context, resources.device)

    def forget(self) -> None:
        self._store.clear()

    def move_row(self, source: int, target: int) -> None:
        self._store.move_row(source, target)

    def propose(self, batch: Batch) -> DraftTree:
        return self.propose_few(batch, self.num_nodes)

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        config = self._config
        draft = kernels.suffix_match(
            self._store,
            batch.history,
            batch.lengths,
            self._rows[batch.rows],
            num_nodes,
            window=config.window,
            matches=config.matches,
            per_text=config.per_text,
            factor=config.factor,
            min_share=config.min_share,
            shared=config.shared,
            impl=self._impl,
        )
        links = kernels.build_tree(draft.parents, batch.lengths, impl=self._impl)
        return DraftTree(draft.tokens, links, strength=draft.strength, confidence=draft.confidence)

    def observe(self, seen: Observation) -> None:
        batch, width, prompts = seen.batch, seen.tokens.shape[1], seen.prompts
        text, rows, start, counts = batch.history, self._rows[batch.rows], batch.lengths, seen.counts
        if prompts is not None:
            text, rows, start, counts = text[prompts.last // width], prompts.rows, prompts.start, prompts.counts
            width = prompts.width
        kernels.suffix_insert(self._store, text, rows, start, counts, width, impl=self._impl)
