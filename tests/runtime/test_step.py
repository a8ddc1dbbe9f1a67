"""Steps of fewer nodes than a drafter drafts, and what a step verifies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec_kernels as kernels
from algorithms.runtime import step as steps
from algorithms.runtime.algorithm import DraftTree
from algorithms.runtime.sampling_params import SamplingNeeds
from algorithms.runtime.step import Step

LENGTHS, LAST = torch.tensor([4, 9]), torch.tensor([7, 8])
PARENTS = [-1, 0, 0, 1, 3, 2, 4]
VOCAB = 6


def drawn_tree(chain: bool, by_row: bool) -> DraftTree:
    """Seven nodes whose tokens, probabilities and confidence name the node."""
    nodes = torch.arange(7)
    tokens = torch.cat([LAST[:, None], nodes[1:].expand(2, -1)], 1)
    parents = torch.tensor([list(range(-1, 6)) if chain else PARENTS] * 2, dtype=torch.int32)
    probs = nodes[:6, None].expand(2, 6, VOCAB).float()
    rows = (nodes.flip(0) - 1).expand(2, -1).int() if by_row else None
    links = kernels.build_tree(parents, LENGTHS, impl="reference")
    return DraftTree(tokens, links, probs, rows, confidence=0.5 ** nodes.float().expand(2, -1))


class Drafter:
    """Records how it was asked."""

    name, rule, capture, num_nodes = "toy", "target_only", (), 7

    def __init__(self, chain: bool, tree: DraftTree) -> None:
        self.chain, self.max_depth, self.tree = chain, 6 if chain else 4, tree
        self.asked: list[int] = []

    def propose(self, batch: Any) -> DraftTree:
        self.asked.append(7)
        return self.tree

    def propose_few(self, batch: Any, nodes: int) -> DraftTree:
        self.asked.append(nodes)
        return self.tree


def step_of(drafter: Drafter, nodes: int | None, checked: bool = False) -> Step:
    config = SimpleNamespace(vocab_size=VOCAB)
    resources = SimpleNamespace(impl="reference", target=SimpleNamespace(config=config))
    parts: Any = SimpleNamespace(algorithm=drafter, resources=resources, sizing=None, backlog=None)
    active = torch.ones(2, dtype=torch.int32)
    batch: Any = SimpleNamespace(lengths=LENGTHS, last_tokens=LAST, active=active, rows=slice(0, 2))
    return Step(parts, batch, SamplingNeeds(), checked, nodes)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("nodes", [2, 4, 6])
def test_a_smaller_step_verifies_the_first_nodes(chain: bool, by_row: bool, nodes: int) -> None:
    """With what they were drawn from: of a chain the distributions before them, of a tree the rows that they name."""
    whole = drawn_tree(chain, by_row)
    drafter = Drafter(chain, whole)
    step = step_of(drafter, nodes)
    step.draft()
    tree = step.tree
    assert drafter.asked == [nodes] and step._depth == min(drafter.max_depth, nodes - 1) and step._chain == chain
    assert torch.equal(tree.tokens, whole.tokens[:, :nodes])
    parents = (list(range(-1, 6)) if chain else PARENTS)[:nodes]
    expected = kernels.build_tree(torch.tensor([parents] * 2, dtype=torch.int32), LENGTHS, impl="reference")
    for name in ("first_child", "next_sibling", "positions", "depth"):
        assert torch.equal(getattr(tree.links, name), getattr(expected, name)), name
    assert tree.confidence is not None and tree.confidence.tolist() == [[0.5**node for node in range(nodes)]] * 2
    assert tree.draft_probs is not None
    if by_row:
        assert tree.draft_rows is not None and tree.draft_rows.tolist() == [[5 - node for node in range(nodes)]] * 2
        assert tree.draft_probs.shape[1] == 6
    else:
        assert tree.draft_rows is None and tree.draft_probs[0, :, 0].tolist() == list(range(nodes - 1))


def test_a_drafter_may_draft_as_few_as_it_is_asked_for() -> None:
    small = step_of(Drafter(True, drawn_tree(True, False)), 4)
    small.draft()
    drafter = Drafter(True, small.tree)
    again = step_of(drafter, 4)
    again.draft()
    assert again.tree is small.tree


def test_a_plain_step_asks_for_no_draft() -> None:
    drafter = Drafter(False, drawn_tree(False, True))
    step = step_of(drafter, 1)
    step.draft()
    assert drafter.asked == [] and step.tree.tokens.tolist() == [[7], [8]] and step._chain and step._depth == 0
    assert step.tree.links.positions.tolist() == [[4], [9]]


@pytest.mark.parametrize("checked", [False, True])
def test_a_step_of_all_nodes_takes_the_draft_as_it_is(monkeypatch: pytest.MonkeyPatch, checked: bool) -> None:
    """A checked step looks at it first."""
    whole, looked = drawn_tree(False, True), list[tuple[Any, ...]]()
    monkeypatch.setattr(steps, "check_draft", lambda *arguments: looked.append(arguments))
    drafter = Drafter(False, whole)
    for nodes in (None, 7):
        step = step_of(drafter, nodes, checked)
        step.draft()
        assert step.tree is step.drafted is whole
    assert drafter.asked == [7, 7] and len(looked) == 2 * checked
    assert not checked or looked[-1] == (drafter, step._batch, whole, VOCAB)
