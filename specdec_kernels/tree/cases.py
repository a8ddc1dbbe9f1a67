"""Named inputs of the tree family."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Case, Maker


def random_parents(make: Maker, batch: int, num_nodes: int, unused: bool = False) -> torch.Tensor:
    """[batch, num_nodes] int32: each node under a uniformly drawn earlier one, or unused now and then."""
    node = torch.arange(num_nodes)
    draws = torch.rand(batch, num_nodes, generator=make.generator)
    parents = (draws * node).long()
    parents[:, 0] = -1
    if unused:
        orphan = torch.rand(batch, num_nodes, generator=make.generator) < 0.3
        bad = torch.where(draws < 0.5, -1, num_nodes + 7)
        parents = torch.where(orphan, bad, parents)
    return parents.to(make.device, torch.int32)


def _tree(make: Maker, batch: int, num_nodes: int, unused: bool = False) -> dict[str, Any]:
    parents = random_parents(make, batch, num_nodes, unused)
    return dict(parents=parents, lengths=make.integers(0, 1 << 40, batch))


def _shaped(make: Maker, parents: list[int]) -> dict[str, Any]:
    return dict(parents=make.tensor([parents], torch.int32), lengths=make.integers(0, 100, 1))


def _chain(make: Maker, batch: int, num_nodes: int) -> dict[str, Any]:
    return dict(lengths=make.integers(0, 1 << 40, batch), num_nodes=num_nodes)


_STAR = [-1] + [0] * 16
_DEEP = [-1] + list(range(69))

CASES = (
    Case("tree_empty_batch", "build_tree", partial(_tree, batch=0, num_nodes=5), "launch on an empty grid"),
    Case("tree_root_only", "build_tree", partial(_tree, batch=3, num_nodes=1), "a tree without drafts"),
    Case(
        "tree_odd",
        "build_tree",
        partial(_tree, batch=3, num_nodes=7),
        "masks of sizes off the block",
        gate=True,
    ),
    Case(
        "tree_unused",
        "build_tree",
        partial(_tree, batch=4, num_nodes=9, unused=True),
        "padding becomes a sibling",
    ),
    Case("tree_star", "build_tree", partial(_shaped, parents=_STAR), "sibling order"),
    Case("tree_deep", "build_tree", partial(_shaped, parents=_DEEP), "ancestor walk cut short"),
    Case(
        "tree_64",
        "build_tree",
        partial(_tree, batch=2, num_nodes=64),
        "the word's sign bit",
        gate=True,
        bench=True,
    ),
    Case("tree_65", "build_tree", partial(_tree, batch=2, num_nodes=65), "first bit of the second word"),
    Case(
        "tree_130",
        "build_tree",
        partial(_tree, batch=2, num_nodes=130),
        "words not a power of two",
        gate=True,
    ),
    Case("tree_256", "build_tree", partial(_tree, batch=1, num_nodes=256), "the largest tree", bench=True),
    Case(
        "tree_wide_batch", "build_tree", partial(_tree, batch=300, num_nodes=6), "several blocks of requests"
    ),
    Case(
        "chain_empty_batch", "build_chain", partial(_chain, batch=0, num_nodes=4), "launch on an empty grid"
    ),
    Case("chain_root_only", "build_chain", partial(_chain, batch=2, num_nodes=1), "last node's child"),
    Case(
        "chain_16", "build_chain", partial(_chain, batch=5, num_nodes=16), "positions", gate=True, bench=True
    ),
    Case("chain_64", "build_chain", partial(_chain, batch=2, num_nodes=64), "shift by the word size"),
    Case(
        "chain_130",
        "build_chain",
        partial(_chain, batch=2, num_nodes=130),
        "full words before the last",
        gate=True,
    ),
)
