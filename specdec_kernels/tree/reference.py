"""Definition of the draft-tree links in plain torch."""

from __future__ import annotations

import torch

from specdec_kernels.tree.types import WORD_BITS, TreeLinks


def build_tree(parents: torch.Tensor, lengths: torch.Tensor) -> TreeLinks:
    """See `specdec_kernels.tree.build_tree`."""
    batch, num_nodes = parents.shape
    node = torch.arange(num_nodes, device=parents.device)
    parent = parents.long()
    parent = torch.where((parent >= 0) & (parent < node), parent, -1)

    sees = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    depth = torch.zeros(batch, num_nodes, dtype=torch.int64, device=parents.device)
    ancestor = parent
    for _ in range(num_nodes - 1):
        depth += ancestor >= 0
        sees |= ancestor[:, :, None] == node
        ancestor = torch.where(ancestor >= 0, parent.gather(1, ancestor.clamp(min=0)), -1)

    is_child = parent[:, None, :] == node[:, None]
    is_later_sibling = (
        (parent[:, None, :] == parent[:, :, None]) & (parent[:, :, None] >= 0) & (node > node[:, None])
    )
    return TreeLinks(
        _first_true(is_child).int(),
        _first_true(is_later_sibling).int(),
        depth.int(),
        lengths[:, None] + depth,
        _pack_words(sees),
    )


def build_chain(lengths: torch.Tensor, num_nodes: int) -> TreeLinks:
    """See `specdec_kernels.tree.build_chain`."""
    node = torch.arange(num_nodes, dtype=torch.int32, device=lengths.device)
    return build_tree((node - 1).expand(lengths.shape[0], num_nodes), lengths)


def _first_true(flags: torch.Tensor) -> torch.Tensor:
    """Index of the first true entry of the last dimension, -1 where there is none."""
    return torch.where(flags.any(-1), flags.int().argmax(-1), -1)


def _pack_words(bits: torch.Tensor) -> torch.Tensor:
    """[B, N, N] bool -> [B, N, ceil(N / 64)] int64; bit 63 is the sign bit."""
    one = torch.ones((), dtype=torch.int64, device=bits.device)
    weights = one << (torch.arange(bits.shape[-1], device=bits.device) % WORD_BITS)
    return torch.stack([word.sum(-1) for word in (bits * weights).split(WORD_BITS, -1)], -1)
