"""Tile sizes of the index kernels per chip."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_kernels.launch import CHIPS


@dataclass(frozen=True)
class KvIndexConfig:
    flat_block: int = 512  # lanes of a program over a flat output
    scan_block: int = 2048  # entries summed at once by the one scanning program
    move_requests: int = 1  # requests that a program moves
    move_budget: int = 4096  # elements that a program holds while moving
    num_warps: int = 4


# In the interpreter, only the number of programs costs.
CONFIGS = dict.fromkeys(CHIPS, KvIndexConfig()) | {
    "interpreter": KvIndexConfig(1 << 12, 1 << 14, move_requests=1 << 10, move_budget=1 << 18, num_warps=1)
}
