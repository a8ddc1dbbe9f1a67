"""What the ranks of a run tell each other, as far as one process can see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.runtime import tensor_parallel
from algorithms.runtime.algorithm import DraftTree
from specdec_kernels import Accepted, build_chain

LENGTHS = torch.tensor([4, 7])
OTHERS = {"draft_probs": torch.ones(2, 2, 5), "confidence": torch.full((2, 3), 0.5)}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What rank 0 sends; its tensors are one more than this rank's."""
    sent: list[Any] = []
    monkeypatch.setattr(tensor_parallel, "parallel", lambda: True)
    monkeypatch.setattr(
        tensor_parallel, "from_rank_0", lambda given: sent.extend(given) or [each + 1 for each in given]
    )
    return sent


def chain(nodes: int, **others: torch.Tensor) -> DraftTree:
    return DraftTree(torch.arange(2 * nodes).view(2, nodes), build_chain(LENGTHS, nodes, impl="reference"), **others)


@pytest.mark.parametrize("others", [{}, OTHERS, {"draft_rows": torch.zeros(2, 3).int()}], ids=["bare", "drawn", "rows"])
def test_the_draft_of_rank_0_is_taken_whole(sent: list[Any], others: dict[str, torch.Tensor]) -> None:
    own = chain(3, **others)
    agreed = tensor_parallel.agree_on_draft(own)
    assert torch.equal(agreed.tokens, own.tokens + 1)
    assert all(torch.equal(left, right + 1) for left, right in zip(agreed.links, own.links, strict=True))
    for name in ("draft_probs", "draft_rows", "confidence"):
        before, after = getattr(own, name), getattr(agreed, name)
        assert (after is None) if before is None else torch.equal(after, before + 1)
    assert len(sent) == 6 + len(others)


def test_node_0_alone_needs_no_agreement(sent: list[Any]) -> None:
    own = chain(1)
    assert tensor_parallel.agree_on_draft(own) is own and not sent


def test_the_acceptance_of_rank_0_is_taken(sent: list[Any]) -> None:
    own = Accepted(*(torch.tensor([place]) for place in range(len(Accepted._fields) - 1)), None)
    agreed = tensor_parallel.agree_on_acceptance(own)
    assert [None if each is None else each.tolist() for each in agreed] == [
        None if each is None else [int(each) + 1] for each in own
    ]


def test_one_process_agrees_with_itself() -> None:
    own, accepted = chain(3), Accepted(*(torch.tensor([1]) for _ in Accepted._fields))
    assert tensor_parallel.agree_on_draft(own) is own and tensor_parallel.agree_on_acceptance(accepted) is accepted
    assert tensor_parallel.own_share(LENGTHS, 0) is LENGTHS


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_own_share(monkeypatch: pytest.MonkeyPatch, sent: list[Any], rank: int) -> None:
    monkeypatch.setattr(tensor_parallel.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(tensor_parallel.dist, "get_rank", lambda: rank)
    whole = torch.arange(12).view(3, 4)
    assert torch.equal(tensor_parallel.own_share(whole, 1), whole[:, 2 * rank : 2 * rank + 2])
