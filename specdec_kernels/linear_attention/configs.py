"""Tiles of the kernels per chip. Every call of the recurrence has the same tile, whatever its number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_kernels.launch import CHIPS


@dataclass(frozen=True)
class DeltaConfig:
    input_rows: int = 2  # rows of a program of the inputs, for one head
    values: int = 32  # columns of the state of a program of the recurrence
    tail_block: int = 1024  # channels of a program that keeps inputs of the convolution
    norm_rows: int = 8  # heads of a program of the gated norm


# The interpreter's time goes with programs, not lanes.
CONFIGS = dict.fromkeys(CHIPS, DeltaConfig()) | {
    "interpreter": DeltaConfig(input_rows=256, values=256, tail_block=1 << 14, norm_rows=1024)
}
