"""Decoder-only transformers as one module that `DecoderConfig` describes.

The model owns the weights and the residual stream. A `Mixer` does everything that involves other tokens: it receives
the raw projections and returns the attention output. So one forward serves training, paged prefill and tree
verification. Parameter names are as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.models.config import DecoderConfig
from algorithms.models.fusion import Fusable, FusableModel, NormedProjection, Packed, packed, project, queries_only
from specdec_kernels.projection import MAX_KERNEL_ROWS

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
        """`q [..., T, H, D]`, `k`/`v [..., T, H_kv, D]` before QK-norm and RoPE, to `[..., T, H, D]`."""
        ...


class RMSNorm(Fusable):
    """x / rms(x) * weight; in float32, rounded to the dtype of x before the weight as Hugging Face does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self.impl is not None:
            return kernels.rms_norm(x.contiguous(), self.weight, self.eps, impl=self.impl)
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * inverse).to(x.dtype)

    def after(
        self, projection: nn.Module, x: Tensor, residual: Tensor, closing: RMSNorm | None = None
    ) -> kernels.Normed:
        """The norm of residual + projection(x), and that sum: the end of a sublayer in the fused forward. `closing`
        norms the projection first."""
        assert self.impl is not None
        x = x.contiguous()
        if closing is not None:
            projected = closing(project(projection, x, self.impl, self.batch_invariant))
            return kernels.add_rms_norm(projected, residual, self.weight, self.eps, impl=self.impl)
        if isinstance(projection, NormedProjection):
            return projection.add_rms_norm(x, residual, self.weight, self.eps)
        if isinstance(projection, nn.Linear) and projection.bias is None:
            weight, same = projection.weight, self.batch_invariant
            return kernels.linear_add_rms_norm(
                x, weight, residual, self.weight, self.eps, batch_invariant=same, impl=self.impl
            )
        projected = project(projection, x, self.impl, self.batch_invariant)
        return kernels.add_rms_norm(projected, residual, self.weight, self.eps, impl=self.impl)


class Attention(Fusable):
    """Projections around a mixer, grouped-query heads, optional per-head RMSNorm. The forward ends before `o_proj`,
    which the layer runs together with its residual addition."""

    def __init__(self, config: DecoderConfig, in_features: int | None = None) -> None:
        """`in_features`: input width of the projections, the hidden size if None."""
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
        self._packed: Packed | None = None

    def pack(self) -> None:
        self._packed = self._packed or packed((self.q_proj, self.k_proj, self.v_proj))

    def forward(self, layer: int, x: Tensor, mixer: Mixer) -> Tensor:
        """The input of the output projection, `[..., T, H * D]`."""
        q, k, v = self._projected(x)
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        out = mixer(layer, q, k, v, MixerWeights(q_norm, k_norm, self.sinks))
        return rearrange(out, "... h d -> ... (h d)")

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each [..., heads, D]; views of one tensor in the fused forward."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        if self.impl is None:
            return tuple(rearrange(each(x), "... (h d) -> ... h d", d=self.head_dim) for each in projections)
        assert self._packed is not None
        rows = kernels.linear(x.contiguous(), *self._packed, batch_invariant=self.batch_invariant, impl=self.impl)
        heads = [each.weight.shape[0] // self.head_dim for each in projections]
        return rearrange(rows, "... (h d) -> ... h d", d=self.head_dim).split(heads, dim=-2)


class SwiGLU(Fusable):
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

    def forward(self, x: Tensor) -> Tensor:
        return project(self.down_proj, self.inner(x), self.impl, self.batch_invariant)

    def inner(self, x: Tensor) -> Tensor:
        if self.impl is None:
            return F.silu(self.gate_proj(x)) * self.up_proj(x)
        assert self._packed is not None
        x, same = x.contiguous(), self.batch_invariant
        if self._packed.bias is None:
            return kernels.linear_silu_mul(x, self._packed.weight, batch_invariant=same, impl=self.impl)
        return kernels.silu_mul(kernels.linear(x, *self._packed, batch_invariant=same, impl=self.impl), impl=self.impl)


class Block(nn.Module):
    """The part of every layer after its attention: the projection, a norm, the MLP, and two residual additions."""

    self_attn: Attention
    post_attention_layernorm: RMSNorm
    mlp: SwiGLU
    post_self_attn_layernorm: RMSNorm | None
    post_mlp_layernorm: RMSNorm | None

    def __init__(self) -> None:
        super().__init__()
        self.post_self_attn_layernorm = self.post_mlp_layernorm = None

    def after_attention(self, mixed: Tensor, stream: Tensor) -> Tensor:
        """The residual stream after the layer."""
        norm, projection = self.post_attention_layernorm, self.self_attn.o_proj
        if norm.impl is None:
            stream = stream + _closed(self.post_self_attn_layernorm, projection(mixed))
            return stream + _closed(self.post_mlp_layernorm, self.mlp(norm(stream)))
        normed, stream = norm.after(projection, mixed, stream, self.post_self_attn_layernorm)
        return stream + _closed(self.post_mlp_layernorm, self.mlp(normed))


def _closed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class DecoderLayer(Block):
    """Pre-norm residual block; the first layer of an EAGLE head has no `input_norm`."""

    def __init__(self, config: DecoderConfig, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps) if input_norm else nn.Identity()
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)
        if config.closing_norms:
            self.post_self_attn_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.post_mlp_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, layer: int, x: Tensor, mixer: Mixer) -> Tensor:
        return self.after_attention(self.self_attn(layer, self.input_layernorm(x), mixer), x)

    def fused(self, layer: int, start: kernels.Normed, mixer: Mixer, following: RMSNorm) -> kernels.Normed:
        """The layer between two norms: `start` is normed by its own, the result by the `following` one."""
        mixed = self.self_attn(layer, start.normed, mixer)
        normed, residual = self.post_attention_layernorm.after(
            self.self_attn.o_proj, mixed, start.residual, self.post_self_attn_layernorm
        )
        return following.after(self.mlp.down_proj, self.mlp.inner(normed), residual, self.post_mlp_layernorm)


def run_layers(
    layers: Sequence[DecoderLayer], norm: RMSNorm, x: Tensor, mixer: Mixer, target_layers: Sequence[int] = ()
) -> tuple[Tensor, list[Tensor]]:
    """`x [..., T, hidden]` through the layers and the final norm; returns as `Decoder.forward`."""
    if norm.impl is not None:
        return run_fused(layers, norm, kernels.Normed(layers[0].input_layernorm(x), x), mixer, target_layers)
    outputs: dict[int, Tensor] = {}
    for index, layer in enumerate(layers):
        x = layer(index, x, mixer)
        if index in target_layers:
            outputs[index] = x
    return norm(x), [outputs[index] for index in target_layers]


def run_fused(
    layers: Sequence[DecoderLayer], norm: RMSNorm, start: kernels.Normed, mixer: Mixer, target_layers: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """`run_layers` by fused kernels: every layer ends in the norm of the next."""
    outputs: dict[int, Tensor] = {}
    following = [*(cast(RMSNorm, layer.input_layernorm) for layer in layers[1:]), norm]
    for index, layer in enumerate(layers):
        start = layer.fused(index, start, mixer, following[index])
        if index in target_layers:
            outputs[index] = start.residual
    return start.normed, [outputs[index] for index in target_layers]


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


def embedding(rows: int, width: int) -> nn.Embedding:
    """A table of zeros. The random start of `nn.Embedding` takes torch's compiler on the meta device, whose import
    is slow."""
    return nn.Embedding.from_pretrained(torch.zeros(rows, width), freeze=False)


class DecoderBody(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class SharedHead(Fusable):
    """An LM head of which every process holds a part, and which gives all logits; see `sharding`."""

    weight: nn.Parameter

    def argmax(self, x: Tensor) -> Tensor | None:
        raise NotImplementedError


class Decoder(FusableModel):
    """A causal language model without a cache."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderBody(config)
        self.lm_head: nn.Linear | SharedHead | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.model.embed_tokens.weight, std=INIT_STD)
        if self.lm_head is not None:
            nn.init.normal_(self.lm_head.weight, std=INIT_STD)
        reset_layers(self.model.layers)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed_tokens(tokens)

    def forward(self, tokens: Tensor, mixer: Mixer, target_layers: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Run `tokens [..., T]` int64.

        Returns the final-normed hidden states `[..., T, hidden]` and, for each layer id in `target_layers` in that
        order, the residual stream after that layer `[..., T, hidden]`.
        """
        layers, norm = cast(Sequence[DecoderLayer], self.model.layers), self.model.norm
        if self.impl is None:
            return run_layers(layers, norm, self.embed(tokens), mixer, target_layers)
        first = cast(RMSNorm, layers[0].input_layernorm)
        table = self.model.embed_tokens.weight
        start = kernels.embed_rms_norm(tokens.contiguous(), table, first.weight, first.eps, impl=self.impl)
        return run_fused(layers, norm, start, mixer, target_layers)

    def warmup(self, rows: int) -> None:
        tokens = torch.zeros(1, rows, dtype=torch.int64, device=self.model.norm.weight.device)
        hidden = self(tokens, queries_only)[0]
        self.argmax(hidden)
        self.logits(hidden)

    @property
    def _head(self) -> nn.Linear | nn.Embedding | SharedHead:
        return self.lm_head or self.model.embed_tokens

    @property
    def argmax_is_shared(self) -> bool:
        """Whether all processes that share the model choose `argmax` together."""
        return isinstance(self.lm_head, SharedHead)

    def argmax(self, hidden: Tensor) -> Tensor | None:
        """The largest of `logits` at each row, `[..., T]` int64: the lowest id among equals, -1 for a row without a
        finite one. None where the fused forward has no kernel for it."""
        rows = hidden.numel() // hidden.shape[-1]
        if self.impl is None or not (rows <= MAX_KERNEL_ROWS or self.batch_invariant):
            return None
        head = self._head
        if isinstance(head, SharedHead):
            return head.argmax(hidden)
        return kernels.linear_argmax(
            hidden.contiguous(), head.weight, batch_invariant=self.batch_invariant, impl=self.impl
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden [..., T, hidden]` to `[..., T, V]` in the dtype of the weights."""
        head = self._head
        if isinstance(head, SharedHead):
            return head(hidden)
        if self.impl is not None:
            return kernels.linear(
                hidden.contiguous(), head.weight, batch_invariant=self.batch_invariant, impl=self.impl
            )
        return F.linear(hidden, head.weight)
