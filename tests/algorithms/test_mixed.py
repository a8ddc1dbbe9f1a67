"""The union of two draft trees, which of two drafters is taken, and what cannot be mixed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec_kernels as kernels
from algorithms.mixed import Mixed
from algorithms.runtime.algorithm import DraftTree
from tests.algorithms.drafters import TARGET, load_random_drafters, mixed
from tests.algorithms.toy import Setup, engine_of

LENGTHS = torch.tensor([7, 0, 12])
ROOT = torch.tensor([3, 1, 4])


def random_tree(nodes: int, seed: int) -> DraftTree:
    """Trees over few tokens, so that two of them share paths; some nodes are unused, and siblings differ."""
    random = torch.Generator().manual_seed(seed)
    tokens, parents = torch.zeros(3, nodes, dtype=torch.int64), torch.full((3, nodes), -2, dtype=torch.int32)
    tokens[:, 0], parents[:, 0] = ROOT, -1
    for row in range(3):
        known: set[tuple[int, int]] = set()
        for node in range(1, nodes):
            used = [n for n in range(node) if parents[row, n] != -2]
            parent = used[int(torch.randint(len(used), (1,), generator=random))]
            token = int(torch.randint(3, (1,), generator=random))
            if (parent, token) not in known:
                known.add((parent, token))
                tokens[row, node], parents[row, node] = token, parent
    return DraftTree(tokens, kernels.build_tree(parents, LENGTHS, impl="reference"))


def paths(tokens: torch.Tensor, parents: torch.Tensor) -> list[list[tuple[int, ...]]]:
    """Of each row, the tokens from the root to every used node."""
    found = []
    for row_tokens, row_parents in zip(tokens.tolist(), parents.tolist(), strict=True):
        at: dict[int, tuple[int, ...]] = {0: ()}
        for node, parent in enumerate(row_parents):
            if node and parent >= 0:
                assert parent < node and parent in at
                at[node] = (*at[parent], row_tokens[node])
        found.append(list(at.values()))
    return found


def of_tree(tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and parents of a tree."""
    return tree.tokens, kernels.tree_parents(tree.links.mask, impl="reference")


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("seed", range(6))
def test_the_union_has_every_path_once(seed: int, impl: str) -> None:
    first, second = of_tree(random_tree(4 + seed, seed)), of_tree(random_tree(11 - seed, 100 + seed))
    tokens, parents = kernels.merge_trees(*first, *second, impl=impl)
    assert tokens.shape[1] == 14
    for merged, ours, theirs in zip(paths(tokens, parents), paths(*first), paths(*second), strict=True):
        assert len(merged) == len(set(merged)) and set(merged) == {*ours, *theirs}


def test_a_chain_and_a_tree_are_merged() -> None:
    chain = DraftTree(torch.cat([ROOT[:, None], torch.tensor([[1, 2, 0]] * 3)], 1), kernels.build_chain(LENGTHS, 4))
    tree = random_tree(9, 5)
    union = kernels.merge_trees(*of_tree(chain), *of_tree(tree), impl="reference")
    for merged, theirs in zip(paths(*union), paths(*of_tree(tree)), strict=True):
        assert set(merged) == {*theirs, (), (1,), (1, 2), (1, 2, 0)}


def test_the_first_is_taken_where_it_is_sure_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    load_random_drafters(monkeypatch)
    algorithm = mixed({"name": "suffix", "num_nodes": 9}, {"name": "eagle3", "steps": 4}, "take")
    first, second = random_tree(9, 1), random_tree(5, 2)
    ours = DraftTree(first.tokens, first.links, strength=torch.tensor([1.9, 2.0, 0.0]))
    for part, tree in zip(algorithm._parts, (ours, second), strict=True):  # type: ignore[attr-defined]
        monkeypatch.setattr(part, "propose", lambda batch, tree=tree: tree)
    algorithm._impl = "reference"  # type: ignore[attr-defined]
    batch: Any = type("Batch", (), {"lengths": LENGTHS})
    got = algorithm.propose(batch)
    assert got.tokens.shape == (3, 9)
    for row, tree in enumerate((second, first, second)):
        size = tree.tokens.shape[1]
        assert (got.tokens[row, :size] == tree.tokens[row]).all()
        assert (got.links.depth[row, :size] == tree.links.depth[row]).all() and not got.links.depth[row, size:].any()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"first": {"name": "sufix"}}, "algo.first.name: expected one of .*suffix.*, got 'sufix'"),
        ({"second": {"name": "mixed"}}, "algo.second.name: expected one of .*, got 'mixed'"),
        ({"first": {"name": "suffix", "nodes": 3}}, "algo.first: algo=suffix has no setting 'nodes'; it has num_nodes"),
        ({"first": {"name": "suffix", "window": 99}}, "algo.first: algo.window: expected 1 to 63, got 99"),
        ({"first": {"name": "ngram"}, "mode": "take"}, "tells its strength, got algo=ngram"),
        ({"first": {"name": "standalone", "rule": "block"}}, "got algo=standalone with rule block"),
        ({"first": {"name": "naive_eagle", "captured": False}}, "got algo=naive_eagle with a graph of its own"),
    ],
)
def test_what_cannot_be_mixed(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: str) -> None:
    load_random_drafters(monkeypatch)
    with pytest.raises(ValueError, match=expected):
        Mixed(Mixed.Config(**settings), TARGET, "random")


def test_there_is_room_for_what_the_larger_drafter_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of 4 levels of 4 tokens stores 12 behind the text, more than the 8 nodes that are verified."""
    load_random_drafters(monkeypatch)
    tree = {"name": "eagle", "steps": 4, "topk": 4, "num_nodes": 8}
    assert mixed({"name": "suffix", "num_nodes": 9}, tree, "merge").draft_slots == 12
    assert mixed({"name": "suffix", "num_nodes": 15}, tree, "merge").draft_slots == 15


def test_declared_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The union has the nodes of both and one root; of two trees of which one is taken, those of the larger one."""
    load_random_drafters(monkeypatch)
    tree = {"name": "eagle", "steps": 4, "topk": 4, "num_nodes": 8}
    for mode, nodes in (("merge", 13), ("take", 8)):
        algorithm = mixed({"name": "suffix", "num_nodes": 6}, tree, mode)
        assert (algorithm.num_nodes, algorithm.max_depth) == (nodes, 5)


def test_nodes_of_a_union_are_as_likely_as_their_drafter_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """What both draft is as likely as the first one says, and a node that is not used has no chance. A drafter that
    does not say is half as sure with each draft."""
    load_random_drafters(monkeypatch)
    algorithm = mixed({"name": "suffix", "num_nodes": 4}, {"name": "dflash", "block_size": 5})
    assert isinstance(algorithm, Mixed)
    algorithm._impl, algorithm._with_confidence = "reference", True
    trees = []
    for tokens, parents in (([9, 1, 2, 3], [-1, 0, 1, -2]), ([9, 1, 2, 5, 6], [-1, 0, 1, 1, 3])):
        tokens = torch.tensor([tokens] * 3)
        tokens[:, 0] = ROOT
        rows = torch.tensor([parents] * 3, dtype=torch.int32)
        trees.append(DraftTree(tokens, kernels.build_tree(rows, LENGTHS, impl="reference")))
    first = replace(trees[0], confidence=torch.tensor([[1.0, 0.9, 0.7, 0.6]] * 3))
    batch: Any = SimpleNamespace(lengths=LENGTHS, last_tokens=ROOT)
    for told, expected in ((True, [1.0, 0.9, 0.7, 0.0, 0.0, 0.0, 0.25, 0.125]), (False, None)):
        algorithm._with_confidence = told
        joined = algorithm._joined(batch, first, trees[1])
        assert paths(*of_tree(joined)) == [[(), (1,), (1, 2), (1, 5), (1, 5, 6)]] * 3
        assert (
            (joined.confidence is None)
            if expected is None
            else (joined.confidence.tolist() == [pytest.approx(expected) for _ in range(3)])
        )


def test_whose_drafter_is_asked_for() -> None:
    two = {"first": {"name": "eagle3"}, "second": {"name": "dflash"}}
    assert Mixed.drafter_for(Mixed.Config()) == "dflash"
    assert Mixed.drafter_for(Mixed.Config(second={"name": "ngram"})) is None
    with pytest.raises(ValueError, match="eagle3 and dflash both need a drafter: give one as algo.second.draft_path"):
        Mixed.drafter_for(Mixed.Config(**two))
    two["second"]["draft_path"] = "folder"
    assert Mixed.drafter_for(Mixed.Config(**two)) == "eagle3"


def test_a_smaller_tree_is_asked_of_a_drafter_that_has_more_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only of such a one: `propose_few` is made for fewer nodes than the algorithm's own."""
    load_random_drafters(monkeypatch)
    algorithm = mixed({"name": "suffix", "num_nodes": 5}, {"name": "dflash", "block_size": 4})
    assert isinstance(algorithm, Mixed)
    algorithm.attach(engine_of(algorithm, Setup(), TARGET).parts.resources)
    asked: list[tuple[str, int]] = []
    for part in algorithm._parts:
        monkeypatch.setattr(part, "propose", lambda _, part=part: asked.append((part.name, part.num_nodes)) or tree)
        monkeypatch.setattr(part, "propose_few", lambda _, few, part=part: asked.append((part.name, -few)) or tree)
    tree = random_tree(4, 1)
    batch: Any = SimpleNamespace(lengths=LENGTHS, last_tokens=ROOT)
    for nodes in (3, 4, 5):
        algorithm.propose_few(batch, nodes)
    assert asked == [("suffix", -3), ("dflash", -3), ("suffix", -4), ("dflash", 4), ("suffix", 5), ("dflash", 4)]


def test_the_likeliest_nodes_of_both_drafts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller tree of two is the root and the nodes of the largest confidence, each under its own parent."""
    load_random_drafters(monkeypatch)
    algorithm = mixed({"name": "suffix", "num_nodes": 5}, {"name": "dflash", "block_size": 4})
    algorithm.attach(engine_of(algorithm, Setup(), TARGET).parts.resources)
    parents = torch.tensor([[-1, 0, 1, 0, 3, 4, 1]] * 3, dtype=torch.int32)
    tokens = torch.tensor([[0, 11, 12, 13, 14, 15, 16]]).expand(3, -1).contiguous()
    tokens[:, 0] = ROOT
    sure = torch.tensor([[1.0, 0.9, 0.2, 0.8, 0.7, 0.6, 0.1]]).expand(3, -1).contiguous()
    tree = DraftTree(tokens, kernels.build_tree(parents, LENGTHS, impl="reference"), confidence=sure)
    monkeypatch.setattr(algorithm, "_joined", lambda *_: tree)
    for part in algorithm._parts:
        monkeypatch.setattr(part, "propose", lambda _: tree)
        monkeypatch.setattr(part, "propose_few", lambda _, few: tree)
    kept = algorithm.propose_few(SimpleNamespace(lengths=LENGTHS, last_tokens=ROOT), 5)
    assert [set(row) for row in paths(*of_tree(kept))] == [{(), (11,), (13,), (13, 14), (13, 14, 15)}] * 3


@pytest.mark.parametrize("first_is_larger", [False, True])
def test_a_first_drafter_that_is_just_sure_enough_is_taken(
    monkeypatch: pytest.MonkeyPatch, first_is_larger: bool
) -> None:
    """Row by row, at the threshold itself too; the smaller tree is filled up with unused nodes."""
    load_random_drafters(monkeypatch)
    algorithm = mixed({"name": "suffix", "num_nodes": 9}, {"name": "eagle3", "steps": 4}, "take")
    assert isinstance(algorithm, Mixed)
    engine_of(algorithm, Setup(), TARGET)
    ours, theirs = random_tree(9 if first_is_larger else 5, 1), random_tree(5 if first_is_larger else 9, 2)
    ours = replace(ours, strength=torch.tensor([2.0, 1.999, 2.001]))
    batch: Any = SimpleNamespace(lengths=LENGTHS, last_tokens=ROOT)
    joined = paths(*of_tree(algorithm._joined(batch, ours, theirs)))
    expected = [paths(*of_tree(tree)) for tree in (ours, theirs)]
    assert joined == [expected[0][0], expected[1][1], expected[0][2]]
