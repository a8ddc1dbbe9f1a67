"""The memory over which devices exchange rows."""

from typing import NamedTuple

from torch import Tensor

SLOTS = 2
"""Places of an exchange. Calls take them in turn: a rank that has reached the next call has read all of this one."""


def exchange_elements(ranks: int, rows: int, width: int) -> int:
    """Words of eight bytes in the memory of a rank."""
    return SLOTS * rows * (ranks * width + 1)


class Exchange(NamedTuple):
    """Memory that every rank reads and writes, all 0 before the first call. Each rank's memory holds

    - `[SLOTS, ranks, rows, width]` words: what each rank has sent to this one;
    - `[SLOTS, rows]` counters: the calls that this rank has made, row by row.

    A word of choices holds an int32 in its low half and the number of the call, which signals its arrival, in its high
    half. Sums take the first half of a slot alone, in words of four bytes: a float32 whose last bit is the last bit of
    the call's number. `offsets` [ranks] int64 leads from `memory`, this rank's, to the memory of every rank, in words,
    an even number of them. In tests one tensor holds the memory of all ranks.
    """

    memory: Tensor  # [words] int64
    offsets: Tensor
    rank: int
    rows: int
    """Most rows that a call can exchange."""
    width: int
    """Elements of a row."""
