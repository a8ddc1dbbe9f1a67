"""The union of two draft trees, and what cannot be mixed."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec_kernels as kernels
from algorithms.algorithm import DraftTree
from algorithms.mixed import Mixed
from tests.algorithms.drafters import TARGET, mixed
from tests.algorithms.toy import Setup, engine_of

pytestmark = pytest.mark.usefixtures("random_drafters")

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


def test_declared_sizes() -> None:
    """The union has the nodes of both and one root. A tree of 4 levels of 4 tokens stores 12 after the history, more
    than the 8 nodes that are verified."""
    tree = {"name": "eagle", "steps": 4, "topk": 4, "num_nodes": 8}
    for nodes, sizes in ((9, (16, 8, 12)), (15, (22, 14, 15))):
        made = mixed({"name": "suffix", "num_nodes": nodes}, tree)
        assert (made.num_nodes, made.max_depth, made.draft_slots) == sizes


def test_nodes_of_a_union_are_as_likely_as_their_drafter_says() -> None:
    """What both draft is as likely as the first one says, and a node that is not used has no chance. A drafter that
    does not say is half as sure with each draft."""
    algorithm = mixed({"name": "suffix", "num_nodes": 4}, {"name": "dflash", "block_size": 5})
    assert isinstance(algorithm, Mixed)
    algorithm._impl, algorithm._needs_path_probs = "reference", True
    trees = []
    for tokens, parents in (([9, 1, 2, 3], [-1, 0, 1, -2]), ([9, 1, 2, 5, 6], [-1, 0, 1, 1, 3])):
        tokens = torch.tensor([tokens] * 3)
        tokens[:, 0] = ROOT
        rows = torch.tensor([parents] * 3, dtype=torch.int32)
        trees.append(DraftTree(tokens, kernels.build_tree(rows, LENGTHS, impl="reference")))
    first = replace(trees[0], path_probs=torch.tensor([[1.0, 0.9, 0.7, 0.6]] * 3))
    batch: Any = SimpleNamespace(lengths=LENGTHS, last_tokens=ROOT)
    for told, expected in ((True, [1.0, 0.9, 0.7, 0.0, 0.0, 0.0, 0.25, 0.125]), (False, None)):
        algorithm._needs_path_probs = told
        joined = algorithm._joined(batch, first, trees[1])
        assert paths(*of_tree(joined)) == [[(), (1,), (1, 2), (1, 5), (1, 5, 6)]] * 3
        assert (
            (joined.path_probs is None)
            if expected is None
            else (joined.path_probs.tolist() == [pytest.approx(expected) for _ in range(3)])
        )


def test_whose_drafter_is_asked_for() -> None:
    two = {"first": {"name": "eagle3"}, "second": {"name": "dflash"}}
    assert Mixed.drafter_for(Mixed.Config()) == "dflash"
    assert Mixed.drafter_for(Mixed.Config(second={"name": "ngram"})) is None
    with pytest.raises(ValueError, match="eagle3 and dflash both need a drafter: give one as .algo.second.draft_path="):
        Mixed.drafter_for(Mixed.Config(**two))
    two["second"]["draft_path"] = "folder"
    assert Mixed.drafter_for(Mixed.Config(**two)) == "eagle3"


def test_the_likeliest_nodes_of_both_drafts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller tree of two is the root and the nodes of the largest path_probs, each under its own parent."""
    algorithm = mixed({"name": "suffix", "num_nodes": 5}, {"name": "dflash", "block_size": 4})
    algorithm.bind(engine_of(algorithm, Setup(), TARGET).parts.resources)
    parents = torch.tensor([[-1, 0, 1, 0, 3, 4, 1]] * 3, dtype=torch.int32)
    tokens = torch.tensor([[0, 11, 12, 13, 14, 15, 16]]).expand(3, -1).contiguous()
    tokens[:, 0] = ROOT
    sure = torch.tensor([[1.0, 0.9, 0.2, 0.8, 0.7, 0.6, 0.1]]).expand(3, -1).contiguous()
    tree = DraftTree(tokens, kernels.build_tree(parents, LENGTHS, impl="reference"), path_probs=sure)
    monkeypatch.setattr(algorithm, "_joined", lambda *_: tree)
    for part in algorithm.inner:
        monkeypatch.setattr(part, "propose", lambda _: tree)
        monkeypatch.setattr(part, "propose_few", lambda _, few: tree)
    kept = algorithm.propose_few(SimpleNamespace(lengths=LENGTHS, last_tokens=ROOT), 5)
    assert [set(row) for row in paths(*of_tree(kept))] == [{(), (11,), (13,), (13, 14), (13, 14, 15)}] * 3
