"""Faults stay where they happen: what one request leaves behind, or does wrong, changes no other."""

from __future__ import annotations

from functools import cache

import pytest

from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree
from algorithms.runtime.cache import KVCache
from tests.algorithms.drafters import ALL_MAKERS, TARGET, load_random_drafters
from tests.algorithms.toy import Setup, answers, changed, requests, run


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    load_random_drafters(monkeypatch)


def asked() -> list:
    return requests(4, max_new_tokens=6)


@cache
def expected() -> list[list[int]]:
    return answers(asked(), Setup(max_batch=1), TARGET)


def fill_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page of every pool holds NaN before its first use, as pages of a broken request would."""
    allocate = KVCache.allocate.__func__

    def poisoned(cls: type[KVCache], *arguments: object) -> KVCache:
        cache = allocate(cls, *arguments)
        cache.kv.fill_(float("nan"))
        return cache

    monkeypatch.setattr(KVCache, "allocate", classmethod(poisoned))


def drafts_of(algorithm: Algorithm) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Tokens and depths of every draft that `algorithm` makes from now on."""
    drafts, propose = [], algorithm.propose

    def watched(batch: Batch) -> DraftTree:
        draft = propose(batch)
        drafts.append((draft.tokens.tolist(), draft.links.depth.tolist()))
        return draft

    algorithm.propose = watched  # type: ignore[method-assign]
    return drafts


def served(maker: str, few: list, setup: Setup) -> tuple[list[list[int]], list]:
    """The answers and everything that was drafted on the way."""
    algorithm = ALL_MAKERS[maker]()
    drafts = drafts_of(algorithm)
    return [c.token_ids for c in run(algorithm, few, setup, TARGET).completions], drafts


@pytest.mark.parametrize(("backend", "maker"), [("fa4", m) for m in ALL_MAKERS] + [("torch", "eagle3_tree")])
def test_nothing_is_read_before_it_is_written(
    loaded: None, monkeypatch: pytest.MonkeyPatch, backend: str, maker: str
) -> None:
    """What stands in a recycled page behind the text reaches neither the answer nor the drafts."""
    setup = Setup(backend, page_size=4)
    answers, drafts = served(maker, asked(), setup)
    assert answers == expected()
    fill_with_nan(monkeypatch)
    assert served(maker, asked(), setup) == (answers, drafts)


@pytest.mark.parametrize("maker", ["eagle3_tree", "standalone_tree"])
def test_kernels_read_nothing_before_it_is_written(loaded: None, monkeypatch: pytest.MonkeyPatch, maker: str) -> None:
    """The same through the Triton kernels (interpreted where there is no GPU)."""
    few, setup = [changed(r, max_new_tokens=2) for r in asked()[:2]], Setup(impl="triton", max_batch=2)
    clean = served(maker, few, setup)
    fill_with_nan(monkeypatch)
    assert served(maker, few, setup) == clean
