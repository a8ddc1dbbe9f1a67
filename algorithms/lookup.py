"""Drafting by look-up: what followed the last tokens earlier is likely to follow them again.

propose   The longest suffix of the history that occurred before is looked up in the token histories, and its
          continuations are merged into one tree. Rules: `specdec_kernels.history`.

With `shared` the drafts depend on the outputs of other requests, without it on the request's own history alone. The
output depends on neither, because the target's own choice decides (`target_only`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import specdec_kernels as kernels
from algorithms.algorithm import Algorithm, Batch, DraftTree, Resources
from algorithms.checked import Between, Checked

if TYPE_CHECKING:
    from algorithms.models.loading import Target, TargetFolder


class Lookup(Algorithm):
    """Base of n-gram and suffix drafting: settings, the history store, and matching."""

    chain = False
    order: ClassVar[str]
    """`latest` or `frequent`, see `specdec_kernels.history`."""

    @dataclass
    class Config(Checked):
        GROUP = "algo."
        name: str
        num_nodes: Annotated[int, Between(2, 256)] = 16
        """Nodes verified, node 0 included."""
        max_ngram: Annotated[int, Between(1, 63)] = 32
        """Longest suffix of the history that is looked up, in tokens."""
        max_candidates: Annotated[int, Between(1, 64)] = 16
        """Matches that are followed, and that vote in `suffix`: the longest, then the latest; 1 drafts a chain."""
        min_path_prob: Annotated[float, Between(0, 1)] = 0.0
        """Least path probability of a draft."""
        histories: Annotated[int, Between(0, 4096)] = 64
        """Histories of ended requests that are kept."""
        shared: bool = True
        """Look in the histories of all requests, or only in the request's own."""
        corpus: str | None = None
        """Text file whose tokens are a history from the beginning."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.corpus is not None and not self.shared:
                raise ValueError("algo.corpus: expected algo.shared=true with it: a corpus is no request's own text")

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> None:
        if config.corpus is not None:
            _read_text(config.corpus)

    def __init__(self, config: Config, target: Target, draft_path: str | None) -> None:
        self._config = config
        self._corpus: list[int] = []
        if config.corpus is not None:
            from algorithms.models.tokenizer import Tokenizer

            text = _read_text(config.corpus)
            self._corpus = Tokenizer.load(target.path).encode(text)
        self.num_nodes, self.max_depth = config.num_nodes, config.num_nodes - 1

    @property
    def learns(self) -> bool:
        return self._config.shared

    def bind(self, resources: Resources) -> None:
        from algorithms.drafting.token_history import TokenHistories

        self._impl = resources.impl
        num_kept = self._config.histories if self._config.shared else 0
        self._histories = TokenHistories.of(resources, num_kept, self._corpus)

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        config = self._config
        draft = kernels.match_histories(
            self._histories.store,
            batch.history,
            batch.lengths,
            self._histories.slots(batch),
            num_nodes,
            order=self.order,
            max_ngram=config.max_ngram,
            max_candidates=config.max_candidates,
            min_path_prob=config.min_path_prob,
            shared=config.shared,
            impl=self._impl,
        )
        links = kernels.build_tree(draft.parents, batch.lengths, impl=self._impl)
        return DraftTree(draft.tokens, links, path_probs=draft.path_probs)


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"algo.corpus: expected a text file in UTF-8, got {path}: {error}") from error


class NGram(Lookup):
    """Trees of the latest continuations, those of shorter matches last."""

    name = "ngram"
    order = "latest"

    @dataclass
    class Config(Lookup.Config):
        name: str = "ngram"


class Suffix(Lookup):
    """Suffix drafting (SuffixDecoding, arXiv 2411.04975): the `max_candidates` best matches (longest first, then
    latest) vote for what followed them, and the tree has the most frequent continuations."""

    name = "suffix"
    order = "frequent"

    @dataclass
    class Config(Lookup.Config):
        name: str = "suffix"
