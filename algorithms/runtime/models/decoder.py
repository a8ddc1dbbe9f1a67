"""Decoder-only transformers as one module that `DecoderConfig` describes.

The model owns the weights and the residual stream. A `Mixer` does everything that involves other tokens: it receives
the raw projections and returns the attention output. So one forward serves training, paged prefill and tree
verification, and one fused kernel can do QK-norm, RoPE and the cache write. Parameter names are those of Hugging Face
checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from algorithms.runtime.models.config.decoder import DecoderConfig

INIT_STD = 0.02


class MixerWeights(NamedTuple):
    """A layer's parameters that belong to its mixer; None where the model has none."""

    q_norm: Tensor | None = None
    """[D]: RMSNorm of each query head."""
    k_norm: Tensor | None = None
    """[D]: RMSNorm of each key head."""
    sinks: Tensor | None = None
    """[H]: one logit per query head that takes part in the softmax and has no value."""


class Mixer(Protocol):
    """Turns one layer's projections into attention output."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        """`q [..., T, H, D]`, `k`/`v [..., T, H_kv, D]` before QK-norm and RoPE.

        Returns `[..., T, H, D]`.
        """
        ...


class RMSNorm(nn.Module):
    """x / rms(x) * weight; computed in float32, rounded to the dtype of x before the weight as Hugging Face does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * inverse).to(x.dtype)


class Attention(nn.Module):
    """Projections around a mixer, grouped-query heads, optional per-head RMSNorm of queries and keys."""

    def __init__(self, config: DecoderConfig, in_features: int | None = None) -> None:
        """`in_features`: width of what queries, keys and values are projected from, the hidden size if None."""
        super().__init__()
        self.head_dim = config.head_dim
        width = in_features or config.hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.sinks else None

    def forward(self, layer: int, x: Tensor, mixer: Mixer) -> Tensor:
        q, k, v = (
            rearrange(projection(x), "... (h d) -> ... h d", d=self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        out = mixer(layer, q, k, v, MixerWeights(q_norm, k_norm, self.sinks))
        return self.o_proj(rearrange(out, "... h d -> ... (h d)"))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm residual block; the first layer of an EAGLE head has no `input_norm`."""

    def __init__(self, config: DecoderConfig, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps) if input_norm else nn.Identity()
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, layer: int, x: Tensor, mixer: Mixer) -> Tensor:
        x = x + self.self_attn(layer, self.input_layernorm(x), mixer)
        return x + self.mlp(self.post_attention_layernorm(x))


@torch.no_grad()
def reset_layers(layers: nn.ModuleList) -> None:
    """Training start: variance-preserving matrices, and residual branches that begin at zero."""
    for layer in layers:
        for name, module in layer.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            if name.endswith(("o_proj", "down_proj")):
                nn.init.zeros_(module.weight)
            else:
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class DecoderBody(nn.Module):
    """The part Hugging Face names `model`: embedding, layers, final norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model without a cache."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderBody(config)
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def reset_parameters(self) -> None:
        """Initialise for training from scratch with torch's global generator."""
        nn.init.normal_(self.model.embed_tokens.weight, std=INIT_STD)
        if self.lm_head is not None:
            nn.init.normal_(self.lm_head.weight, std=INIT_STD)
        reset_layers(self.model.layers)

    def embed(self, tokens: Tensor) -> Tensor:
        """`tokens [..., T]` int64 to `[..., T, hidden]`."""
        return self.model.embed_tokens(tokens)

    def forward(self, tokens: Tensor, mixer: Mixer, capture: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Run `tokens [..., T]` int64.

        Returns the final-normed hidden states `[..., T, hidden]` and, for each layer id in `capture` in that order, the
        residual stream after that layer `[..., T, hidden]`.
        """
        x = self.embed(tokens)
        outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self.model.layers):
            x = layer(index, x, mixer)
            if index in capture:
                outputs[index] = x
        return self.model.norm(x), [outputs[index] for index in capture]

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [..., T, hidden]` to `[..., T, V]` in the dtype of the weights."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(hidden, head.weight)
