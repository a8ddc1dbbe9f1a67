"""Steps of fewer nodes than a drafter drafts, and what a step verifies."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec_kernels as kernels
from algorithms.runtime import step as steps
from algorithms.runtime.algorithm import Batch, DraftTree
from algorithms.runtime.sampling_params import SamplingNeeds
from algorithms.runtime.step import Step
from specdec_kernels import Accepted

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
    monkeypatch.setattr(steps, "PagedMixer", SimpleNamespace(over=lambda *given, **how: planned.append((given, how))))
    step = step_of(Drafter(chain, drawn_tree(chain, False)), nodes)
    step._parts.resources.deterministic = deterministic  # type: ignore[misc]
    step._parts.cache = "cache"  # type: ignore[misc, assignment]
    step.draft()
    step._mixer()
    ((given, how),) = planned
    links = step.tree.links
    assert given == (step._batch, links.positions, "cache", step._parts.resources)
    mode, phase, tree, paths = plan
    assert (how["mode"], how["phase"]) == (mode, phase)
    assert (how["mask"] is links.mask, how["depths"] is links.depth) == (tree, tree)
    assert (how["paths"] is not None) == paths and (not paths or how["paths"].shape == (2, 2, step._depth + 1))


@pytest.mark.parametrize(
    ("rule", "nodes", "grafted"), [("target_only", 7, True), ("block", 7, False), ("target_only", 1, False)]
)
def test_what_a_grammar_forces_is_put_into_drafts_that_were_not_drawn(
    monkeypatch: pytest.MonkeyPatch, rule: str, nodes: int, grafted: bool
) -> None:
    """And not into the root alone, behind which nothing is verified."""
    whole, given = drawn_tree(True, False), list[tuple[Any, ...]]()
    drafter = Drafter(True, whole)
    drafter.rule, drafter.num_nodes = rule, nodes  # type: ignore[misc]
    other = replace(whole, tokens=whole.tokens + 1)
    monkeypatch.setattr(steps, "graft_chain", lambda *what: given.append(what) or other)
    step = step_of(drafter, None)
    forced = torch.arange(6).view(3, 2)
    step._parts.state = SimpleNamespace(constraints=SimpleNamespace(forced=forced))  # type: ignore[misc, assignment]
    step.drafted = step.tree = whole
    step.graft()
    assert step.tree is (other if grafted else whole)
    assert [len(what) for what in given] == [5] * grafted
    for tree, chain, lengths, is_chain, impl in given:
        assert tree is whole and chain.tolist() == [[0, 1], [2, 3]] and lengths is LENGTHS
        assert is_chain and impl == "reference"
    links = step.tree.links
    assert step.nodes.tolist() == torch.stack([step.tree.tokens, links.first_child, links.next_sibling], 1).tolist()


@pytest.mark.parametrize(
    ("nodes", "constrained", "learnt"), [(7, False, True), (2, False, True), (1, False, False), (7, True, False)]
)
def test_sizes_are_learnt_from_drafts(
    monkeypatch: pytest.MonkeyPatch, nodes: int, constrained: bool, learnt: bool
) -> None:
    """A step without one says nothing, nor does one whose drafts a grammar forces."""
    told: list[Any] = []
    step = step_of(Drafter(False, drawn_tree(False, False)), nodes)
    step._needs = SamplingNeeds(constrained=constrained)
    step._parts.sizing = SimpleNamespace(learn=lambda *what: told.append(what))  # type: ignore[misc, assignment]
    step.tree, step.targets = drawn_tree(False, False), None
    accepted: Any = object()
    monkeypatch.setattr(Step, "_accepted", lambda self: accepted)
    step.accept()
    assert step.accepted is accepted
    assert told == [(step._batch, step.tree, accepted, nodes)] * learnt


@pytest.mark.parametrize(
    ("nodes", "backlog", "kept"), [(1, True, True), (2, True, False), (7, True, False), (1, False, False)]
)
@pytest.mark.parametrize("constrained", [False, True])
def test_what_a_plain_step_computes_is_kept_for_the_drafter(
    monkeypatch: pytest.MonkeyPatch, nodes: int, backlog: bool, kept: bool, constrained: bool
) -> None:
    """Where steps differ in size; all others show the drafter what was committed."""
    told = list[tuple[Any, ...]]()
    step = step_of(Drafter(True, drawn_tree(True, False)), nodes)
    step._needs = SamplingNeeds(constrained=constrained)
    parts: Any = step._parts
    parts.backlog = SimpleNamespace(keep=lambda *what: told.append(what)) if backlog else None
    parts.observe = lambda seen: told.append((seen,))
    batch = step._batch = Batch(LENGTHS, LAST, *[None] * 6)  # type: ignore[arg-type, list-item]
    step.tree = drawn_tree(True, False)
    step.accepted = Accepted(*range(6))  # type: ignore[arg-type]
    given: dict[str, Any] = dict(start="start", tokens=torch.zeros(2, 3), next_tokens="next", positions="positions")
    committed = SimpleNamespace(**given, counts="counts", table="table")
    monkeypatch.setattr(steps, "commit_step", lambda *_, **__: committed)
    step.hidden, step.features = torch.rand(2, nodes, 4), [torch.rand(2, nodes, 4)]
    step.commit()
    assert step.table == "table" and len(told) == 1
    found = told[0] if kept else (told[0][0].batch, told[0][0].hidden, told[0][0].features)
    assert torch.equal(found[1], step.hidden[:, :3]) and torch.equal(found[2][0], step.features[0][:, :3])
    if kept:
        assert found[0] is batch
    else:
        (seen,) = told[0]
        assert seen.batch == replace(batch, lengths="start") and seen.altered == constrained and seen.prompts is None
        assert {name: getattr(seen, name) for name in ("tokens", "next_tokens", "positions", "counts")} == {
            "tokens": committed.tokens, "next_tokens": "next", "positions": "positions", "counts": "counts"
        }  # fmt: skip


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
