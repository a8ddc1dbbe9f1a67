"""Projections around the gated delta rule, its gated norm, and its plain definition. Parameter names are those of
Qwen3.5; Qwen3-Next's are turned into these."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.models.config import DecoderConfig
from algorithms.models.fusion import project
from algorithms.models.layers import Mixer, Mixing, RMSNorm
from algorithms.models.linear.config import LinearConfig


class LinearInputs(NamedTuple):
    """What a layer gives to its mixer: `qkv [..., channels]`, `b` and `a [..., value heads]`, and its weights."""

    qkv: Tensor
    b: Tensor
    a: Tensor
    weights: kernels.DeltaWeights


class LinearAttention(Mixing):
    """Calls its mixer with `LinearInputs`, for `[..., value heads, value_dim]`."""

    name = "linear_attn"
    float32 = ("A_log", "dt_bias")

    def __init__(self, config: DecoderConfig, sizes: LinearConfig) -> None:
        super().__init__()
        self.sizes = sizes
        hidden, values = config.hidden_size, sizes.value_heads * sizes.value_dim
        self.in_proj_qkv = nn.Linear(hidden, sizes.channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, sizes.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, sizes.value_heads, bias=False)
        self.conv1d = nn.Conv1d(sizes.channels, sizes.channels, sizes.taps, groups=sizes.channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(sizes.value_heads))
        self.dt_bias = nn.Parameter(torch.ones(sizes.value_heads))
        self.norm = RMSNorm(sizes.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    @property
    def out(self) -> nn.Module:
        return self.out_proj

    def adopt(self, prefix: str, stored: dict[str, Any]) -> None:
        """Qwen3-Next stores the projections of q, k, v and z in one tensor, and those of b and a in another: the rows
        of each key head, with those of its value heads, one key head after another."""
        sizes, repeat = self.sizes, self.sizes.value_heads // self.sizes.key_heads
        values = repeat * sizes.value_dim
        if (joint := stored.pop(f"{prefix}in_proj_qkvz.weight", None)) is not None:
            q, k, v, z = _grouped_rows(sizes.key_heads, sizes.key_dim, sizes.key_dim, values, values)
            total = len(q) + len(k) + len(v) + len(z)
            stored[f"{prefix}in_proj_qkv.weight"] = joint.picked([*q, *k, *v], total)
            stored[f"{prefix}in_proj_z.weight"] = joint.picked(z, total)
        if (joint := stored.pop(f"{prefix}in_proj_ba.weight", None)) is not None:
            for name, rows in zip("ba", _grouped_rows(sizes.key_heads, repeat, repeat), strict=True):
                stored[f"{prefix}in_proj_{name}.weight"] = joint.picked(rows, 2 * sizes.value_heads)

    def forward(self, layer: int, x: Tensor, mixer: Mixer) -> Tensor:
        qkv, z, b, a = (
            project(each, x, self.impl, self.batch_invariant)
            for each in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        )
        weights = kernels.DeltaWeights(self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias)
        mixed = mixer(layer, LinearInputs(qkv, b, a, weights)).flatten(0, -3)
        gate, impl = z.reshape(len(mixed), -1), self.impl or "reference"
        return kernels.gated_rms_norm(mixed, gate, self.norm.weight, self.norm.eps, impl=impl).view_as(z)


def _grouped_rows(groups: int, *widths: int) -> list[list[int]]:
    """The rows of each part of a tensor that holds, group after group, `widths` rows of the parts."""
    step, starts = sum(widths), list(accumulate(widths, initial=0))
    return [
        [group * step + start + row for group in range(groups) for row in range(width)]
        for start, width in zip(starts, widths, strict=False)
    ]


def empty_state(sizes: LinearConfig, layers: int, slots: int, dtype: torch.dtype, device: object) -> kernels.DeltaState:
    """The states of `layers` layers, zeros."""
    wide, place = torch.promote_types(dtype, torch.float32), torch.device(str(device))
    shape = (layers, slots, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    return kernels.DeltaState(
        torch.zeros(shape, dtype=wide, device=place),
        torch.zeros((layers, slots, sizes.taps - 1, sizes.channels), dtype=dtype, device=place),
    )


def of_layer(state: kernels.DeltaState, layer: int) -> kernels.DeltaState:
    return kernels.DeltaState(*(tensor[layer] for tensor in state))


class LinearDenseMixer:
    """The recurrence over whole sequences `[B, T]`, from zeros."""

    def __init__(self, config: DecoderConfig, sizes: LinearConfig, length: int, device: torch.device | str) -> None:
        self._sizes = sizes

    def __call__(self, layer: int, /, inputs: LinearInputs) -> Tensor:
        batch, length = inputs.qkv.shape[:2]
        qkv, b, a = (part.flatten(0, 1) for part in inputs[:3])
        state = of_layer(empty_state(self._sizes, 1, 1, qkv.dtype, qkv.device), 0)
        links, paths = kernels.chain_paths(torch.full((batch,), -1, device=qkv.device), length)
        rows = kernels.delta_rule_inputs(qkv, b, a, inputs.weights, state, links, impl="reference")
        return kernels.delta_rule(rows, paths, state, impl="reference").unflatten(0, (batch, length))
