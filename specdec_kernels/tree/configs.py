"""Sizes of the tree kernels per chip."""

from dataclasses import dataclass

from specdec_kernels.launch import CHIPS


@dataclass(frozen=True)
class TreeConfig:
    max_nodes: int = 64  # nodes that a program of the link kernels owns
    max_requests: int = 1  # requests of such a program
    pair_budget: int = 64 * 64  # node pairs that it compares at once
    links_warps: int = 4
    topk_tile: int = 128  # tokens of a tile of the first top-k kernel
    topk_tiles: int = 32  # tiles that one of its programs reads
    topk_warps: int = 4
    merge_warps: int = 4
    sample_width: int = 64  # tokens of a group
    sample_groups: int = 32  # groups that a program sums
    sample_warps: int = 8


# The interpreter's time goes with programs, not lanes.
CONFIGS = dict.fromkeys(CHIPS, TreeConfig()) | {
    "interpreter": TreeConfig(
        max_nodes=256,
        max_requests=1 << 15,
        pair_budget=1 << 20,
        links_warps=1,
        topk_tiles=64,
        topk_warps=1,
        merge_warps=1,
        sample_groups=1 << 12,
        sample_warps=1,
    )
}
