"""Tile sizes of the index kernels per chip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec_kernels.launch import current_chip


@dataclass(frozen=True)
class IndexConfig:
    flat_block: int  # lanes of a program over a flat output
    max_programs: int  # over an output whose room may be far larger than its contents
    compact_block: int  # entries that the one compacting program takes at once
    evict_block: int  # nodes of a program that takes whole requests
    move_direct: int  # slots of a list that a program moves without a staging buffer
    move_budget: int  # elements that a program holds while moving
    pair_nodes: int  # nodes of a program that compares all pairs of a tree
    pair_requests: int  # requests of such a program
    mask_rows: int  # mask rows of a program
    mask_splits: int  # programs per row
    tail_programs: int  # programs that clear what follows the last row
    num_warps: int


_GPU = IndexConfig(
    flat_block=512,
    max_programs=1024,
    compact_block=2048,
    evict_block=1024,
    move_direct=256,
    move_budget=4096,
    pair_nodes=64,
    pair_requests=1,
    mask_rows=2,
    mask_splits=8,
    tail_programs=64,
    num_warps=4,
)
# The interpreter pays by the program, not by the lane.
_INTERPRETER = IndexConfig(
    flat_block=1 << 12,
    max_programs=2,
    compact_block=1 << 14,
    evict_block=1 << 18,
    move_direct=64,
    move_budget=1 << 18,
    pair_nodes=256,
    pair_requests=16,
    mask_rows=256,
    mask_splits=1,
    tail_programs=1,
    num_warps=1,
)


def config_of(tensor: torch.Tensor) -> IndexConfig:
    """Row of the chip that `tensor` is on; all GPUs share one."""
    return _INTERPRETER if current_chip(tensor) == "interpreter" else _GPU
