"""A chain of forced tokens in a draft: in front of a tree, and in the place of the first tokens of a chain."""

import pytest
import torch

from algorithms.algorithm import DraftTree
from algorithms.drafting.tree_drafter import insert_chain
from specdec_kernels import build_chain, build_tree


def tree_of(tokens: list[list[int]], parents: list[list[int]], lengths: torch.Tensor) -> DraftTree:
    links = build_tree(torch.tensor(parents, dtype=torch.int32), lengths, impl="reference")
    return DraftTree(torch.tensor(tokens), links)


@pytest.mark.parametrize(("num_nodes", "grafted"), [(256, 0), (254, 2), (40, 3)])
def test_a_chain_in_a_tree_of_any_size(num_nodes: int, grafted: int) -> None:
    """The tree is a root with many children, the chain has three tokens, and no more nodes fit than 256."""
    lengths, chain = torch.tensor([5]), torch.tensor([[901, 902, 903]])
    tree = tree_of([list(range(num_nodes))], [[-1] + [0] * (num_nodes - 1)], lengths)
    joined = insert_chain(tree, chain, lengths, False, "reference")
    assert joined.tokens.shape == (1, num_nodes)
    assert joined.tokens[0, : 1 + grafted].tolist() == [0, 901, 902, 903][: 1 + grafted]
    assert joined.links.depth[0, : 1 + grafted].tolist() == [0, 1, 2, 3][: 1 + grafted]
    assert joined.tokens[0, 1 + grafted :].tolist() == list(range(1, num_nodes - grafted))


def test_a_forced_token_may_have_any_id() -> None:
    """Token 0 is a token; -1 ends a row's chain."""
    lengths = torch.tensor([5, 5])
    tree = tree_of([[9, 7, 6, 5]] * 2, [[-1, 0, 1, 2]] * 2, lengths)
    joined = insert_chain(tree, torch.tensor([[0, 3], [4, -1]]), lengths, False, "reference")
    assert joined.tokens.tolist() == [[9, 0, 3, 7], [9, 4, 7, 6]]
    assert joined.links.depth.tolist() == [[0, 1, 2, 1], [0, 1, 1, 2]]


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_the_last_nodes_of_a_tree_give_way(impl: str) -> None:
    """What both have stands once, unused nodes leave no gap, and nodes keep their parents."""
    lengths = torch.tensor([5, 8])
    parents = [[-1, 0, -2, 1, 0, 3], [-1, 0, 1, 1, 2, 0]]
    tree = tree_of([[9, 7, 1, 2, 3, 4], [9, 5, 6, 7, 8, 9]], parents, lengths)
    joined = insert_chain(tree, torch.tensor([[7, 8], [0, 1]]), lengths, False, impl)
    assert joined.tokens.tolist() == [[9, 7, 8, 2, 3, 4], [9, 0, 1, 5, 6, 7]]
    expected = build_tree(torch.tensor([[-1, 0, 1, 1, 0, 3], [-1, 0, 1, 0, 3, 3]], dtype=torch.int32), lengths)
    for found, wanted in zip(joined.links, expected, strict=True):
        assert torch.equal(found, wanted)


def test_the_first_tokens_of_a_chain_are_replaced() -> None:
    """Token 0 is a token here too, and what is drafted behind the forced tokens stays."""
    lengths = torch.tensor([5, 5, 7])
    draft = DraftTree(torch.tensor([[9, 7, 6, 5], [9, 1, 2, 3], [8, 1, 2, 3]]), build_chain(lengths, 4))
    joined = insert_chain(draft, torch.tensor([[0, 4], [0, -1], [-1, -1]]), lengths, True, "reference")
    assert joined.tokens.tolist() == [[9, 0, 4, 5], [9, 0, 2, 3], [8, 1, 2, 3]] and joined.links is draft.links
