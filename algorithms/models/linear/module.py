"""Projections around the gated delta rule, its gated norm, and its plain definition. Parameter names are those of
Qwen3.5; Qwen3-Next's are turned into these.

Whole sequences run in chunks, through which gradients flow. The recurrence of `specdec_kernels.linear_attention` goes
token by token and gives the same but for rounding. With S the state [dk, dv] before a chunk, G_i the sum of its log
decays up to row i, and its rows as matrices,

    A_ij = beta_i exp(G_i - G_j) k_i . k_j  for j < i,      (1 + A) [U W] = [beta V, beta exp(G) K],
    D = U - W S,
    O_i = exp(G_i) q_i S + sum over j <= i of exp(G_i - G_j) (q_i . k_j) D_j,
    S after the chunk = exp(G_last) S + sum over j of exp(G_last - G_j) k_j D_j.

Source: Gated DeltaNet (arXiv 2412.06464), section 3.3.
"""

import math
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.models.config import DecoderConfig
from algorithms.models.fusion import project
from algorithms.models.layers import Mixer, Mixing, RMSNorm
from algorithms.models.linear.config import LinearConfig
from specdec_kernels import CHUNK, DeltaWeights

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

    name, out_name = "linear_attn", "out_proj"
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
        """Training start: heads that forget at very different speeds, as in Mamba-2 (arXiv 2405.21060)."""
        nn.init.uniform_(self.A_log, 1, 16).log_()
        steps = nn.init.uniform_(self.dt_bias, math.log(SLOWEST_STEP), math.log(FASTEST_STEP)).exp()
        self.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus

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
    wide, place = torch.promote_types(dtype, torch.float32), torch.device(str(device))
    shape = (layers, slots, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    return kernels.DeltaState(
        torch.zeros(shape, dtype=wide, device=place),
        torch.zeros((layers, slots, sizes.taps - 1, sizes.channels), dtype=dtype, device=place),
    )


def of_layer(state: kernels.DeltaState, layer: int) -> kernels.DeltaState:
    return kernels.DeltaState(*(tensor[layer] for tensor in state))


class LinearDenseMixer:
    """The delta rule over whole sequences `[B, T]`, from states of zeros."""

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


_EPS = 1e-6


def short_convolution(qkv: Tensor, weight: Tensor) -> Tensor:
    """SiLU of the causal convolution of every channel of `qkv [B, T, C]` by its taps `weight [C, taps]`, the last of
    which multiplies the row itself; float32 products, both results rounded to the dtype of `qkv`."""
    wide, taps = torch.promote_types(qkv.dtype, torch.float32), weight.shape[1]
    padded = F.pad(qkv.to(wide).mT, (taps - 1, 0))
    total = F.conv1d(padded, weight.to(wide)[:, None], groups=len(weight)).mT
    return F.silu(total.to(qkv.dtype).to(wide)).to(qkv.dtype)


def log_decay(a: Tensor, weights: DeltaWeights) -> Tensor:
    """[..., HV] float32: the logarithm of what is left of the state before each row."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return -weights.a_log.exp() * F.softplus(a.to(wide) + weights.dt_bias)


def normed(x: Tensor) -> Tensor:
    """Rows `x [..., D]` of length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def delta_rule_in_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """`[B, T, H, dv]` from states of zeros.

    `q`, `k [B, T, H, dk]` and `v [B, T, H, dv]` one per value head, `decay` (a logarithm) and `beta [B, T, H]`, all
    float32 or float64.
    """
    batch, length, heads, dv = v.shape
    count = -(-length // CHUNK)
    q, k, v, decay, beta = (_chunks(part) for part in (q, k, v, decay[..., None], beta[..., None]))
    total = decay.cumsum(2)  # [B H, N, C, 1]
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    ratio = (total - total.mT).masked_fill(~lower, float("-inf")).exp()
    both = torch.cat([k * beta, q], 2) @ k.mT  # [B H, N, 2 C, C]
    ahead, own = both[:, :, :CHUNK] * ratio, both[:, :, CHUNK:] * ratio
    grown = total.exp()
    solved = torch.linalg.solve_triangular(ahead, torch.cat([v, k * grown], -1) * beta, upper=False, unitriangular=True)
    values, reading = solved.split([dv, k.shape[-1]], -1)
    kept, last = k * (total[:, :, -1:] - total).exp(), grown[:, :, -1:]
    state, states, written = values.new_zeros(len(q), k.shape[-1], dv), [], []
    for index in range(count):
        states.append(state)
        written.append(torch.baddbmm(values[:, index], reading[:, index], state, alpha=-1))
        state = torch.baddbmm(state * last[:, index], kept[:, index].mT, written[-1])
    out = (q * grown) @ torch.stack(states, 1) + own @ torch.stack(written, 1)
    return out.unflatten(0, (batch, heads)).flatten(2, 3).transpose(1, 2)[:, :length].contiguous()


def _chunks(x: Tensor) -> Tensor:
    """`x [B, T, H, D]` as [B H, N, C, D], with zeros behind the last row: those write nothing."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return padded.transpose(1, 2).flatten(0, 1).unflatten(1, (-1, CHUNK))
