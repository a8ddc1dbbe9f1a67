"""Drafting by lookup: what followed the last tokens before is likely to follow them again.

observe   Every committed token, of prompts and of answers, is counted into a trie of n-grams on the device, which all
          requests of a run share. A text file may be counted in first.
propose   The suffixes of the committed text are looked up, the longest first. What followed them is merged into one
          tree: `bfs` prefers what followed last, `prob` what followed most often.

There is no drafter to load. The tree is a deterministic function of what was committed, so the target's own choice
decides (`target_only`). Rules of the trie and of the trees: `specdec_kernels.ngram`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import specdec_kernels as kernels
from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree, Observation, Resources
from algorithms.runtime.tree_shape import expect_size

if TYPE_CHECKING:
    from algorithms.runtime.models.loading import Target, TargetFolder

MODES = ("bfs", "prob")


class NGram(Algorithm):
    """Trees from a store of n-grams."""

    name = "ngram"
    chain = False

    @dataclass
    class Config:
        name: str = "ngram"
        num_nodes: int = 16
        """Nodes verified, node 0 included."""
        window: int = 8
        """Longest suffix that is looked up, in tokens."""
        depth: int = 16
        """Longest n-gram stored, in tokens: a suffix and its continuation together."""
        min_breadth: int = 1
        """Continuations of a node that are taken behind a suffix as long as the window (mode bfs)."""
        max_breadth: int = 8
        """Most continuations of a node that are taken."""
        mode: str = "bfs"
        """bfs: breadth first by recency; prob: best first by frequency."""
        capacity: int = 1 << 18
        """N-grams that the store holds; the least recently used make room. About 140 bytes each."""
        corpus: str | None = None
        """Text file that is counted in before the first request."""

        def __post_init__(self) -> None:
            expect_size("num_nodes", self.num_nodes, 2, 256)
            expect_size("depth", self.depth, 2, 256)
            expect_size("window", self.window, 1, self.depth - 1)
            expect_size("max_breadth", self.max_breadth, 1, 32)
            expect_size("min_breadth", self.min_breadth, 1, self.max_breadth)
            expect_size("capacity", self.capacity, 2 * self.depth, 1 << 24)
            if self.mode not in MODES:
                raise ValueError(f"algo.mode must be one of {', '.join(MODES)}, got {self.mode!r}")

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> None:
        if config.corpus is not None:
            _read_text(config.corpus)

    def __init__(self, config: Config, target: Target, draft_path: str | None) -> None:
        self._config = config
        self._corpus = _encode_file(config.corpus, target) if config.corpus is not None else []
        self.num_nodes = config.num_nodes
        self.max_depth = min(config.num_nodes, config.depth) - 1

    def attach(self, resources: Resources) -> None:
        self._impl, self._device = resources.impl, resources.device
        self._store = self._empty_store()
        self._count_corpus()

    def forget(self) -> None:
        for kept, empty in zip(self._store.tensors(), self._empty_store().tensors(), strict=True):
            kept.copy_(empty)
        self._count_corpus()

    def _empty_store(self) -> kernels.NgramStore:
        config = self._config
        return kernels.NgramStore.create(config.capacity, config.depth, config.max_breadth, self._device)

    def _count_corpus(self) -> None:
        import torch

        device = self._device
        if self._corpus:
            text, width = torch.tensor([self._corpus], device=device), self._store.insertion_limit
            count = torch.full((1,), width, dtype=torch.int32, device=device)
            for first in range(0, len(self._corpus), width):
                start = torch.full((1,), first, dtype=torch.int64, device=device)
                kernels.ngram_insert(self._store, text, start, count, width, impl=self._impl)

    def propose(self, batch: Batch) -> DraftTree:
        return self.propose_few(batch, self.num_nodes)

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        config = self._config
        draft = kernels.ngram_match(
            self._store,
            batch.history,
            batch.lengths,
            num_nodes,
            window=config.window,
            min_breadth=config.min_breadth,
            max_breadth=config.max_breadth,
            mode=config.mode,
            impl=self._impl,
        )
        return DraftTree(draft.tokens, kernels.build_tree(draft.parents, batch.lengths, impl=self._impl))

    def observe(self, seen: Observation) -> None:
        batch, width, prompts = seen.batch, seen.tokens.shape[1], seen.prompts
        text, start, counts = batch.history, batch.lengths, seen.counts
        if prompts is not None:
            # An n-gram may reach over rows of the observation, so each prompt is inserted as one text.
            text, start, counts = text[prompts.last // width], prompts.start, prompts.counts
            width = prompts.width
        kernels.ngram_insert(self._store, text, start, counts, width, impl=self._impl)


def _encode_file(path: str, target: Target) -> list[int]:
    from algorithms.runtime.models.tokenizer import Tokenizer

    text = _read_text(path)
    return Tokenizer.load(target.path).encode(text)


def _read_text(path: str) -> str:
    """The content of a text file; ValueError if it is no text file in UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"algo.corpus: expected a text file in UTF-8, got {path}: {error}") from error
