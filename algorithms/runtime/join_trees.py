"""Joins draft trees: the union of two, and a chain that is put into a tree of fixed size."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import specdec_kernels as kernels
from algorithms.runtime.algorithm import DraftTree

# Odd multipliers of the hash of a path. Equal hashes of different paths would only make a wrong draft.
HASH_TOKEN, HASH_DEPTH, HASH_MIX = 0x2545F4914F6CDD1D, 0x1B873593CC9E2D51, 0x369DEA0F31A53F85
_UNUSED = -2
"""Parent of a node outside of the tree."""


def merge_trees(first: DraftTree, second: DraftTree) -> tuple[Tensor, Tensor]:
    """tokens [B, N] and parents [B, N] int32 of the union of two trees of Na and Nb nodes, with N = Na + Nb - 1.

    The nodes of `first` keep their numbers. A node of `second` whose path from the root `first` has too is unused.
    """
    paths, own, used = (torch.cat([a, b[:, 1:]], 1) for a, b in zip(_paths(first), _paths(second), strict=True))
    tokens = torch.cat([first.tokens, second.tokens[:, 1:]], 1)
    node = torch.arange(tokens.shape[1], device=tokens.device)
    same = (paths[:, :, None] == paths[:, None, :]) & used[:, None, :]
    kept = used & ~(same & (node < node[:, None])).any(-1)
    above = ((paths - own)[:, :, None] == paths[:, None, :]) & kept[:, None, :]
    parents = torch.where(kept, above.int().argmax(-1), -2)
    return tokens, torch.where(node == 0, -1, parents).int()


def _paths(tree: DraftTree) -> tuple[Tensor, Tensor, Tensor]:
    """[B, N] each: a hash of the tokens from the root to the node, the node's own part of this sum, and whether the
    node is in the tree."""
    links, tokens = tree.links, tree.tokens
    own = (tokens + 1) * HASH_TOKEN + (links.depth.long() + 1) * HASH_DEPTH
    own = (own ^ (own >> 29)) * HASH_MIX
    own = own ^ (own >> 32)
    return (sees(tree) * own[:, None, :]).sum(-1), own, used(tree)


def sees(tree: DraftTree) -> Tensor:
    """[B, N, N] int64: 1 where node i sees node j: itself and its ancestors."""
    node = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    return (tree.links.mask[:, :, node // 64] >> (node % 64)) & 1


def used(tree: DraftTree) -> Tensor:
    """[B, N] bool: a node outside of the tree has depth 0 and is not the root."""
    return (tree.links.depth > 0) | (torch.arange(tree.tokens.shape[1], device=tree.tokens.device) == 0)


def graft_chain(tree: DraftTree, chain: Tensor, lengths: Tensor, is_chain: bool, impl: str) -> DraftTree:
    """`tree` with the tokens of `chain` [B, M] int64 behind its root, -1 behind the last of a row.

    It keeps its number of nodes N, so the last nodes of a tree give way. Of a chain, the first tokens are replaced, and
    the others stay where they are. M is at most N - 1; `lengths` [B] are the positions of the roots.
    """
    if is_chain:
        drafts = tree.tokens[:, 1 : 1 + chain.shape[1]]
        rest = tree.tokens[:, 1 + chain.shape[1] :]
        return replace(tree, tokens=torch.cat([tree.tokens[:, :1], torch.where(chain < 0, drafts, chain), rest], 1))
    place = torch.arange(-1, chain.shape[1], device=chain.device, dtype=torch.int32)
    given = torch.cat([torch.ones_like(chain[:, :1]), chain], 1) >= 0
    parents = torch.where(given, place, _UNUSED).int()
    both = torch.cat([tree.tokens[:, :1], chain.clamp(min=0)], 1)
    tokens, parents = merge_trees(DraftTree(both, kernels.build_tree(parents, lengths, impl=impl)), tree)
    tokens, parents = _first_nodes(tokens, parents, tree.tokens.shape[1])
    return replace(tree, tokens=tokens, links=kernels.build_tree(parents, lengths, impl=impl))


def _first_nodes(tokens: Tensor, parents: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` nodes that are in the tree, side by side: tokens and parents [B, count]."""
    kept = parents != _UNUSED
    number = kept.long().cumsum(1) - 1
    kept &= number < count
    # Every other node goes to a column behind the last.
    column = torch.where(kept, number, count)
    parent = torch.where(parents < 0, parents, number.gather(1, parents.clamp(min=0).long()).int())
    shape = (len(tokens), count + 1)
    moved = tokens[:, :1].expand(shape).scatter(1, column, tokens)
    above = torch.full(shape, _UNUSED, dtype=torch.int32, device=tokens.device).scatter(1, column, parent)
    return moved[:, :count].contiguous(), above[:, :count].contiguous()
