"""Tile sizes of the index kernels per chip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec_kernels.launch import current_chip


@dataclass(frozen=True)
class IndexConfig:
    flat_block: int  # lanes of a program over a flat output
    max_programs: int  # over an output whose room may be far larger than its contents
    scan_block: int  # entries summed at once by the one scanning program
    row_block: int  # elements of a program that takes whole requests
    move_requests: int  # requests a program moves
    move_budget: int  # elements a program holds while moving
    move_direct: int  # slots of a list that a program moves without a staging buffer
    num_warps: int


_GPU = IndexConfig(
    flat_block=512,
    max_programs=1024,
    scan_block=2048,
    row_block=1024,
    move_requests=1,
    move_budget=4096,
    move_direct=256,
    num_warps=4,
)
# The interpreter pays by the program, not by the lane.
_CONFIGS = {
    "sm80": _GPU,
    "sm90": _GPU,
    "sm100": _GPU,
    "gfx942": _GPU,
    "interpreter": IndexConfig(
        flat_block=1 << 12,
        max_programs=2,
        scan_block=1 << 14,
        row_block=1 << 18,
        move_requests=1 << 10,
        move_budget=1 << 18,
        move_direct=64,
        num_warps=1,
    ),
}


def config_of(tensor: torch.Tensor) -> IndexConfig:
    """Row of the chip that `tensor` is on."""
    return _CONFIGS[current_chip(tensor)]


def lanes(count: int, most: int) -> int:
    """Power of two that covers `count` up to `most`; two at least, which every Triton compiler takes."""
    return max(2, min(1 << max(0, count - 1).bit_length(), most))
