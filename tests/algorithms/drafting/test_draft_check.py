"""The check of the first draft: what it lets pass, and the first thing that it finds wrong."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algorithms.algorithm import DraftTree
from algorithms.drafting.draft_check import check_draft
from algorithms.engine.request import EngineError
from specdec_kernels import build_tree

VOCAB, NODES = 11, 5
LENGTHS = torch.tensor([6, 3, 9])
TREE, CHAIN = [-1, 0, 0, 2, -2], [-1, 0, 1, 2, 3]
"""The last node of the tree is unused."""


def batch() -> Any:
    """Two requests, and a padding row between them."""
    return SimpleNamespace(
        lengths=LENGTHS, last_tokens=torch.tensor([4, 0, 10]), active=torch.tensor([1, 0, 1], dtype=torch.int32)
    )


def links_of(parents: list[int], lengths: torch.Tensor = LENGTHS) -> Any:
    return build_tree(torch.tensor([parents] * 3, dtype=torch.int32), lengths, impl="reference")


def draft(parents: list[int], **changes: Any) -> DraftTree:
    """Tokens of the smallest and of the largest id."""
    tokens = torch.tensor([[4, 0, 10, 0, 10], [0] * 5, [10, 10, 0, 3, 0]])
    return replace(DraftTree(tokens, links_of(parents)), **changes)


def algorithm(parents: list[int], **changes: Any) -> Any:
    known = dict(
        name="toy", num_nodes=NODES, chain=parents is CHAIN, max_depth=4 if parents is CHAIN else 2, rule="target_only"
    )
    return SimpleNamespace(**(known | changes))


def of_padding(tensor: torch.Tensor, value: int) -> torch.Tensor:
    """`tensor` with `value` in the padding row."""
    changed = tensor.clone()
    changed[1] = value
    return changed


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_draft_as_it_is_declared_passes(parents: list[int]) -> None:
    """Whatever the links of a padding row are, and whatever token it begins with."""
    check_draft(algorithm(parents), batch(), draft(parents), VOCAB)
    links = links_of(parents)
    links = links._replace(depth=of_padding(links.depth, 7), positions=of_padding(links.positions, -3))
    for mask in (links.mask, of_padding(links.mask, 0)):
        given = draft(parents, links=links._replace(mask=mask))
        check_draft(algorithm(parents), batch(), replace(given, tokens=of_padding(given.tokens, 5)), VOCAB)


def test_nodes_that_node_0_does_not_lead_to_may_hold_any_depth() -> None:
    links = links_of(TREE)
    links.depth[:, 4], links.positions[:, 4] = 3, -1
    check_draft(algorithm(TREE), batch(), draft(TREE, links=links), VOCAB)
    with pytest.raises(EngineError, match="max_depth: the draft has a node at depth 2, expected at most max_depth = 1"):
        check_draft(algorithm(TREE, max_depth=1), batch(), draft(TREE), VOCAB)


@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize(
    ("field", "node", "value", "expected"),
    [
        ("tokens", 3, -1, "also in unused nodes, got -1 at node 3"),
        ("tokens", 4, VOCAB, f"expected ids from 0 to 10, also in unused nodes, got {VOCAB} at node 4"),
        ("tokens", 0, 7, r"node 0 must hold the last committed token, batch.last_tokens: expected (4|10), got 7"),
        ("mask", 0, 0, "node 0 does not see itself: expected links from build_chain or build_tree"),
        ("depth", 3, 9, "the draft has a node at depth 9, expected at most max_depth = 2"),
        ("positions", 2, 1, r"links.positions: expected batch.lengths \+ depth"),
    ],
)
def test_what_is_wrong_in_any_request_is_found(row: int, field: str, node: int, value: int, expected: str) -> None:
    given = draft(TREE)
    (given.tokens if field == "tokens" else getattr(given.links, field))[row, node] = value
    with pytest.raises(EngineError, match=f"^algo=toy: .*{expected}"):
        check_draft(algorithm(TREE), batch(), given, VOCAB)


@pytest.mark.parametrize("row", [0, 2])
def test_a_chain_has_the_depth_of_each_node(row: int) -> None:
    given = draft(CHAIN)
    given.links.depth[row, 3] = 2
    with pytest.raises(EngineError, match="the parent of node i is not always node i - 1, and chain is True"):
        check_draft(algorithm(CHAIN), batch(), given, VOCAB)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(draft_probs=None), "rule 'traversal': expected draft_probs, got None"),
        (dict(draft_probs=torch.ones(3, NODES, VOCAB)), r"draft_probs of shape \[3, 5, 11\], .* = \[3, 4, 11\]"),
        (dict(draft_probs=torch.ones(3, 4, VOCAB).double()), "draft_probs: expected dtype torch.float32"),
        (dict(draft_rows=torch.zeros(3, NODES)), "draft_rows: expected dtype torch.int32, got torch.float32"),
        (dict(draft_rows=torch.zeros(3, 4).int()), r"draft_rows of shape \[3, 4\], expected .* = \[3, 5\]"),
        (dict(path_probs=torch.ones(3, 4)), r"path_probs of shape \[3, 4\], expected .* = \[3, 5\]"),
        (dict(tokens=torch.zeros(3, NODES, dtype=torch.int32)), "tokens: expected dtype torch.int64, got torch.int32"),
        (dict(path_probs=[1.0]), "path_probs of type list, expected a tensor"),
        (dict(links=tuple(links_of(TREE))), "links of type tuple, expected TreeLinks"),
    ],
)
def test_what_a_sampled_draft_brings_with_it(changes: dict[str, Any], expected: str) -> None:
    drawn = algorithm(TREE, rule="traversal")
    check_draft(drawn, batch(), draft(TREE, draft_probs=torch.ones(3, NODES - 1, VOCAB)), VOCAB)
    rows = torch.zeros(3, NODES, dtype=torch.int32)
    check_draft(drawn, batch(), draft(TREE, draft_probs=torch.ones(3, 2, VOCAB), draft_rows=rows), VOCAB)
    with pytest.raises(EngineError, match=expected):
        check_draft(drawn, batch(), draft(TREE, **{"draft_probs": torch.ones(3, NODES - 1, VOCAB), **changes}), VOCAB)
