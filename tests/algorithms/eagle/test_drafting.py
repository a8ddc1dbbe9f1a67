"""What EAGLE's drafters declare, ask of the backend, and refuse."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms.eagle.drafting import Eagle, Eagle3, NaiveEagle
from tests.algorithms.drafters import TARGET, eagle3_head, eagle_head

HEADS = {"EAGLE": eagle_head, "EAGLE-3": eagle3_head, None: eagle3_head}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Random heads in the place of folders; what was asked for."""
    asked: list[Any] = []
    monkeypatch.setattr("algorithms.eagle.loading.load_eagle", lambda *given: asked.append(given) or HEADS[given[-1]]())
    monkeypatch.setattr(
        "algorithms.eagle.loading.read_eagle",
        lambda *given: asked.append(given) or ("folder", HEADS[given[-1]]().config, {}),
    )
    return asked


@pytest.mark.parametrize(("topk", "mode"), [(1, "chain"), (2, "tree")])
@pytest.mark.parametrize(("kind", "head"), [(Eagle, "EAGLE"), (Eagle3, "EAGLE-3"), (NaiveEagle, None)])
def test_the_backend_serves_prompts_and_the_shape_of_the_draft(
    folder: list[Any], kind: type[Eagle], head: str | None, topk: int, mode: str
) -> None:
    config: Any = kind.Config(topk=topk)
    calls = kind.check(config, TARGET, "folder")
    assert calls.config == HEADS[head]().config.decoder and calls.modes == {"prefill": "chain", "draft": mode}
    made = kind(config, TARGET, "folder")
    weight = TARGET.model.model.norm.weight
    assert folder == [("folder", TARGET, head), ("folder", TARGET, weight.device, weight.dtype, head)]
    assert made.chain == (topk == 1) and made.target_layers == HEADS[head]().target_layers


@pytest.mark.parametrize("topk", [37, 38])
def test_a_token_offers_no_more_children_than_the_head_knows(topk: int) -> None:
    config = Eagle3.Config(topk=topk, num_nodes=20)
    if topk == 37:
        assert Eagle3.check(config, TARGET, "folder") and Eagle3(config, TARGET, "folder").num_nodes == 20
        return
    for make in (Eagle3.check, Eagle3):
        with pytest.raises(ValueError, match="algo.topk: the drafter knows 37 tokens, got 38"):
            make(config, TARGET, "folder")


@pytest.mark.parametrize(
    ("config", "rule", "sizes"),
    [
        (dict(), "target_only", (True, 4, 3, 2)),
        (dict(topk=3, num_nodes=12), "target_only", (False, 12, 3, 6)),
        (dict(draft_sampling="sample"), "block", (True, 4, 3, 2)),
        (dict(steps=9, topk=2, num_nodes=4, draft_sampling="sample"), "traversal", (False, 4, 2, 16)),
    ],
)
def test_declared_sizes(config: dict[str, Any], rule: str, sizes: tuple[bool, int, int, int]) -> None:
    made = Eagle(Eagle.Config(**config), TARGET, "folder")
    assert made.rule == rule
    assert (made.chain, made.num_nodes, made.max_depth, made.draft_slots) == sizes
