"""Everybody who keeps something of requests hears of what happens to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from algorithms.runtime.parts import StepParts


class Told:
    """Records what it is told, under its name."""

    def __init__(self, name: str, news: list[Any]) -> None:
        self._name, self._news = name, news

    def __getattr__(self, event: str) -> Any:
        return lambda *what: self._news.append((self._name, event, *what))


@pytest.mark.parametrize("with_backlog", [True, False])
def test_drafter_texts_and_backlog_are_told(with_backlog: bool) -> None:
    news: list[Any] = []
    texts = [Told(f"texts {place}", news) for place in range(2)]
    for each in texts:
        each.store = Told(f"store of {each._name}", news)  # type: ignore[attr-defined]
    resources: Any = SimpleNamespace(texts=texts)
    others: Any = None
    drafter: Any = Told("drafter", news)
    backlog: Any = Told("backlog", news) if with_backlog else None
    parts = StepParts(drafter, others, others, resources, None, backlog)

    def told(event: str, *what: Any) -> list[Any]:
        news.clear()
        getattr(parts, event)(*what)
        return news

    both = ("texts 0", "texts 1")
    assert told("observe", "seen") == [("drafter", "observe", "seen"), *((name, "observe", "seen") for name in both)]
    assert told("move_row", 3, 1) == [
        ("drafter", "move_row", 3, 1),
        *((f"store of {name}", "move_row", 3, 1) for name in both),
        *[("backlog", "move", 3, 1)] * with_backlog,
    ]
    assert told("forget") == [("drafter", "forget"), *((f"store of {name}", "clear") for name in both)]
