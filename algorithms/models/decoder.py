"""Decoder-only transformers as one module that `DecoderConfig` describes.

A layer is a mixing module and an MLP, each of the kind that the config names for it. The model owns the weights and the
residual stream. A `Mixer` does everything that involves other tokens: it receives the raw projections and returns the
attention output. So one forward serves training, paged prefill and tree verification. Parameter names are as in Hugging
Face checkpoints.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import specdec_kernels as kernels
from algorithms.models.config import DecoderConfig
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.experts.module import ExpertTensors, Router
from algorithms.models.fusion import Fusable, FusableModel
from algorithms.models.kinds import mixing_module, mlp_module
from algorithms.models.layers import MLP, Attention, Mixer, Mixing, RMSNorm, real_rows
from algorithms.models.linear.module import LinearAttention
from specdec_kernels.projection import MAX_KERNEL_ROWS

INIT_STD = 0.02


class Block(nn.Module):
    """The part of every layer after its mixing: the projection, a norm, the MLP, and two residual additions."""

    mixing_name = "self_attn"
    input_layernorm: nn.Module
    self_attn: Attention  # where the layer has attention
    post_attention_layernorm: RMSNorm
    mlp: MLP
    post_self_attn_layernorm: RMSNorm | None
    post_mlp_layernorm: RMSNorm | None

    def __init__(self) -> None:
        super().__init__()
        self.post_self_attn_layernorm = self.post_mlp_layernorm = None

    @property
    def mixing(self) -> Mixing:
        return getattr(self, self.mixing_name)

    def _real(self, mixer: Mixer) -> Tensor | None:
        return real_rows(mixer) if self.mlp.skips_padding else None

    def after_mixing(self, mixed: Tensor, stream: Tensor, real: Tensor | None = None) -> Tensor:
        norm, projection = self.post_attention_layernorm, self.mixing.out
        if norm.impl is None:
            stream = stream + _closed(self.post_self_attn_layernorm, projection(mixed))
            return stream + _closed(self.post_mlp_layernorm, self.mlp(norm(stream), real))
        normed, stream = norm.after(projection, mixed, stream, self.post_self_attn_layernorm)
        return stream + _closed(self.post_mlp_layernorm, self.mlp(normed, real))

    def fused(self, layer: int, start: kernels.Normed, mixer: Mixer, following: RMSNorm) -> kernels.Normed:
        """The layer between two norms: `start` is normed by its own, the result by the `following` one."""
        mixed = self.mixing(layer, start.normed, mixer)
        normed, residual = self.post_attention_layernorm.after(
            self.mixing.out, mixed, start.residual, self.post_self_attn_layernorm
        )
        return self.mlp.ended(normed, residual, following, self.post_mlp_layernorm, self._real(mixer))


def _norm(config: DecoderConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, config.wide_norms)


def _closed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class DecoderLayer(Block):
    """Pre-norm residual block; the first layer of an EAGLE head has no `input_norm`."""

    def __init__(self, config: DecoderConfig, input_norm: bool = True, layer: int = 0) -> None:
        super().__init__()
        self.input_layernorm = _norm(config) if input_norm else nn.Identity()
        mixing = mixing_module(config, layer)
        self.mixing_name = mixing.name
        self.add_module(mixing.name, mixing)
        self.post_attention_layernorm = _norm(config)
        self.mlp = mlp_module(config, layer)
        if config.closing_norms:
            self.post_self_attn_layernorm, self.post_mlp_layernorm = _norm(config), _norm(config)

    def forward(self, layer: int, x: Tensor, mixer: Mixer) -> Tensor:
        return self.after_mixing(self.mixing(layer, self.input_layernorm(x), mixer), x, self._real(mixer))


def run_layers(
    layers: Sequence[DecoderLayer], norm: RMSNorm, x: Tensor, mixer: Mixer, target_layers: Sequence[int] = ()
) -> tuple[Tensor, list[Tensor]]:
    """`x [..., T, hidden]` through the layers and the final norm; returns as `Decoder.forward`. Without kernels every
    layer is called: training compiles their `forward`."""
    if norm.impl is not None:
        return run_fused(layers, norm, kernels.Normed(layers[0].input_layernorm(x), x), mixer, target_layers)
    outputs: dict[int, Tensor] = {}
    for index, layer in enumerate(layers):
        x = layer(index, x, mixer)
        if index in target_layers:
            outputs[index] = x
    return norm(x), [outputs[index] for index in target_layers]


def run_fused(
    layers: Sequence[Block], norm: RMSNorm, start: kernels.Normed, mixer: Mixer, target_layers: Sequence[int]
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
            if isinstance(module, (Router, ExpertTensors, LinearAttention)):
                module.reset_parameters()
            if not isinstance(module, nn.Linear):
                continue
            if name.endswith(("o_proj", "out_proj", "down_proj")):
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
        self.layers = nn.ModuleList(DecoderLayer(config, layer=layer) for layer in range(config.num_layers))
        self.norm = _norm(config)


class SharedHead(Fusable):
    """An LM head of which every process holds a part, and which gives all logits; see `sharding`."""

    weight: nn.Parameter

    def argmax(self, x: Tensor) -> Tensor | None:
        raise NotImplementedError


class Decoder(FusableModel):
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
        """Run `tokens [..., T]` int64. Returns the final-normed hidden states `[..., T, hidden]` and, for each layer id
        in `target_layers` in that order, the residual stream after that layer `[..., T, hidden]`."""
        layers, norm = cast(Sequence[DecoderLayer], self.model.layers), self.model.norm
        if self.impl is None:
            return run_layers(layers, norm, self.embed(tokens), mixer, target_layers)
        first = cast(RMSNorm, layers[0].input_layernorm)
        table = self.model.embed_tokens.weight
        start = kernels.embed_rms_norm(tokens.contiguous(), table, first.weight, first.eps, impl=self.impl)
        return run_fused(layers, norm, start, mixer, target_layers)

    def warmup(self, rows: int) -> None:
        tokens = torch.zeros(1, rows, dtype=torch.int64, device=self.model.norm.weight.device)
        hidden = self(tokens, DenseMixer(self.config, rows, tokens.device))[0]
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
        if self.impl is None:
            return None
        head, rows = self._head, hidden.numel() // hidden.shape[-1]
        if isinstance(head, SharedHead):
            return head.argmax(hidden)
        if rows > MAX_KERNEL_ROWS and not self.batch_invariant:
            return None
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
