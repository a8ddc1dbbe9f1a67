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
from algorithms.models.folder import COPY_AGAIN, ModelError
from algorithms.models.fusion import Fusable, project
from algorithms.models.layers import MLP, RMSNorm, SwiGLU

MATRICES = ("gate_up_proj", "down_proj")
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
    """gate_up_proj [E, 2 F, hidden], gate first, down_proj [E, hidden, F]; `biased`: biases [E, 2 F], [E, hidden]."""

    def __init__(self, config: DecoderConfig, sizes: ExpertsConfig) -> None:
        super().__init__()
        self.num_experts, self.same, self.biased = sizes.num_experts, sizes.same, sizes.biased
        self.gate_up_proj = nn.Parameter(torch.zeros(sizes.num_experts, 2 * sizes.width, config.hidden_size))
        self.down_proj = nn.Parameter(torch.zeros(sizes.num_experts, config.hidden_size, sizes.width))
        self.gate_up_proj_bias, self.down_proj_bias = _biases(config, sizes)

    @property
    def weights(self) -> kernels.ExpertWeights:
        return kernels.ExpertWeights(self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up_proj, std=self.gate_up_proj.shape[2] ** -0.5)
        nn.init.zeros_(self.down_proj)

    def adopt(self, prefix: str, stored: dict[str, Any]) -> None:
        """Joins a tensor per expert; gpt-oss has transposed matrices, and rows of gate and up in turns."""
        for name, tensor in joined_experts(prefix, stored, "weight", self.num_experts, self.same).items():
            stored[prefix + name] = tensor
        if not self.biased:
            return
        for name in MATRICES:
            _change(stored, f"{prefix}{name}", 3, lambda x: x.transpose(1, 2).contiguous())
        for name, dims in (("gate_up_proj", 3), ("gate_up_proj_bias", 2)):
            _change(stored, f"{prefix}{name}", dims, _gates_first)


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


class PackedExpertTensors(Fusable):
    """Experts of gpt-oss in MXFP4, as `kernels.Mxfp4` has them, and their biases."""

    def __init__(self, config: DecoderConfig, sizes: ExpertsConfig) -> None:
        super().__init__()
        self.num_experts = sizes.num_experts
        for name, rows, columns in (
            ("gate_up_proj", 2 * sizes.width, config.hidden_size),
            ("down_proj", config.hidden_size, sizes.width),
        ):
            codes = torch.zeros(sizes.num_experts, rows, columns // 2, dtype=torch.uint8)
            scales = torch.zeros(sizes.num_experts, rows, columns // 32, dtype=torch.uint8)
            packed = kernels.Mxfp4.padded(codes, scales)
            self.register_buffer(f"{name}_blocks", packed.codes)
            self.register_buffer(f"{name}_scales", packed.scales)
        self.gate_up_proj_bias, self.down_proj_bias = _biases(config, sizes)

    @property
    def weights(self) -> kernels.ExpertWeights:
        gate_up, down = (
            kernels.Mxfp4(getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")) for name in MATRICES
        )
        return kernels.ExpertWeights(gate_up, down, self.gate_up_proj_bias, self.down_proj_bias)

    def adopt(self, prefix: str, stored: dict[str, Any]) -> None:
        """Blocks of 32 numbers become rows. Numbers are a row's own, so that rows move whole."""
        for name in MATRICES:
            _change(stored, f"{prefix}{name}_blocks", 4, lambda x: x.flatten(2))
            if (scales := stored.get(f"{prefix}{name}_scales")) is not None:
                stored[f"{prefix}{name}_scales"] = replace(scales, read=partial(_finite_scales, scales))
            _change(stored, f"{prefix}{name}_scales", 3, kernels.Mxfp4.padded_scales)
        for name, dims in (("gate_up_proj_blocks", 3), ("gate_up_proj_scales", 3), ("gate_up_proj_bias", 2)):
            _change(stored, f"{prefix}{name}", dims, _gates_first)


def _biases(config: DecoderConfig, sizes: ExpertsConfig) -> list[nn.Parameter | None]:
    widths = (2 * sizes.width, config.hidden_size)
    return [nn.Parameter(torch.zeros(sizes.num_experts, width)) if sizes.biased else None for width in widths]


def _change(stored: dict[str, Any], name: str, dims: int, change: Callable[[Tensor], Tensor]) -> None:
    """`change` a tensor of `dims` dimensions; what is missing or has others is reported by name later."""
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
    """How unevenly the last forward with gradients chose, see `imbalance`."""
    schedule: kernels.ExpertSchedule | None = None
    """Of the last forward without gradients."""

    def __init__(self, config: DecoderConfig, sizes: ExpertsConfig) -> None:
        super().__init__()
        kind = PackedExpertTensors if sizes.mxfp4 else ExpertTensors
        self.gate, self.experts = Router(config, sizes), kind(config, sizes)
        self.shared_experts = _shared(config, sizes.width * sizes.shared)
        self.shared_expert = _shared(config, sizes.gated_shared)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if sizes.gated_shared else None
        self.routing = kernels.Routing(*(getattr(sizes, name) for name in kernels.Routing._fields))
        self.activation = kernels.Activation(sizes.limit, sizes.alpha)

    def adopt(self, prefix: str, stored: dict[str, Any]) -> None:
        for name in ("weight", "bias"):
            if (tensor := stored.pop(f"{prefix}router.{name}", None)) is not None:
                stored[f"{prefix}gate.{name}"] = tensor

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        rows, experts = x.reshape(-1, x.shape[-1]).contiguous(), self.experts
        if self._learns and isinstance(experts, ExpertTensors) and not experts.biased:
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


def masked_expert_mlp(x: Tensor, routed: kernels.Routed, gate_up: Tensor, down: Tensor) -> Tensor:
    """[T, H]: `specdec_kernels.expert_mlp` of `x [T, H]`, `gate_up [E, 2 F, H]` and `down [E, H, F]`, with gradients.
    Every expert runs over every row, so that no size depends on the routing; the second product adds them."""
    count, outer, _ = gate_up.shape
    shares = x.new_zeros(len(x), count + 1, dtype=routed.weights.dtype)
    shares = shares.scatter_add(1, routed.experts.long(), routed.weights)[:, :count]  # the last one is no expert
    gate, up = F.linear(x, gate_up.flatten(0, 1)).unflatten(1, (count, outer)).chunk(2, dim=-1)
    return F.linear((F.silu(gate) * up * shares[..., None]).flatten(1), down.transpose(0, 1).flatten(1)).to(x.dtype)


def imbalance(logits: Tensor, routed: kernels.Routed) -> Tensor:
    """E times the sum over experts of the share of rows' choices and the mean probability: 1 where all experts are
    chosen alike, E where one is (Switch Transformer, arXiv 2101.03961, equation 4). `logits [T, E]`."""
    experts = logits.shape[1]
    chosen = torch.zeros(experts, device=logits.device).index_add(
        0, routed.experts.flatten(), torch.ones(routed.experts.numel(), device=logits.device)
    )
    return experts * (chosen / routed.experts.numel()) @ logits.float().softmax(-1).mean(0)


class ExpertLedger:
    """Counts of all layers with experts; `note` follows the model's forward in a step, and can be captured."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, Experts)]
        # Touched experts, and rows with experts, of all layers together; forwards.
        self._sums = torch.zeros(3, dtype=torch.int64, device=self._layers[0].gate.weight.device)

    @classmethod
    def of(cls, model: nn.Module) -> ExpertLedger | None:
        """A ledger, or None for a model without experts."""
        return cls(model) if any(isinstance(module, Experts) for module in model.modules()) else None

    def reset(self) -> None:
        self._sums.zero_()

    def note(self) -> None:
        schedules = [layer.schedule for layer in self._layers]
        given = [schedule for schedule in schedules if schedule is not None]
        touched = torch.cat([schedule.num_touched for schedule in given]).sum()
        assigned = torch.stack([schedule.starts[-1] for schedule in given]).sum()
        self._sums.add_(torch.stack([touched, assigned, torch.ones_like(touched)]))

    def report(self) -> dict[str, float]:
        """Means over layers and steps: experts that are touched in a step, rows of a step that are tokens (nodes, and
        prompts that joined), and touched experts for each of these. Empty before a step; waits for the device."""
        touched, assigned, steps = self._sums.tolist()
        if not steps:
            return {}
        layers, topk = len(self._layers), self._layers[0].routing.topk
        return {
            "num_experts": self._layers[0].experts.num_experts,
            "touched_per_step": touched / (layers * steps),
            "rows_per_step": assigned / (layers * topk * steps),
            "touched_per_row": touched * topk / assigned if assigned else 0.0,
        }
