"""The parts of a decoder layer (see `decoder`), and the plain kinds: grouped-query attention, SwiGLU, RMSNorm."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.models.config import DecoderConfig
from algorithms.models.fusion import Fusable, NormedProjection, project
from algorithms.models.scaled_linear import BLOCK, SCALE_NAMES, Packed, ScaledLinear, packed


class MixerWeights(NamedTuple):
    """A layer's parameters that belong to its mixer; None where the model has none."""

    q_norm: Tensor | None = None  # [D]: RMSNorm of each query head
    k_norm: Tensor | None = None  # [D]: RMSNorm of each key head
    sinks: Tensor | None = None  # [H]: one logit per query head that takes part in the softmax and has no value


class Mixer(Protocol):
    """Turns a layer's projections into the output of its attention, or the like; may have `real`, see `real_rows`."""

    def __call__(self, layer: int, /, *inputs: Any) -> Tensor:
        """For attention: `q [..., T, H, D]`, `k`/`v [..., T, H_kv, D]` before QK-norm and RoPE, and `MixerWeights`, to
        `[..., T, H, D]`. The module of another kind says what it gives and takes."""


def real_rows(mixer: Mixer) -> Tensor | None:
    """[rows] bool: whether a row of the forward is a token, or padding; None: all are tokens."""
    return getattr(mixer, "real", None)


class Mixing(Fusable):
    """The part of a layer that sees other tokens, up to the projection `out`, which runs with the residual addition."""

    name, out_name = "self_attn", "o_proj"
    """Names in checkpoints of the module, and of `out` in it."""

    @property
    def out(self) -> nn.Module:
        return getattr(self, self.out_name)

    def forward(self, layer: int, x: Tensor, mixer: Mixer) -> Tensor:
        """`x [..., T, hidden]` to the input of `out`."""
        raise NotImplementedError


class MLP(Fusable):
    """The part of a layer that sees one token at a time."""

    skips_padding = False  # whether it reads `real`, which takes a kernel

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """`x [..., T, hidden]` to the same shape. `real` as in `real_rows`: other rows come out as anything finite."""
        raise NotImplementedError

    def ended(
        self, x: Tensor, residual: Tensor, following: RMSNorm, closing: RMSNorm | None, real: Tensor | None
    ) -> kernels.Normed:
        """`following` of residual + `closing` of the output, and that sum: the end of a layer in the fused forward."""
        out = self(x, real)
        out = out if closing is None else closing(out)
        return kernels.add_rms_norm(out, residual, following.weight, following.eps, impl=following.impl or "auto")


class RMSNorm(Fusable):
    """x / rms(x) * weight; in float32, rounded to the dtype of x before the weight as most of Hugging Face's decoders
    do, or after it if `wide`, as gpt-oss does. Then the weight is kept in float32."""

    def __init__(self, size: int, eps: float, wide: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.wide = eps, wide
        self.float32 = ("weight",) if wide else ()

    def forward(self, x: Tensor) -> Tensor:
        if self.impl is not None:
            return kernels.rms_norm(x.contiguous(), self.weight, self.eps, impl=self.impl)
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.wide:
            return (self.weight.float() * (wide * inverse)).to(x.dtype)
        return self.weight * (wide * inverse).to(x.dtype)

    def after(
        self, projection: nn.Module, x: Tensor, residual: Tensor, closing: RMSNorm | None = None
    ) -> kernels.Normed:
        """The norm of residual + projection(x), which `closing` norms first, and that sum, in the fused forward."""
        assert self.impl is not None
        x, same, impl = x.contiguous(), self.batch_invariant, self.impl
        end = residual, self.weight, self.eps
        if closing is None and isinstance(projection, NormedProjection):
            return projection.add_rms_norm(x, *end)
        if closing is None and isinstance(projection, (nn.Linear, ScaledLinear)) and projection.bias is None:
            weight = projection.weight if isinstance(projection, nn.Linear) else projection.scaled_weight
            return kernels.linear_add_rms_norm(x, weight, *end, batch_invariant=same, impl=impl)
        projected = project(projection, x, impl, same)
        return kernels.add_rms_norm(projected if closing is None else closing(projected), *end, impl=impl)


class Attention(Mixing):
    """Projections around a mixer, grouped-query heads, optional per-head RMSNorm."""

    def __init__(self, config: DecoderConfig, in_features: int | None = None) -> None:
        """`in_features`: input width of the projections, the hidden size if None."""
        super().__init__()
        self.head_dim = config.head_dim
        width = in_features or config.hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.gated = config.gated_attention
        self.q_proj = nn.Linear(width, queries * (2 if self.gated else 1), bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.sinks else None
        self._packed: Packed | None = None

    def pack(self) -> None:
        self._packed = self._packed or packed((self.q_proj, self.k_proj, self.v_proj))

    def forward(self, layer: int, x: Tensor, mixer: Mixer) -> Tensor:
        """The input of the output projection, `[..., T, H * D]`."""
        q, k, v = self._projected(x)
        if self.gated:
            q, gate = q.unflatten(-2, (-1, 2)).unbind(-2)
            q = q.contiguous()
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        out = mixer(layer, q, k, v, MixerWeights(q_norm, k_norm, self.sinks))
        if self.gated:
            out = out * torch.sigmoid(gate)
        return out.flatten(-2)

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each [..., heads, D]; views of one tensor in the fused forward."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        if self.impl is None:
            return tuple(each(x).unflatten(-1, (-1, self.head_dim)) for each in projections)
        assert self._packed is not None
        rows = kernels.linear(x.contiguous(), *self._packed, batch_invariant=self.batch_invariant, impl=self.impl)
        heads = [each.weight.shape[0] // self.head_dim for each in projections]
        return rows.unflatten(-1, (-1, self.head_dim)).split(heads, dim=-2)


class SwiGLU(MLP):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self._packed: Packed | None = None

    def pack(self) -> None:
        self._packed = self._packed or packed((self.gate_proj, self.up_proj))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return project(self.down_proj, self.inner(x), self.impl, self.batch_invariant)

    def ended(
        self, x: Tensor, residual: Tensor, following: RMSNorm, closing: RMSNorm | None, real: Tensor | None
    ) -> kernels.Normed:
        return following.after(self.down_proj, self.inner(x), residual, closing)

    def adopt(self, prefix: str, stored: dict[str, Any]) -> None:
        """Some architectures store both projections in one tensor, the gate first."""
        rows = self.gate_proj.weight.shape[0]
        for name in ("weight", *SCALE_NAMES):
            both = stored.get(f"{prefix}gate_up_proj.{name}")
            # Scales are split where none is of rows of both projections.
            if both is None or not (name == "weight" or rows % BLOCK == 0 or both.shape[0] == 2 * rows):
                continue
            del stored[f"{prefix}gate_up_proj.{name}"]
            stored[f"{prefix}gate_proj.{name}"], stored[f"{prefix}up_proj.{name}"] = both.halves()

    def inner(self, x: Tensor) -> Tensor:
        if self.impl is None:
            return F.silu(self.gate_proj(x)) * self.up_proj(x)
        assert self._packed is not None
        x, same = x.contiguous(), self.batch_invariant
        if self._packed.bias is None:
            return kernels.linear_silu_mul(x, self._packed.weight, batch_invariant=same, impl=self.impl)
        return kernels.silu_mul(kernels.linear(x, *self._packed, batch_invariant=same, impl=self.impl), impl=self.impl)


def rope_table(config: DecoderConfig, max_positions: int, device: torch.device | str | None = None) -> Tensor:
    """[max_positions, R] float32: cosines of the R/2 pairs, then their sines."""
    return kernels.rope_table(config.rotary_dim, max_positions, config.rope_theta, config.rope_scaling, device)


def apply_rope(x: Tensor, table: Tensor, positions: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first R elements of `x [..., T, heads, D]` by `positions [..., T]` int64 with a `rope_table [L, R]`,
    in pairs of i and i + R/2 ("neox"), or 2 i and 2 i + 1 if interleaved; keeps the dtype of `x`."""
    cos, sin = table[positions].unsqueeze(-2).to(x.dtype).chunk(2, dim=-1)
    turning, rest = x[..., : table.shape[1]], x[..., table.shape[1] :]
    first, second = turning.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turning.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([joined, rest], dim=-1)


def head_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of the last dimension of `x [..., D]`; the identity without a weight."""
    if weight is None:
        return x
    wide = x.float()
    return weight.to(x.dtype) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax over [cap * tanh(scale q k / cap), sink] times the values; query head h reads KV head h // (H / H_kv).

    `q [B, T, H, D]`, `k [B, S, H_kv, D]`, `v [B, S, H_kv, E]`; `visible` bool, broadcastable to `[B, H, T, S]`, or None
    for causal attention (S = T). `scale` None is D ** -0.5. `sinks [H]` adds exp(sink) to each denominator. Returns
    `[B, T, H, E]`; NaN for a query that sees nothing.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    if soft_cap is None and sinks is None:
        out = F.scaled_dot_product_attention(
            q, k, v, visible, is_causal=visible is None, scale=scale, enable_gqa=group > 1
        )
        return out.transpose(1, 2)
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if visible is None:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).to(q.dtype).transpose(1, 2)
