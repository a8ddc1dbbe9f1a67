"""What n-gram and suffix drafting have in common: settings, the store of texts, and matching.

There is no drafter to load. With `shared` the drafts depend on what other requests have written so far, and so on the
order of requests and on the batch; without it they are a function of the request's own text. The text that is written
depends on neither, because the target's own choice decides (`target_only`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import specdec_kernels as kernels
from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree, Resources
from specdec_kernels.checks import expect_between

if TYPE_CHECKING:
    from algorithms.runtime.models.loading import Target, TargetFolder


class Lookup(Algorithm):
    """Trees of what followed the end of the request before, in the texts of requests."""

    chain = False
    order: ClassVar[str]
    """Which drafts come first: `latest` or `frequent`, see `specdec_kernels.texts`."""

    @dataclass
    class Config:
        name: str
        num_nodes: int = 16
        """Nodes verified, node 0 included."""
        window: int = 32
        """Longest suffix that is looked up, in tokens."""
        matches: int = 16
        """Places where it was found that are followed; 1 drafts a chain."""
        min_confidence: float = 0.0
        """Least confidence of a draft."""
        texts: int = 64
        """Requests that have ended whose texts are kept."""
        shared: bool = True
        """Look in the texts of all requests, or in the request's own only."""
        corpus: str | None = None
        """Text file that is looked up too, from the first request on."""

        def __post_init__(self) -> None:
            expect_between("algo.num_nodes", self.num_nodes, 2, 256)
            expect_between("algo.window", self.window, 1, 63)
            expect_between("algo.matches", self.matches, 1, 64)
            expect_between("algo.texts", self.texts, 0, 4096)
            expect_between("algo.min_confidence", self.min_confidence, 0, 1)
            if self.corpus is not None and not self.shared:
                raise ValueError("algo.corpus: expected algo.shared=true with it: a corpus is no request's own text")

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> None:
        if config.corpus is not None:
            _read_text(config.corpus)

    def __init__(self, config: Config, target: Target, draft_path: str | None) -> None:
        self._config = config
        self._corpus = _encode_file(config.corpus, target) if config.corpus is not None else []
        self.num_nodes, self.max_depth = config.num_nodes, config.num_nodes - 1

    @property
    def learns(self) -> bool:
        return self._config.shared

    def attach(self, resources: Resources) -> None:
        from algorithms.runtime.texts import Texts

        self._impl = resources.impl
        self._texts = Texts.of(resources, self._config.texts if self._config.shared else 0, self._corpus)

    def propose(self, batch: Batch) -> DraftTree:
        return self.propose_few(batch, self.num_nodes)

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        config = self._config
        draft = kernels.match_texts(
            self._texts.store,
            batch.history,
            batch.lengths,
            self._texts.rows(batch),
            num_nodes,
            order=self.order,
            window=config.window,
            matches=config.matches,
            min_confidence=config.min_confidence,
            shared=config.shared,
            impl=self._impl,
        )
        links = kernels.build_tree(draft.parents, batch.lengths, impl=self._impl)
        strength = draft.strength if self.tells_strength else None
        return DraftTree(draft.tokens, links, strength=strength, confidence=draft.confidence)


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
