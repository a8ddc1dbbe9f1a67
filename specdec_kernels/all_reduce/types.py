"""The memory over which devices exchange rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

SLOTS = 2
"""Places of an exchange. Calls take them in turn: a rank that has reached the next call has read all of this one."""


def exchange_elements(ranks: int, rows: int, width: int) -> int:
    """Elements of four bytes that a rank's memory has: rows of partial sums, and flags behind them."""
    return SLOTS * rows * (width + ranks)


class Exchange(NamedTuple):
    """Memory that every rank reads and writes. In each rank's memory stand

    - `[SLOTS, rows, width]` float32: the rank's own sums;
    - `[SLOTS, ranks, rows]` int32 flags, all 0 before the first call: 1 from the time that another rank's row can be
      read until this rank waits for it.

    `memory` is this rank's, as float32, and `flags` the same memory as int32, both `[elements]`. `offsets` [ranks]
    int64 leads from there to the memory of every rank, in elements. In tests one tensor holds the memory of all ranks.
    """

    memory: torch.Tensor
    flags: torch.Tensor
    offsets: torch.Tensor
    rank: int
    rows: int
    """Most rows that a call can exchange."""
    width: int
    """Elements of a row."""
