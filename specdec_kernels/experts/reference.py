"""The definition of the mixture of experts in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.activation.reference import silu_mul
from specdec_kernels.experts.configs import row_tile_of
from specdec_kernels.experts.types import (
    Activation,
    ExpertCall,
    ExpertSchedule,
    ExpertWeights,
    Matrices,
    Mxfp4,
    Routed,
    Routing,
    max_items,
)
from specdec_kernels.norm.reference import add_rms_norm
from specdec_kernels.norm.types import Normed, NormInputs
from specdec_kernels.projection.reference import linear
from specdec_kernels.projection.types import Product, ScaledWeight

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def route_experts(
    logits: Tensor, routing: Routing, correction_bias: Tensor | None = None, is_real: Tensor | None = None
) -> Routed:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    wide = torch.where(wide.isnan(), -torch.inf, wide).clamp(max=torch.finfo(torch.float32).max)
    if routing.scoring == "sigmoid":
        scores = wide.sigmoid()
        choice = scores if correction_bias is None else scores + correction_bias
    else:
        scores, choice = _softmax(wide), wide
    experts = _ranked(choice, _excluded(choice, routing))[:, : routing.topk]
    weights = scores.gather(1, experts)
    if routing.scoring == "softmax_of_chosen":
        weights = _softmax(wide.gather(1, experts))
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = (weights * routing.scale).to(logits.dtype).to(wide.dtype)
    if is_real is not None:
        experts = torch.where(is_real[:, None], experts, logits.shape[1])
        weights = torch.where(is_real[:, None], weights, 0.0)
    return Routed(experts.int(), weights)


def _softmax(logits: Tensor) -> Tensor:
    """Zeros for a row of -inf."""
    return logits.softmax(-1).nan_to_num()


def _ranked(choice: Tensor, excluded: Tensor) -> Tensor:
    """Experts in falling order of `choice`, the lowest first among equals, the excluded ones last."""
    ranked = choice.sort(dim=-1, descending=True, stable=True).indices
    return ranked.gather(1, excluded.gather(1, ranked).sort(dim=-1, stable=True).indices)


def _excluded(choice: Tensor, routing: Routing) -> Tensor:
    """[T, E] bool: experts outside of the best groups."""
    grouped = choice.unflatten(1, (routing.groups, -1))
    best = grouped.topk(2 if routing.group_score == "two_best" else 1).values.sum(-1)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.topk_groups]
    excluded = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
    return excluded[:, :, None].expand_as(grouped).flatten(1)


def schedule_experts(experts: Tensor, num_experts: int, row_tile: int) -> ExpertSchedule:
    flat = experts.flatten()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts).long()
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    tiles = (counts + row_tile - 1) // row_tile
    expert = torch.arange(num_experts, device=flat.device).repeat_interleave(tiles)
    nth = torch.arange(len(expert), device=flat.device) - (tiles.cumsum(0) - tiles)[expert]
    first = starts[expert] + nth * row_tile
    items = flat.new_zeros((max_items(flat.numel(), num_experts, row_tile), 3))
    items[:, 0] = num_experts
    items[: len(expert)] = torch.stack([expert, first, torch.minimum(first + row_tile, starts[expert + 1])], 1)
    order, touched = flat.argsort(stable=True), (counts > 0).sum()
    return ExpertSchedule(
        order.int(), starts.int(), items.int(), tiles.sum()[None].int(), touched[None].int(), row_tile
    )


def route_and_schedule(
    logits: Tensor, routing: Routing, correction_bias: Tensor | None = None, is_real: Tensor | None = None
) -> tuple[Routed, ExpertSchedule]:
    routed, experts = route_experts(logits, routing, correction_bias, is_real), logits.shape[1]
    return routed, schedule_experts(routed.experts, experts, row_tile_of(routed.experts, experts))


def expert_mlp(call: ExpertCall) -> Tensor:
    x, routed, schedule, weights, activation, shared = call
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = torch.zeros(*routed.experts.shape, x.shape[1], dtype=wide, device=x.device)
    for expert in routed.experts.unique().tolist():
        if 0 <= expert < schedule.num_experts:
            row, slot = (routed.experts == expert).nonzero(as_tuple=True)
            one = weights.of(expert)
            parts[row, slot] = _product(hidden_of(x[row], one, activation), one.down, one.down_bias, wide)
    total = torch.zeros_like(x, dtype=wide)
    for slot in range(routed.experts.shape[1]):
        total += routed.weights[:, slot, None] * parts[:, slot]
    if shared is not None:
        total += shared
    return total.to(x.dtype)


def expert_mlp_add_rms_norm(call: ExpertCall, end: NormInputs) -> Normed:
    return add_rms_norm(expert_mlp(call), end)


def hidden_of(x: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    """What one expert's second product takes."""
    return activated(_product(x, weights.gate_up, weights.gate_up_bias, x.dtype), activation)


def _product(x: Tensor, weight: Matrices, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x weight^T + bias in `dtype`, that of x or float32."""
    if isinstance(weight, ScaledWeight):
        return linear(Product(x, weight), bias, dtype)
    bias = None if bias is None else bias.to(dtype)
    return F.linear(x.to(dtype), as_tensor(weight, x.dtype).to(dtype), bias)


def as_tensor(weight: Tensor | Mxfp4, dtype: torch.dtype) -> Tensor:
    """`weight`; from MXFP4 in `dtype`, which all but float16 hold exactly."""
    if not isinstance(weight, Mxfp4):
        return weight
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.promote_types(dtype, torch.float32))
    codes = torch.stack([weight.codes & 15, weight.codes >> 4], dim=-1).flatten(-2)
    groups = values.to(codes.device)[codes.long()].unflatten(-1, (-1, 32))
    exponents = weight.scales[..., : groups.shape[-2], None].int() - 127
    return torch.ldexp(groups, exponents).flatten(-2).to(dtype)


def activated(gate_up: Tensor, activation: Activation) -> Tensor:
    """[..., F] of gate and up side by side [..., 2 F]."""
    if activation.limit is None:
        return silu_mul(gate_up)
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (gate * torch.sigmoid(activation.alpha * gate) * (up + 1)).to(gate_up.dtype)
