"""A chain that is put into a draft tree of fixed size."""

from dataclasses import replace

import torch
from torch import Tensor

import specdec_kernels as kernels
from algorithms.algorithm import DraftTree
from specdec_kernels.tree import MAX_NODES


def insert_chain(tree: DraftTree, chain: Tensor, lengths: Tensor, is_chain: bool, impl: str) -> DraftTree:
    """`tree` with the tokens of `chain` [B, M] int64 after its root, -1 after the last of a row; M < N.

    It keeps its number of nodes N: the last nodes of a tree are dropped, and the first tokens of a chain are
    replaced. `lengths` [B] are the positions of the roots. Tree and chain have at most 256 nodes together; the end
    of a longer chain is left out.
    """
    if is_chain:
        drafts = tree.tokens[:, 1 : 1 + chain.shape[1]]
        rest = tree.tokens[:, 1 + chain.shape[1] :]
        return replace(tree, tokens=torch.cat([tree.tokens[:, :1], torch.where(chain < 0, drafts, chain), rest], 1))
    chain = chain[:, : MAX_NODES - tree.tokens.shape[1]]
    place = torch.arange(-1, chain.shape[1], device=chain.device, dtype=torch.int32)
    given = torch.cat([torch.ones_like(tree.tokens[:, :1]), chain], 1) >= 0
    parents = torch.where(given, place, kernels.UNUSED_PARENT).int()
    both = torch.cat([tree.tokens[:, :1], chain.clamp(min=0)], 1)
    drafted = kernels.tree_parents(tree.links.mask, impl=impl)
    tokens, parents = kernels.merge_trees(both, parents, tree.tokens, drafted, impl=impl)
    tokens, parents = _first_nodes(tokens, parents, tree.tokens.shape[1])
    return replace(tree, tokens=tokens, links=kernels.build_tree(parents, lengths, impl=impl))


def _first_nodes(tokens: Tensor, parents: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` nodes that are in the tree: tokens and parents [B, count], as `build_tree` takes them."""
    kept = parents != kernels.UNUSED_PARENT
    number = kept.long().cumsum(1) - 1
    # Every other node goes to a column past the last.
    column = torch.where(kept, number, count).clamp(max=count)
    parent = number.gather(1, parents.clamp(min=0).long()).int()
    shape = (len(tokens), count + 1)
    moved = tokens[:, :1].expand(shape).scatter(1, column, tokens)
    above = torch.full(shape, kernels.UNUSED_PARENT, dtype=torch.int32, device=tokens.device).scatter(1, column, parent)
    return moved[:, :count].contiguous(), above[:, :count].contiguous()
