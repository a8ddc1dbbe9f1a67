"""Tile sizes of the kernels with SGLang's signatures, per chip."""

from dataclasses import dataclass

from specdec_kernels.launch import CHIPS


@dataclass(frozen=True)
class SglangConfig:
    flat_block: int = 512  # lanes of a program over a flat output
    max_programs: int = 1024  # over an output whose room may be far larger than its contents
    walk_requests: int = 32  # requests of a program that traverses trees and samples
    tree_requests: int = 1  # requests of a program that builds trees
    greedy_requests: int = 1  # requests of a program of the greedy traversal, which holds their trees
    max_tile: int = 4096  # of the vocabulary
    num_warps: int = 4


# In the interpreter, only the number of programs costs.
_INTERPRETER = SglangConfig(1 << 12, 2, 1 << 10, tree_requests=16, greedy_requests=1 << 10, max_tile=512, num_warps=1)
CONFIGS = dict.fromkeys(CHIPS, SglangConfig()) | {"interpreter": _INTERPRETER}
