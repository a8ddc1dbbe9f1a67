"""Tile sizes of the index kernels per chip."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec_kernels.launch import current_chip


@dataclass(frozen=True)
class KvIndexConfig:
    flat_block: int  # lanes of a program over a flat output
    scan_block: int  # entries summed at once by the one scanning program
    move_requests: int  # requests that a program moves
    move_budget: int  # elements that a program holds while moving
    num_warps: int


GPU = KvIndexConfig(flat_block=512, scan_block=2048, move_requests=1, move_budget=4096, num_warps=4)
# In the interpreter, only the number of programs costs.
INTERPRETER = KvIndexConfig(1 << 12, scan_block=1 << 14, move_requests=1 << 10, move_budget=1 << 18, num_warps=1)


def config_of(tensor: Tensor) -> KvIndexConfig:
    """Row of the chip that `tensor` is on; all GPUs share one."""
    return INTERPRETER if current_chip(tensor) == "interpreter" else GPU
