"""What the tree functions return, and their limits."""

from __future__ import annotations

from typing import NamedTuple

import torch

WORD_BITS = 64
MAX_NODES = 256
# Parent of a node that is in the tensor but not in the tree. Any value outside [0, node) would do.
UNUSED_PARENT = -2


class TreeLinks(NamedTuple):
    """A batch of draft trees as left-child / right-sibling links, positions and ancestor bits."""

    first_child: torch.Tensor  # [B, N] int32, -1 where there is none
    next_sibling: torch.Tensor  # [B, N] int32, -1 where there is none
    depth: torch.Tensor  # [B, N] int32, 0 at the root
    positions: torch.Tensor  # [B, N] int64, committed length + depth
    mask: torch.Tensor  # [B, N, ceil(N / 64)] int64, bit j of row i: node i sees node j


class Selection(NamedTuple):
    """A batch of draft trees as `build_tree` takes them, and where each node came from."""

    tokens: torch.Tensor  # [B, N] int64, column 0 is the last committed token, 0 in unused nodes
    parents: torch.Tensor  # [B, N] int32, -1 for the root, -2 for nodes outside the tree
    candidates: torch.Tensor  # [B, N] int32, candidate id of the node, -1 for the root and unused nodes


class Expansion(NamedTuple):
    """The most likely children of one drafting step."""

    scores: torch.Tensor  # [B, T] float32, falling
    index: torch.Tensor  # type: ignore[assignment]  # [B, T] int32, parent * C + child
    path_scores: torch.Tensor  # [B, P, C] float32, of all children


class DraftTopk(NamedTuple):
    """The largest entries of each row of logits."""

    probs: torch.Tensor  # [R, k] float32, falling
    tokens: torch.Tensor  # [R, k] int64


def mask_words(num_nodes: int) -> int:
    """Number of 64-bit words that hold one mask row."""
    return (num_nodes + WORD_BITS - 1) // WORD_BITS
