"""Attention over whole sequences without a cache, for training and as the plain definition."""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from algorithms.models.config import DecoderConfig
from algorithms.models.kinds import DENSE_MIXERS
from algorithms.models.layers import MixerWeights, apply_rope, rope_table


def head_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Per-head RMSNorm of `x [..., D]`; the identity without a weight."""
    if weight is None:
        return x
    wide = x.float()
    return weight.to(x.dtype) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, config: DecoderConfig, sinks: Tensor | None = None
) -> Tensor:
    """Softmax attention with the scale and the soft cap of `config`; query head h reads KV head h // (H / H_kv).
    `q [B, T, H, D]`, `k`/`v [B, S, H_kv, D]`; `visible` bool, broadcastable to `[B, H, T, S]`, or None for causal
    attention (S = T). `sinks [H]` adds exp(sink) to each denominator. Returns `[B, T, H, D]`."""
    group = q.shape[2] // k.shape[2]
    q = rearrange(q, "b t h d -> b h t d")
    k, v = (repeat(x, "b s h d -> b (h group) s d", group=group) for x in (k, v))
    if config.soft_cap is None and sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, visible, is_causal=visible is None, scale=config.scale)
        return rearrange(out, "b h t d -> b t h d")
    if visible is None:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scale = q.shape[-1] ** -0.5 if config.scale is None else config.scale
    scores = torch.einsum("bhtd,bhsd->bhts", q, k).float() * scale
    if config.soft_cap is not None:
        scores = config.soft_cap * torch.tanh(scores / config.soft_cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = repeat(sinks.float(), "h -> b h t 1", b=q.shape[0], t=q.shape[2])
        scores = torch.cat([scores, column], dim=-1)
    shares = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return torch.einsum("bhts,bhsd->bthd", shares, v)


class DenseMixer:
    """Causal self-attention, or what a layer has in its place, over rows `[B, T]` whose positions are 0 … T-1."""

    def __init__(self, config: DecoderConfig, length: int, device: torch.device | str) -> None:
        self.config = config
        self.table = rope_table(config, length, device)
        self.positions = torch.arange(length, device=device)
        others = {sizes for sizes in config.mixings if sizes is not None}
        self.others = {sizes: DENSE_MIXERS[type(sizes)](config, sizes, length, device) for sizes in others}

    def __call__(self, layer: int, /, *inputs: Any) -> Tensor:
        sizes = self.config.mixing(layer)
        return self.attend(layer, *inputs) if sizes is None else self.others[sizes](layer, *inputs)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        config, positions = self.config, self.positions[: q.shape[1]]
        q, k = (
            apply_rope(head_norm(x, weight, config.rms_norm_eps), self.table, positions, config.interleaved_rope)
            for x, weight in ((q, weights.q_norm), (k, weights.k_norm))
        )
        visible = None
        if (window := config.window(layer)) is not None:
            distance = positions[:, None] - positions
            visible = (distance >= 0) & (distance < window)
        return dense_attention(q, k, v, visible, config, weights.sinks)
