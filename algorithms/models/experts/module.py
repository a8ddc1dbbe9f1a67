"""The MLP of a layer with experts: a router, the experts' weights as one tensor each, and a shared MLP where there is
one. Parameter names are those of transformers; checkpoints with a tensor per expert are joined as they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.models.config import DecoderConfig
from algorithms.models.experts.config import ExpertsConfig
from algorithms.models.experts.training import imbalance, masked_expert_mlp
from algorithms.models.fusion import Fusable
from algorithms.models.layers import MLP, SwiGLU


class Router(Fusable):
    """Logits of the experts; with float32 products if `wide_router`."""

    float32 = ("e_score_correction_bias",)

    def __init__(self, config: DecoderConfig, sizes: ExpertsConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(sizes.num_experts, config.hidden_size))
        self.e_score_correction_bias: Tensor | None
        self.register_buffer("e_score_correction_bias", torch.zeros(sizes.num_experts) if sizes.corrected else None)
        self.wide = sizes.wide_router

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """`x [T, hidden]` to [T, E]."""
        dtype = torch.float32 if self.wide else x.dtype
        if self.impl is None:
            return F.linear(x.to(dtype), self.weight.to(dtype))
        return kernels.linear(x, self.weight, batch_invariant=self.batch_invariant, out_dtype=dtype, impl=self.impl)


class ExpertTensors(Fusable):
    """gate_up_proj [E, 2 F, hidden], gate first, and down_proj [E, hidden, F]."""

    def __init__(self, config: DecoderConfig, sizes: ExpertsConfig) -> None:
        super().__init__()
        self.num_experts, self._same = sizes.num_experts, sizes.same
        self.gate_up_proj = nn.Parameter(torch.zeros(sizes.num_experts, 2 * sizes.width, config.hidden_size))
        self.down_proj = nn.Parameter(torch.zeros(sizes.num_experts, config.hidden_size, sizes.width))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up_proj, std=self.gate_up_proj.shape[2] ** -0.5)
        nn.init.zeros_(self.down_proj)

    @property
    def _num_stored(self) -> int:
        return 1 if self._same else self.num_experts

    def adopt(self, prefix: str, stored: dict[str, Any]) -> None:
        """Published checkpoints have a tensor of each projection per expert."""
        if f"{prefix}0.down_proj.weight" not in stored:
            return
        by_name: dict[str, list[Any]] = {
            name: [stored.pop(f"{prefix}{expert}.{name}.weight", None) for expert in range(self._num_stored)]
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        if any(part is None for parts in by_name.values() for part in parts):
            return  # what is missing is then reported by name
        gates, ups, downs = by_name.values()
        gate_up = [gate.joined(up) for gate, up in zip(gates, ups, strict=True)]
        for name, parts in (("gate_up_proj", gate_up), ("down_proj", downs)):
            first, others = parts[0], parts[1:]
            stored[prefix + name] = first.repeated(self.num_experts) if self._same else first.stacked(others)


class Experts(MLP):
    """The weighted sum of the chosen experts, and the shared ones."""

    imbalance: Tensor | None = None
    """How unevenly the last forward with gradients chose, see `training.imbalance`."""
    schedule: kernels.ExpertSchedule | None = None
    """Of the last forward without gradients."""

    def __init__(self, config: DecoderConfig, sizes: ExpertsConfig) -> None:
        super().__init__()
        self.gate, self.experts = Router(config, sizes), ExpertTensors(config, sizes)
        shared = replace(config, intermediate_size=sizes.width * sizes.shared, mlp_bias=False) if sizes.shared else None
        self.shared_experts = None if shared is None else SwiGLU(shared)
        self.routing = kernels.Routing(
            sizes.topk,
            sizes.scoring,
            sizes.renormalise,
            sizes.scale,
            sizes.groups,
            sizes.topk_groups,
            sizes.group_score,
        )

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        learns = torch.is_grad_enabled() and self.impl is None
        # The definition reads back which experts have rows, so a GPU runs the kernels whatever the forward.
        impl = self.impl or ("triton" if x.is_cuda and not learns else "reference")
        logits, bias = self.gate(rows), self.gate.e_score_correction_bias
        routed = kernels.route_experts(logits, self.routing, bias, real, impl=impl)
        weights = kernels.ExpertWeights(self.experts.gate_up_proj, self.experts.down_proj)
        shared = None if self.shared_experts is None else self.shared_experts(rows)
        if learns:
            self.imbalance = imbalance(logits, routed)
            out = masked_expert_mlp(rows, routed, weights)
            return (out if shared is None else out + shared).view_as(x)
        tile = kernels.row_tile_of(routed.experts, self.experts.num_experts)
        schedule = self.schedule = kernels.schedule_experts(routed.experts, self.experts.num_experts, tile, impl=impl)
        return kernels.expert_mlp(rows, routed, schedule, weights, shared=shared, impl=impl).view_as(x)
