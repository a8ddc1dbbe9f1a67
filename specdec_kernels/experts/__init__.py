"""Mixture of experts: routing, a tile schedule built on the device, and the products of the chosen experts."""

from specdec_kernels.experts.api import (
    expert_mlp,
    expert_mlp_add_rms_norm,
    route_and_schedule,
    route_experts,
    schedule_experts,
)
from specdec_kernels.experts.configs import row_tile_of
from specdec_kernels.experts.types import (
    GROUP_SCORES,
    SCORINGS,
    Activation,
    ExpertSchedule,
    ExpertWeights,
    Mxfp4,
    Routed,
    Routing,
)

__all__ = [
    "GROUP_SCORES", "SCORINGS", "Activation", "ExpertSchedule", "ExpertWeights", "Mxfp4", "Routed", "Routing",
    "expert_mlp", "expert_mlp_add_rms_norm", "route_and_schedule", "route_experts", "row_tile_of", "schedule_experts",
]  # fmt: skip
