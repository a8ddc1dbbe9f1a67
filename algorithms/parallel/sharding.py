"""A decoder's slice for tensor parallelism (Megatron-LM, arXiv 1909.08053): one process per device.

Query, key, value, gate and up projections are split by their outputs, so a rank holds some of the heads and some of the
MLP's columns. Output and down projections are split by their inputs, and a sum over ranks follows each of them: two
all-reduces per layer. A rank computes, of the LM head, the logits of its own part of the vocabulary, and the parts are
joined on every rank; a vocabulary that cannot be shared out evenly stays whole. Embedding, norms and the projections to
latents are whole on every rank. The KV cache of a rank holds the rank's own heads, or the latents that all heads read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import Decoder, DecoderLayer, SharedHead
from algorithms.models.fusion import NormedProjection
from algorithms.models.latent.config import LatentConfig
from algorithms.models.latent.module import LatentAttention
from algorithms.models.layers import Attention, SwiGLU
from algorithms.parallel.collectives import exchange_of, join_columns, sum_in_order, sum_over_ranks
from specdec_kernels import Normed, add_rms_norm, linear, linear_all_reduce_add_rms_norm, linear_argmax
from specdec_kernels.all_reduce import as_sent

_NUMBERS_OF_A_CHOICE = 2  # the largest logit and its token


class RowParallelLinear(NormedProjection):
    """y = sum over ranks of x_r W_r^T, + bias: this rank holds the columns x_r. `slot` is the slot of its exchanges."""

    def __init__(self, whole: nn.Linear, columns: slice, slot: int) -> None:
        super().__init__()
        self.slot = slot
        self.weight = nn.Parameter(whole.weight[:, columns].clone(), requires_grad=False)
        self.bias = whole.bias

    def forward(self, x: Tensor) -> Tensor:
        if self.impl is None:
            y = F.linear(x, self.weight)
        else:
            y = linear(x, self.weight, batch_invariant=self.batch_invariant, impl=self.impl)
        y = sum_in_order(y) if self.batch_invariant else sum_over_ranks(y)
        return y if self.bias is None else y + self.bias

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Normed:
        assert self.impl is not None
        same, impl = self.batch_invariant, self.impl
        exchange = exchange_of(residual) if self.bias is None else None
        if exchange is not None:
            return linear_all_reduce_add_rms_norm(
                x, self.weight, exchange, self.slot, residual, weight, eps, batch_invariant=same, impl=impl
            )
        if same and self.bias is None:
            # What the exchange does with fewer rows: the ranks' sums, without their last bits, are added in float32 and
            # rounded once.
            part = linear(x, self.weight, batch_invariant=True, out_dtype=torch.float32, impl=impl)
            return add_rms_norm(sum_in_order(as_sent(part)).to(x.dtype), residual, weight, eps, impl=impl)
        return add_rms_norm(self(x), residual, weight, eps, impl=impl)


class VocabParallelHead(SharedHead):
    """Logits of the whole vocabulary, of which this rank computes the rows of `weight`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self.impl is None:
            return join_columns(F.linear(x, self.weight))
        return join_columns(linear(x, self.weight, batch_invariant=self.batch_invariant, impl=self.impl))

    def argmax(self, x: Tensor) -> Tensor | None:
        exchange = exchange_of(x, _NUMBERS_OF_A_CHOICE)
        if self.impl is None or exchange is None:
            return None
        x, same = x.contiguous(), self.batch_invariant
        return linear_argmax(x, self.weight, batch_invariant=same, exchange=exchange, impl=self.impl)


def parallel_config(config: DecoderConfig, world_size: int) -> DecoderConfig:
    """The shape of one rank's slice. Raises ValueError where heads or MLP columns cannot be shared out evenly."""
    kinds = {type(kind) for kind in (*config.mixings, *config.mlps) if kind is not None} - {LatentConfig}
    if found := sorted(kind.__name__ for kind in kinds):
        raise ValueError(
            f"runtime.tensor_parallel={world_size}: expected attention, latent attention and SwiGLU, got {found}"
        )
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        if getattr(config, name) % world_size:
            raise ValueError(
                f"runtime.tensor_parallel={world_size} does not divide the target's {name}={getattr(config, name)}"
            )
    return replace(
        config,
        num_heads=config.num_heads // world_size,
        num_kv_heads=config.num_kv_heads // world_size,
        intermediate_size=config.intermediate_size // world_size,
    )


@torch.no_grad()
def shard(model: Decoder, rank: int, world_size: int) -> Decoder:
    """Keep this rank's slice of `model`, in place. Needs an initialised process group before the first forward."""
    config = parallel_config(model.config, world_size)
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        if isinstance(layer.mixing, LatentAttention):
            _shard_latent(layer.mixing, config, rank)
        else:
            _shard_attention(layer.self_attn, config, rank)
        mlp, columns = cast(SwiGLU, layer.mlp), _part(rank, config.intermediate_size)
        _keep_outputs(mlp.gate_proj, columns)
        _keep_outputs(mlp.up_proj, columns)
        mlp.add_module("down_proj", RowParallelLinear(mlp.down_proj, columns, slot=1))
    if config.vocab_size % world_size == 0:
        rows = _part(rank, config.vocab_size // world_size)
        # The head of tied embeddings is a view of them, since every rank looks up any token.
        own = model.model.embed_tokens.weight[rows] if model.lm_head is None else model.lm_head.weight[rows].clone()
        model.lm_head = VocabParallelHead(own)
    model.config = config
    return model


def _shard_attention(attention: Attention, config: DecoderConfig, rank: int) -> None:
    queries = _part(rank, config.num_heads * config.head_dim)
    keys = _part(rank, config.num_kv_heads * config.head_dim)
    _keep_outputs(attention.q_proj, queries)
    _keep_outputs(attention.k_proj, keys)
    _keep_outputs(attention.v_proj, keys)
    attention.add_module("o_proj", RowParallelLinear(attention.o_proj, queries, slot=0))
    if attention.sinks is not None:
        heads = _part(rank, config.num_heads)
        attention.sinks = nn.Parameter(attention.sinks[heads].clone(), requires_grad=False)


def _shard_latent(attention: LatentAttention, config: DecoderConfig, rank: int) -> None:
    """A rank has some of the heads; every rank stores the latents of all."""
    sizes, heads = attention.sizes, config.num_heads
    queries = attention.q_b_proj if attention.q_proj is None else attention.q_proj
    _keep_outputs(queries, _part(rank, heads * (sizes.nope + sizes.rope)))
    _keep_outputs(attention.kv_b_proj, _part(rank, heads * (sizes.nope + sizes.value)))
    attention.add_module("o_proj", RowParallelLinear(attention.o_proj, _part(rank, heads * sizes.value), slot=0))


def _part(rank: int, size: int) -> slice:
    return slice(rank * size, (rank + 1) * size)


def _keep_outputs(linear: nn.Linear, rows: slice) -> None:
    linear.weight = nn.Parameter(linear.weight[rows].clone(), requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias[rows].clone(), requires_grad=False)
    linear.out_features = linear.weight.shape[0]
