"""What a small language model as a drafter declares, asks of the backend, and reads of what was committed."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms.standalone import Standalone
from tests.algorithms.drafters import LOADING, TARGET, draft_model


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A random model in the place of a folder; what `read_draft` is asked for."""
    asked: list[Any] = []
    monkeypatch.setattr(f"{LOADING}.load_draft", lambda *_: draft_model())
    monkeypatch.setattr(f"{LOADING}.read_draft", lambda *given: asked.append(given) or draft_model())
    return asked


@pytest.mark.parametrize(("topk", "mode"), [(1, "chain"), (2, "tree")])
def test_the_backend_serves_prompts_and_the_shape_of_the_draft(folder: list[Any], topk: int, mode: str) -> None:
    calls = Standalone.check(Standalone.Config(topk=topk), TARGET, "folder")
    assert calls.config == draft_model().config and calls.modes == {"prefill": "chain", "draft": mode}
    assert folder == [("folder", TARGET, True)]


@pytest.mark.parametrize(
    ("config", "rule", "sizes"),
    [
        (dict(), "target_only", (True, 5, 4, 5)),  # node 0, three drafts that are run, and the last one
        (dict(steps=1), "target_only", (True, 2, 1, 2)),
        (dict(topk=2, num_nodes=9), "target_only", (False, 9, 4, 7)),
        (dict(steps=3, draft_sampling="sample"), "block", (True, 4, 3, 4)),
        (dict(steps=3, topk=2, num_nodes=6, draft_sampling="without_replacement"), "traversal", (False, 6, 3, 5)),
        (dict(steps=9, topk=2, num_nodes=4, draft_sampling="sample"), "traversal", (False, 4, 2, 17)),
    ],
)
def test_declared_sizes(config: dict[str, Any], rule: str, sizes: tuple[bool, int, int, int]) -> None:
    made = Standalone(Standalone.Config(**config), TARGET, "folder")
    assert made.rule == rule
    assert (made.chain, made.num_nodes, made.max_depth, made.draft_slots) == sizes
