"""Tile sizes of the kernels behind SGLang's signatures, per chip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec_kernels.launch import current_chip


@dataclass(frozen=True)
class SglangConfig:
    flat_block: int  # lanes of a program over a flat output
    walk_requests: int  # requests of a program that walks trees and samples
    tree_requests: int  # requests of a program that builds trees
    tree_warps: int  # of such a program, for up to 32 nodes
    greedy_requests: int  # requests of a program of the greedy walk, which holds their trees
    max_tile: int  # of the vocabulary
    num_warps: int
    walk_warps: int


_GPU = SglangConfig(
    flat_block=1024,
    walk_requests=32,
    tree_requests=1,
    tree_warps=1,
    greedy_requests=1,
    max_tile=4096,
    num_warps=4,
    walk_warps=1,
)
# The interpreter pays by the program, not by the lane.
_INTERPRETER = SglangConfig(
    flat_block=1 << 16,
    walk_requests=1 << 10,
    tree_requests=16,
    tree_warps=1,
    greedy_requests=1 << 10,
    max_tile=512,
    num_warps=1,
    walk_warps=1,
)


def config_of(tensor: torch.Tensor) -> SglangConfig:
    """Row of the chip that `tensor` is on; all GPUs share one."""
    return _INTERPRETER if current_chip(tensor) == "interpreter" else _GPU
