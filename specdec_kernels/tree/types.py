"""What the tree builders return; its own module, so that reference and kernel can both name it."""

from __future__ import annotations

from typing import NamedTuple

import torch

WORD_BITS = 64


class TreeLinks(NamedTuple):
    """A batch of draft trees as left-child / right-sibling links, positions and ancestor bits."""

    first_child: torch.Tensor  # [B, N] int32, -1 where there is none
    next_sibling: torch.Tensor  # [B, N] int32, -1 where there is none
    depth: torch.Tensor  # [B, N] int32, 0 at the root
    positions: torch.Tensor  # [B, N] int64, committed length + depth
    mask: torch.Tensor  # [B, N, ceil(N / 64)] int64, bit j of row i: node i sees node j


def mask_words(num_nodes: int) -> int:
    """Number of 64-bit words that hold one mask row."""
    return (num_nodes + WORD_BITS - 1) // WORD_BITS
