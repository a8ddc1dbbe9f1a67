"""Projections around latent attention, and its plain definition.

    q = q_b(norm(q_a x)) or q_proj x, per head [q_n | q_r];   kv_a x = [c | k_r];   kv_b norm(c), per head [k_n | v]
    scores = scale (q_n . k_n + q_r . k_r) with q_r and k_r rotated, k_r shared by all heads

Parameter names are those of DeepSeek-V2 and V3. The latents' norms have an epsilon of their own, as published.
"""

from math import log
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.models.config import DecoderConfig
from algorithms.models.fusion import project
from algorithms.models.latent.config import LatentConfig
from algorithms.models.layers import Mixer, Mixing, RMSNorm, apply_rope, head_norm, plain_attention

LATENT_EPS = 1e-6


class LatentWeights(NamedTuple):
    """A layer's parameters that belong to its mixer."""

    norm: Tensor  # [latent]: RMSNorm of the latent
    up_key: Tensor  # [H, nope, latent]: keys of each head from the latent
    up_value: Tensor  # [H, value, latent]: values of each head


class LatentAttention(Mixing):
    """Calls its mixer with `q [..., T, H, nope + rope]`, `kv [..., T, latent + rope]`, for `[..., T, H, value]`."""

    unscaled = ("kv_b_proj",)

    def __init__(self, config: DecoderConfig, sizes: LatentConfig) -> None:
        super().__init__()
        self.sizes, hidden, queries = sizes, config.hidden_size, config.num_heads * (sizes.nope + sizes.rope)
        self.q_proj = nn.Linear(hidden, queries, bias=False) if sizes.query_rank is None else None
        if sizes.query_rank is not None:
            self.q_a_proj = nn.Linear(hidden, sizes.query_rank, bias=sizes.bias)
            self.q_a_layernorm = RMSNorm(sizes.query_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(sizes.query_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, sizes.latent + sizes.rope, bias=sizes.bias)
        self.kv_a_layernorm = RMSNorm(sizes.latent, LATENT_EPS)
        self.kv_b_proj = nn.Linear(sizes.latent, config.num_heads * (sizes.nope + sizes.value), bias=False)
        self.o_proj = nn.Linear(config.num_heads * sizes.value, hidden, bias=sizes.bias)

    def forward(self, layer: int, x: Tensor, mixer: Mixer) -> Tensor:
        sizes = self.sizes
        if self.q_proj is not None:
            q = self._project(self.q_proj, x)
        else:
            q = self._project(self.q_b_proj, self.q_a_layernorm(self._project(self.q_a_proj, x)))
        up = rearrange(self.kv_b_proj.weight, "(h d) l -> h d l", d=sizes.nope + sizes.value)
        weights = LatentWeights(self.kv_a_layernorm.weight, *up.split([sizes.nope, sizes.value], dim=1))
        q = rearrange(q, "... (h d) -> ... h d", d=sizes.nope + sizes.rope)
        out = mixer(layer, q, self._project(self.kv_a_proj_with_mqa, x), weights)
        return rearrange(out, "... h d -> ... (h d)")

    def _project(self, projection: nn.Module, x: Tensor) -> Tensor:
        return project(projection, x, self.impl, self.batch_invariant)


def attention_scale(config: DecoderConfig, sizes: LatentConfig) -> float:
    """Factor of the scores: that of a head's width, and the square of YaRN's `mscale_all_dim` factor."""
    scale, scaling = (sizes.nope + sizes.rope) ** -0.5, config.rope_scaling
    if isinstance(scaling, kernels.YarnScaling) and scaling.mscale_all_dim and scaling.factor > 1:
        scale *= (0.1 * scaling.mscale_all_dim * log(scaling.factor) + 1.0) ** 2
    return scale


def latent_rope_table(config: DecoderConfig, sizes: LatentConfig, length: int, device: torch.device | str) -> Tensor:
    return kernels.rope_table(sizes.rope, length, config.rope_theta, config.rope_scaling, device)


class LatentDenseMixer:
    """Causal latent attention over whole sequences `[B, T]`, with the keys and values of all heads written out."""

    def __init__(self, config: DecoderConfig, sizes: LatentConfig, length: int, device: torch.device | str) -> None:
        self._sizes, self._scale = sizes, attention_scale(config, sizes)
        self._table = latent_rope_table(config, sizes, length, device)

    def __call__(self, layer: int, /, q: Tensor, kv: Tensor, weights: LatentWeights) -> Tensor:
        sizes, length = self._sizes, q.shape[1]
        c, k_rope = kv.split([sizes.latent, sizes.rope], dim=-1)
        q_nope, q_rope = q.split([sizes.nope, sizes.rope], dim=-1)
        c = head_norm(c, weights.norm, LATENT_EPS)
        keys = torch.einsum("btl,hdl->bthd", c, weights.up_key)
        values = torch.einsum("btl,hdl->bthd", c, weights.up_value)
        positions = torch.arange(length, device=q.device)
        k_rope, q_rope = (
            apply_rope(x, self._table, positions, sizes.interleaved) for x in (k_rope[:, :, None], q_rope)
        )
        k_rope = k_rope.expand(-1, -1, q.shape[2], -1)
        q, k = (torch.cat(parts, -1) for parts in ((q_nope, q_rope), (keys, k_rope)))
        return plain_attention(q, k, values, None, self._scale)
