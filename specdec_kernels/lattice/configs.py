"""Sizes of the lattice kernels per chip."""

from dataclasses import dataclass

from specdec_kernels.launch import CHIPS


@dataclass(frozen=True)
class LatticeConfig:
    rank_block: int = 128  # factors of a step of a pair's product
    pair_warps: int = 4
    max_requests: int = 1  # requests of a program of the chain kernel
    state_rows: int = 16  # rows of a program of the recurrent kernels
    state_units: int = 16  # entries of the state of such a program, which reads three rows of the weights for each
    state_block: int = 128  # inputs of a step of its products
    state_warps: int = 4
    lanes_per_warp: int = 1024  # of chain and tree: more warps meet at a barrier in every reduction


# The interpreter's time goes with programs, not lanes.
CONFIGS = dict.fromkeys(CHIPS, LatticeConfig()) | {
    "interpreter": LatticeConfig(
        rank_block=1024,
        pair_warps=1,
        max_requests=1 << 15,
        state_units=64,
        state_block=64,
        state_warps=1,
        lanes_per_warp=1 << 20,
    )
}
