"""Steps of fewer nodes than a drafter drafts, and what a step verifies."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec_kernels as kernels
from algorithms.algorithm import Batch, DraftTree
from algorithms.attention import memory
from algorithms.step.sampling_params import SamplingNeeds
from algorithms.step.step import Step

LENGTHS, LAST = torch.tensor([4, 9]), torch.tensor([7, 8])
PARENTS = [-1, 0, 0, 1, 3, 2, 4]
VOCAB = 6


def sampled_tree(chain: bool, by_row: bool) -> DraftTree:
    """Seven nodes whose tokens, probabilities and path_probs name the node."""
    nodes = torch.arange(7)
    tokens = torch.cat([LAST[:, None], nodes[1:].expand(2, -1)], 1)
    parents = torch.tensor([list(range(-1, 6)) if chain else PARENTS] * 2, dtype=torch.int32)
    probs = nodes[:6, None].expand(2, 6, VOCAB).float()
    rows = (nodes.flip(0) - 1).expand(2, -1).int() if by_row else None
    links = kernels.build_tree(parents, LENGTHS, impl="reference")
    return DraftTree(tokens, links, probs, rows, path_probs=0.5 ** nodes.float().expand(2, -1))


class Drafter:
    """Records how it was asked."""

    name, rule, target_layers, num_nodes, observes_verified = "toy", "target_only", (), 7, False

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
    parts: Any = SimpleNamespace(algorithm=drafter, resources=resources, state=None, sizing=None, backlog=None)
    unused: Any = None
    active = torch.ones(2, dtype=torch.int32)
    batch = Batch(LENGTHS, LAST, unused, unused, active, unused, slice(0, 2), 64)
    return Step(parts, batch, SamplingNeeds(), checked, nodes)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("nodes", [2, 4, 6])
def test_a_smaller_step_verifies_the_first_nodes(chain: bool, by_row: bool, nodes: int) -> None:
    """With what they were drawn from: of a chain the distributions before them, of a tree the rows that they name."""
    whole = sampled_tree(chain, by_row)
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
    assert tree.path_probs is not None and tree.path_probs.tolist() == [[0.5**node for node in range(nodes)]] * 2
    assert tree.draft_probs is not None
    if by_row:
        assert tree.draft_rows is not None and tree.draft_rows.tolist() == [[5 - node for node in range(nodes)]] * 2
        assert tree.draft_probs.shape[1] == 6
    else:
        assert tree.draft_rows is None and tree.draft_probs[0, :, 0].tolist() == list(range(nodes - 1))


def test_a_plain_step_asks_for_no_draft() -> None:
    drafter = Drafter(False, sampled_tree(False, True))
    step = step_of(drafter, 1)
    step.draft()
    assert drafter.asked == [] and step.tree.tokens.tolist() == [[7], [8]] and step._chain and step._depth == 0
    assert step.tree.links.positions.tolist() == [[4], [9]]


@pytest.mark.parametrize(
    ("chain", "nodes", "deterministic", "plan"),
    [
        (True, 7, False, ("chain", "verify", False, False)),
        (True, 1, True, ("chain", "decode", False, False)),
        (False, 7, False, ("tree", "verify", True, False)),
        (False, 2, True, ("tree", "verify", True, True)),
        (False, 1, True, ("chain", "decode", False, False)),
    ],
)
def test_one_node_is_decoded_and_more_are_verified(
    monkeypatch: pytest.MonkeyPatch, chain: bool, nodes: int, deterministic: bool, plan: tuple[Any, ...]
) -> None:
    """By (mode, phase), with the mask and depths of a tree, and its paths where bits must be the same."""
    planned: list[Any] = []
    monkeypatch.setattr(memory.PagedMemory, "over", lambda *given, **how: planned.append((given, how)))
    step = step_of(Drafter(chain, sampled_tree(chain, False)), nodes)
    step._parts.resources.deterministic = deterministic  # type: ignore[misc]
    cache: Any = SimpleNamespace(kv=None, config=SimpleNamespace(sliding_windows=()))
    step._parts.memory = memory.PagedMemory(cache, step._parts.resources)  # type: ignore[misc]
    step.draft()
    step._nodes()
    ((given, how),) = planned
    links = step.tree.links
    assert given == (step._parts.memory, step._batch, links.positions)
    mode, phase, tree, paths = plan
    assert (how.get("mode", "chain"), how["phase"]) == (mode, phase)
    assert (how.get("mask") is links.mask, how.get("depths") is links.depth) == (tree, tree)
    nodes_of_paths = how.get("paths")
    assert (nodes_of_paths is not None) == paths and (not paths or nodes_of_paths.shape == (2, 2, step._depth + 1))


@pytest.mark.parametrize(
    ("nodes", "constrained", "probs", "width"),
    [(7, False, True, 3 + 7), (7, False, False, 3), (1, False, True, 0), (7, True, True, 0)],
)
def test_the_table_has_what_draft_lengths_are_learnt_from(
    nodes: int, constrained: bool, probs: bool, width: int
) -> None:
    """Accepted nodes and path probabilities of a tree; nothing without a draft, nor where a grammar forces drafts."""
    step = step_of(Drafter(False, sampled_tree(False, False)), nodes)
    step._needs = SamplingNeeds(constrained=constrained)
    step._parts.sizing = object()  # type: ignore[misc, assignment]
    tree = sampled_tree(False, False)
    step.tree = tree if probs else replace(tree, path_probs=None)
    step.accepted = SimpleNamespace(nodes=torch.tensor([[0, 2, -1], [0, 1, 4]], dtype=torch.int32))  # type: ignore[assignment]
    found = step._evidence()
    assert sum(part.shape[1] for part in found.values()) == width
    if width > 3:
        assert found["path"].tolist() == [[0, 2, -1], [0, 1, 4]]
        assert tree.path_probs is not None and torch.equal(
            found["path_probs"].int().view(torch.float32), tree.path_probs
        )
