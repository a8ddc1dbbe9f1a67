"""Tile sizes of the kernels with SGLang's signatures, per chip."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec_kernels.launch import current_chip


@dataclass(frozen=True)
class SglangConfig:
    flat_block: int  # lanes of a program over a flat output
    max_programs: int  # over an output whose room may be far larger than its contents
    walk_requests: int  # requests of a program that traverses trees and samples
    tree_requests: int  # requests of a program that builds trees
    greedy_requests: int  # requests of a program of the greedy traversal, which holds their trees
    max_tile: int  # of the vocabulary
    num_warps: int


_GPU = SglangConfig(
    flat_block=512, max_programs=1024, walk_requests=32, tree_requests=1, greedy_requests=1, max_tile=4096, num_warps=4
)
# In the interpreter, only the number of programs costs.
_INTERPRETER = SglangConfig(
    flat_block=1 << 12,
    max_programs=2,
    walk_requests=1 << 10,
    tree_requests=16,
    greedy_requests=1 << 10,
    max_tile=512,
    num_warps=1,
)


def config_of(tensor: Tensor) -> SglangConfig:
    """Row of the chip that `tensor` is on; all GPUs share one."""
    return _INTERPRETER if current_chip(tensor) == "interpreter" else _GPU
