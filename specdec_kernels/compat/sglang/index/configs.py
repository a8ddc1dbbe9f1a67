"""Tile sizes of the index kernels per chip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec_kernels.launch import current_chip


@dataclass(frozen=True)
class IndexConfig:
    pair_nodes: int  # nodes of a program that compares all pairs of a tree
    pair_requests: int  # requests of such a program
    mask_rows: int  # mask rows of a program
    mask_cells: int  # cells of a row that a program writes at once
    mask_splits: int  # programs per row
    tail_programs: int  # programs that clear what follows the last row
    num_warps: int


_GPU = IndexConfig(
    pair_nodes=64, pair_requests=1, mask_rows=2, mask_cells=1024, mask_splits=8, tail_programs=64, num_warps=4
)
# The interpreter pays by the program, not by the lane.
_INTERPRETER = IndexConfig(
    pair_nodes=256, pair_requests=16, mask_rows=256, mask_cells=1024, mask_splits=1, tail_programs=1, num_warps=1
)


def config_of(tensor: torch.Tensor) -> IndexConfig:
    """Row of the chip that `tensor` is on; all GPUs share one."""
    return _INTERPRETER if current_chip(tensor) == "interpreter" else _GPU
