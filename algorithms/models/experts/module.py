"""The MLP of a layer with experts: a router, the experts' weights as one tensor each, and a shared MLP where there is
one. Parameter names are those of transformers; checkpoints with a tensor per expert are joined as they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.models.config import DecoderConfig
from algorithms.models.experts.config import ExpertsConfig
from algorithms.models.experts.training import imbalance, masked_expert_mlp
from algorithms.models.folder import COPY_AGAIN, ModelError
from algorithms.models.fusion import Fusable, project
from algorithms.models.layers import MLP, RMSNorm, SwiGLU

_LARGEST_SCALE = 252
"""Of MXFP4: the largest number, 6 * 2^(scale - 127), is finite in float32."""


class Router(Fusable):
    """Logits of the experts; with float32 products if `wide_router`."""

    float32 = ("e_score_correction_bias",)

    def __init__(self, config: DecoderConfig, sizes: ExpertsConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(sizes.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(sizes.num_experts)) if sizes.biased else None
        self.e_score_correction_bias: Tensor | None
        self.register_buffer("e_score_correction_bias", torch.zeros(sizes.num_experts) if sizes.corrected else None)
        self.wide = sizes.wide_router

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """`x [T, hidden]` to [T, E]."""
        dtype = torch.float32 if self.wide else x.dtype
        if self.impl is None:
            return F.linear(x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))
        same = self.batch_invariant
        return kernels.linear(x, self.weight, self.bias, batch_invariant=same, out_dtype=dtype, impl=self.impl)


class ExpertTensors(Fusable):
    """gate_up_proj [E, 2 F, hidden], gate first, and down_proj [E, hidden, F]."""

    def __init__(self, config: DecoderConfig, sizes: ExpertsConfig) -> None:
        super().__init__()
        self.num_experts, self.same = sizes.num_experts, sizes.same
        self.gate_up_proj = nn.Parameter(torch.zeros(sizes.num_experts, 2 * sizes.width, config.hidden_size))
        self.down_proj = nn.Parameter(torch.zeros(sizes.num_experts, config.hidden_size, sizes.width))

    @property
    def weights(self) -> kernels.ExpertWeights:
        return kernels.ExpertWeights(self.gate_up_proj, self.down_proj)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up_proj, std=self.gate_up_proj.shape[2] ** -0.5)
        nn.init.zeros_(self.down_proj)

    def adopt(self, prefix: str, stored: dict[str, Any]) -> None:
        """Published checkpoints have a tensor of each projection per expert."""
        for name, tensor in joined_experts(prefix, stored, "weight", self.num_experts, self.same).items():
            stored[prefix + name] = tensor


def joined_experts(
    prefix: str, stored: dict[str, Any], suffix: str, num_experts: int, same: bool, change: Any = None
) -> dict[str, Any]:
    """Takes `suffix` of each expert's projections from `stored` and gives those of all experts; nothing where one is
    missing, which is then reported by name. `change` makes another `Stored` of each. `same`: one expert is stored."""
    if f"{prefix}0.down_proj.{suffix}" not in stored:
        return {}
    by_name: dict[str, list[Any]] = {
        name: [stored.pop(f"{prefix}{expert}.{name}.{suffix}", None) for expert in range(1 if same else num_experts)]
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    if any(part is None for parts in by_name.values() for part in parts):
        return {}
    if change is not None:
        by_name = {name: [change(name, part) for part in parts] for name, parts in by_name.items()}
    gates, ups, downs = by_name.values()
    gate_up = [gate.joined(up) for gate, up in zip(gates, ups, strict=True)]
    return {
        name: parts[0].repeated(num_experts) if same else parts[0].stacked(parts[1:])
        for name, parts in (("gate_up_proj", gate_up), ("down_proj", downs))
    }


class BiasedExpertTensors(ExpertTensors):
    """Also gate_up_proj_bias [E, 2 F] and down_proj_bias [E, hidden]. Checkpoints of gpt-oss have the matrices
    transposed, and the rows of gate and up in turns."""

    def __init__(self, config: DecoderConfig, sizes: ExpertsConfig) -> None:
        super().__init__(config, sizes)
        self.gate_up_proj_bias, self.down_proj_bias = _biases(config, sizes)

    @property
    def weights(self) -> kernels.ExpertWeights:
        return kernels.ExpertWeights(self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias)

    def adopt(self, prefix: str, stored: dict[str, Any]) -> None:
        for name in ("gate_up_proj", "down_proj"):
            _change(stored, f"{prefix}{name}", 3, lambda x: x.transpose(1, 2).contiguous())
        for name, dims in (("gate_up_proj", 3), ("gate_up_proj_bias", 2)):
            _change(stored, f"{prefix}{name}", dims, _gates_first)


class PackedExpertTensors(Fusable):
    """Experts of gpt-oss in MXFP4, as `kernels.Mxfp4` has them, and their biases."""

    gate_up_proj_blocks: Tensor
    gate_up_proj_scales: Tensor
    down_proj_blocks: Tensor
    down_proj_scales: Tensor

    def __init__(self, config: DecoderConfig, sizes: ExpertsConfig) -> None:
        super().__init__()
        self.num_experts = sizes.num_experts
        shapes = {
            "gate_up_proj": (sizes.num_experts, 2 * sizes.width, config.hidden_size),
            "down_proj": (sizes.num_experts, config.hidden_size, sizes.width),
        }
        for name, (experts, rows, columns) in shapes.items():
            codes = torch.zeros(experts, rows, columns // 2, dtype=torch.uint8)
            scales = torch.zeros(experts, rows, columns // 32, dtype=torch.uint8)
            packed = kernels.Mxfp4.padded(codes, scales)
            self.register_buffer(f"{name}_blocks", packed.codes)
            self.register_buffer(f"{name}_scales", packed.scales)
        self.gate_up_proj_bias, self.down_proj_bias = _biases(config, sizes)

    @property
    def weights(self) -> kernels.ExpertWeights:
        return kernels.ExpertWeights(
            kernels.Mxfp4(self.gate_up_proj_blocks, self.gate_up_proj_scales),
            kernels.Mxfp4(self.down_proj_blocks, self.down_proj_scales),
            self.gate_up_proj_bias,
            self.down_proj_bias,
        )

    def adopt(self, prefix: str, stored: dict[str, Any]) -> None:
        """Blocks of 32 numbers become rows. Numbers are a row's own, so that rows move whole."""
        for name in ("gate_up_proj", "down_proj"):
            _change(stored, f"{prefix}{name}_blocks", 4, lambda x: x.flatten(2))
            if (scales := stored.get(f"{prefix}{name}_scales")) is not None:
                stored[f"{prefix}{name}_scales"] = replace(scales, read=partial(_finite_scales, scales))
            _change(stored, f"{prefix}{name}_scales", 3, kernels.Mxfp4.padded_scales)
        for name, dims in (("gate_up_proj_blocks", 3), ("gate_up_proj_scales", 3), ("gate_up_proj_bias", 2)):
            _change(stored, f"{prefix}{name}", dims, _gates_first)


def _biases(config: DecoderConfig, sizes: ExpertsConfig) -> tuple[nn.Parameter, nn.Parameter]:
    widths = (2 * sizes.width, config.hidden_size)
    gate_up, down = (nn.Parameter(torch.zeros(sizes.num_experts, width)) for width in widths)
    return gate_up, down


def _change(stored: dict[str, Any], name: str, dims: int, change: Callable[[Tensor], Tensor]) -> None:
    """`change` the tensor, whose new shape follows from that of `dims` dimensions. What is missing or has others is
    reported by name later."""
    if name in stored and len(stored[name].shape) == dims:
        shape = change(torch.empty(stored[name].shape, dtype=torch.uint8, device="meta")).shape
        stored[name] = stored[name].changed(tuple(shape), change)


def _finite_scales(scales: Any) -> Tensor:
    """The tensor of a `Stored`. ModelError where a number 6 * 2^(scale - 127) would not be finite."""
    values = scales.read()
    if (largest := int(values.max())) > _LARGEST_SCALE:
        raise ModelError(
            f"tensor '{scales.name}' holds NaN or infinity",
            where=scales.file,
            expected=f"scales up to {_LARGEST_SCALE}",
            actual=largest,
            fix="the checkpoint is damaged: " + COPY_AGAIN,
        )
    return values


def _gates_first(x: Tensor) -> Tensor:
    """Rows of gate and up in turns [E, 2 F, ...] as those of gate, then those of up."""
    return torch.cat([x[:, ::2], x[:, 1::2]], dim=1)


class Experts(MLP):
    """The weighted sum of the chosen experts, and shared ones or sigmoid(shared_expert_gate x) shared_expert(x)."""

    unscaled = ("shared_expert_gate",)
    skips_padding = True
    imbalance: Tensor | None = None
    """How unevenly the last forward with gradients chose, see `training.imbalance`."""
    schedule: kernels.ExpertSchedule | None = None
    """Of the last forward without gradients."""

    def __init__(self, config: DecoderConfig, sizes: ExpertsConfig) -> None:
        super().__init__()
        kind = PackedExpertTensors if sizes.mxfp4 else BiasedExpertTensors if sizes.biased else ExpertTensors
        self.gate, self.experts = Router(config, sizes), kind(config, sizes)
        self.shared_experts = _shared(config, sizes.width * sizes.shared)
        self.shared_expert = _shared(config, sizes.gated_shared)
        gate = nn.Linear(config.hidden_size, 1, bias=False) if sizes.gated_shared else None
        self.shared_expert_gate = gate
        self.routing = kernels.Routing(
            sizes.topk,
            sizes.scoring,
            sizes.renormalise,
            sizes.scale,
            sizes.groups,
            sizes.topk_groups,
            sizes.group_score,
        )
        self.activation = kernels.Activation(sizes.limit, sizes.alpha)

    def adopt(self, prefix: str, stored: dict[str, Any]) -> None:
        """gpt-oss calls the gate router."""
        for name in ("weight", "bias"):
            if (tensor := stored.pop(f"{prefix}router.{name}", None)) is not None:
                stored[f"{prefix}gate.{name}"] = tensor

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        rows, experts = x.reshape(-1, x.shape[-1]).contiguous(), self.experts
        if self._learns and type(experts) is ExpertTensors:
            return self._learning(rows, experts, real).view_as(x)
        arguments = (rows, *self._chosen(rows, real), experts.weights, self.activation, self._shared(rows))
        return kernels.expert_mlp(*arguments, impl=self._impl_of(x)).view_as(x)

    def ended(
        self, x: Tensor, residual: Tensor, following: RMSNorm, closing: RMSNorm | None, real: Tensor | None
    ) -> kernels.Normed:
        if closing is not None:
            return super().ended(x, residual, following, closing, real)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        end = (residual.reshape(rows.shape), following.weight, following.eps)
        arguments = (rows, *self._chosen(rows, real), self.experts.weights, *end, self.activation, self._shared(rows))
        found = kernels.expert_mlp_add_rms_norm(*arguments, impl=self._impl_of(x))
        return kernels.Normed(*(part.view_as(x) for part in found))

    @property
    def _learns(self) -> bool:
        return torch.is_grad_enabled() and self.impl is None

    def _impl_of(self, x: Tensor) -> str:
        """The definition reads back which experts have rows, so a GPU runs the kernels whatever the forward."""
        return self.impl or ("triton" if x.is_cuda and not self._learns else "reference")

    def _chosen(self, rows: Tensor, real: Tensor | None) -> tuple[kernels.Routed, kernels.ExpertSchedule]:
        logits, bias = self.gate(rows), self.gate.e_score_correction_bias
        routed, self.schedule = kernels.route_and_schedule(logits, self.routing, bias, real, impl=self._impl_of(rows))
        return routed, self.schedule

    def _learning(self, rows: Tensor, experts: ExpertTensors, real: Tensor | None) -> Tensor:
        logits, bias = self.gate(rows), self.gate.e_score_correction_bias
        routed = kernels.route_experts(logits, self.routing, bias, real, impl="reference")
        self.imbalance = imbalance(logits, routed)
        out, shared = masked_expert_mlp(rows, routed, experts.gate_up_proj, experts.down_proj), self._shared(rows)
        return out if shared is None else out + shared

    def _shared(self, rows: Tensor) -> Tensor | None:
        if self.shared_expert is None or self.shared_expert_gate is None:
            return None if self.shared_experts is None else self.shared_experts(rows)
        gate = project(self.shared_expert_gate, rows, self.impl, self.batch_invariant)
        return torch.sigmoid(gate) * self.shared_expert(rows)


def _shared(config: DecoderConfig, width: int) -> SwiGLU | None:
    return SwiGLU(replace(config, intermediate_size=width, mlp_bias=False)) if width else None
