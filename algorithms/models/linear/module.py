"""Projections around the gated delta rule, its gated norm, and its plain definition. Parameter names are those of
Qwen3.5."""

from __future__ import annotations

from typing import NamedTuple

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
    unscaled = ("in_proj_b", "in_proj_a")

    def __init__(self, config: DecoderConfig, sizes: LinearConfig) -> None:
        super().__init__()
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

    def forward(self, layer: int, x: Tensor, mixer: Mixer) -> Tensor:
        qkv, z, b, a = (
            project(each, x, self.impl, self.batch_invariant)
            for each in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        )
        weights = kernels.DeltaWeights(self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias)
        mixed = mixer(layer, LinearInputs(qkv, b, a, weights)).flatten(0, -3)
        gate, impl = z.reshape(len(mixed), -1), self.impl or "reference"
        return kernels.gated_rms_norm(mixed, gate, self.norm.weight, self.norm.eps, impl=impl).view_as(z)


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
