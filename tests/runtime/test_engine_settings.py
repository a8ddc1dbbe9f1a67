"""Engines whose parts do not fit each other are refused, with what was expected."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from algorithms.runtime import engine_settings
from algorithms.runtime.engine_settings import EngineSettings, check_backend, check_tree
from algorithms.runtime.request import EngineError
from tests.algorithms.toy import Setup, autoregressive, engine_of, random_target

TARGET = random_target()


def algorithm(nodes: int, depth: int, chain: bool) -> SimpleNamespace:
    return SimpleNamespace(name="toy", num_nodes=nodes, max_depth=depth, chain=chain)


@pytest.mark.parametrize(
    ("nodes", "depth", "chain"),
    [(1, 0, True), (1, 0, False), (5, 4, True), (5, 1, False), (5, 4, False), (2, 1, False)],
)
def test_trees_that_exist(nodes: int, depth: int, chain: bool) -> None:
    check_tree(algorithm(nodes, depth, chain))


@pytest.mark.parametrize(
    ("nodes", "depth", "chain", "expected"),
    [
        (5, 3, True, "expected 4 for a chain of 5 nodes, got 3"),
        (5, 5, True, "expected 4 for a chain of 5 nodes, got 5"),
        (5, 0, False, "expected 1 to 4 for a tree of 5 nodes, got 0"),
        (5, 5, False, "expected 1 to 4 for a tree of 5 nodes, got 5"),
        (2, 0, False, "expected 1 for a tree of 2 nodes, got 0"),
        (1, 1, False, "expected 0 for a tree of 1 nodes, got 1"),
        (1, 1, True, "expected 0 for a chain of 1 nodes, got 1"),
    ],
)
def test_trees_that_do_not_exist(nodes: int, depth: int, chain: bool, expected: str) -> None:
    with pytest.raises(EngineError, match=f"^algo=toy: max_depth: {expected}$"):
        check_tree(algorithm(nodes, depth, chain))


@pytest.mark.parametrize(
    ("nodes", "chain", "adaptive", "modes"),
    [
        (1, True, False, {"prefill": "chain", "decode": "chain"}),
        (4, True, False, {"prefill": "chain", "verify": "chain"}),
        (4, False, False, {"prefill": "chain", "verify": "tree"}),
        (4, False, True, {"prefill": "chain", "verify": "tree", "decode": "chain"}),
    ],
)
def test_the_backend_is_asked_for_what_the_engine_will_call(
    monkeypatch: pytest.MonkeyPatch, nodes: int, chain: bool, adaptive: bool, modes: dict[str, str]
) -> None:
    engine = engine_of(autoregressive(TARGET), Setup(), TARGET)
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(engine_settings, "check_calls", lambda *arguments, **_: asked.append(arguments))
    settings, weight = EngineSettings(page_size=4, adaptive=adaptive), TARGET.model.model.norm.weight
    backend = engine.parts.resources.backend
    check_backend(backend, TARGET, algorithm(nodes, nodes - 1, chain), settings, "none")
    assert asked == [(backend, TARGET.config, modes, 4, weight.dtype, weight.device)]
