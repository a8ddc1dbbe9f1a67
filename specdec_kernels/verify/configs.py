"""Sizes of the acceptance kernels per chip."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec_kernels.launch import CHIPS


@dataclass(frozen=True)
class AcceptanceConfig:
    max_requests: int = 1  # requests, or rows, of one program: those that stop early would wait for the others
    width: int = 64  # tokens of a group
    strips: int = 64  # groups of one program of the residual kernel
    strip_warps: int = 8
    pass_width: int = 4096  # tokens of one step of a pass over a row
    pass_lanes: int = 256  # tokens of such a step for each warp
    request_warps: int = 4  # of the programs that own requests; the walk uses one lane per request and one warp


_GPU = AcceptanceConfig()
ACCEPTANCE = dict.fromkeys(CHIPS, _GPU) | {
    # Sixteen warps, or wavefronts, leave too few registers for each lane.
    "sm80": replace(_GPU, pass_width=2048),
    "gfx942": replace(_GPU, pass_lanes=512),
    "interpreter": AcceptanceConfig(max_requests=1 << 15, strips=1 << 14, strip_warps=1, request_warps=1),
}
