"""Projections around the gated delta rule, its gated norm, and its plain definition. Parameter names are those of
Qwen3.5; Qwen3-Next's are turned into these."""

import math
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.models.config import DecoderConfig
from algorithms.models.fusion import project
from algorithms.models.layers import Mixer, Mixing, RMSNorm
from algorithms.models.linear.chunks import delta_rule_in_chunks, log_decay, normed, short_convolution
from algorithms.models.linear.config import LinearConfig

SLOWEST_STEP, FASTEST_STEP = 0.001, 0.1
"""Softplus of `dt_bias` at the start of training."""


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

    def reset_parameters(self) -> None:
        """Training start of what is no projection: heads that forget at very different speeds, as in Mamba-2
        (arXiv 2405.21060)."""
        nn.init.uniform_(self.A_log, 1, 16).log_()
        steps = nn.init.uniform_(self.dt_bias, math.log(SLOWEST_STEP), math.log(FASTEST_STEP)).exp()
        self.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus

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
        # Mixed precision has weights in float32.
        weight = self.norm.weight.to(mixed.dtype)
        return kernels.gated_rms_norm(mixed, gate, weight, self.norm.eps, impl=impl).view_as(z)


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
    """The delta rule over whole sequences `[B, T]`, from states of zeros; see `chunks`."""

    def __init__(self, config: DecoderConfig, sizes: LinearConfig, length: int, device: torch.device | str) -> None:
        self._sizes = sizes

    def __call__(self, layer: int, /, inputs: LinearInputs) -> Tensor:
        sizes, (qkv, b, a, weights) = self._sizes, inputs
        # Products of states are never rounded to half precision.
        with torch.autocast(qkv.device.type, enabled=False):
            mixed = short_convolution(qkv, weights.conv).to(torch.promote_types(qkv.dtype, torch.float32))
            keys = sizes.key_heads * sizes.key_dim
            q, k, v = mixed.split([keys, keys, mixed.shape[-1] - 2 * keys], -1)
            q, k = (normed(part.unflatten(-1, (sizes.key_heads, -1))) for part in (q, k))
            group = sizes.value_heads // sizes.key_heads
            q, k = (part.repeat_interleave(group, 2) for part in (q * sizes.key_dim**-0.5, k))
            decay, beta = log_decay(a, weights), b.to(mixed.dtype).sigmoid()
            out = delta_rule_in_chunks(q, k, v.unflatten(-1, (sizes.value_heads, -1)), decay, beta)
        return out.to(qkv.dtype)
