"""A decoder's slice for tensor parallelism (Megatron-LM, arXiv 1909.08053): one process per device.

Query, key, value, gate and up projections are split by their outputs, so a rank holds some of the heads and some of the
MLP's columns, of every expert as well. Output and down projections are split by their inputs, and a sum over ranks
follows each of them: two all-reduces per layer. A rank computes, of the LM head, the logits of its own part of the
vocabulary, and the parts are joined on every rank; a vocabulary that cannot be shared out evenly stays whole.
Embedding, norms, routers and the projections to latents are whole on every rank. The KV cache of a rank holds the
rank's own heads, or the latents that all heads read; its state slots hold the states of its own heads.

Each rank chooses experts for itself. The sums that lead to the choice have the same bits on all ranks where all add in
the same order, see `collectives`; where a process group does not, two experts whose scores differ by a rounding may
each be computed in part.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import Block, Decoder, SharedHead
from algorithms.parallel.collectives import exchange_of, join_columns, parallel
from algorithms.parallel.layers import part, shard_mixing, shard_mlp
from algorithms.parallel.shares import parallel_config
from specdec_kernels import linear, linear_argmax

_NUMBERS_OF_A_CHOICE = 2  # the largest logit and its token


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


@torch.no_grad()
def shard(model: Decoder, rank: int, world_size: int) -> Decoder:
    """Keep this rank's slice of `model`, in place. Needs an initialised process group before the first forward."""
    config = parallel_config(model.config, world_size)
    _shard_layers(model.model, config, rank)
    if config.vocab_size % world_size == 0:
        rows = part(rank, config.vocab_size // world_size)
        # The head of tied embeddings is a view of them, since every rank looks up any token.
        own = model.model.embed_tokens.weight[rows] if model.lm_head is None else model.lm_head.weight[rows].clone()
        model.lm_head = VocabParallelHead(own)
    model.config = config
    return model


@torch.no_grad()
def shard_drafter(drafter: Any) -> None:
    """Keep this rank's slice of a drafter's layers, in place; its other parts stay whole. A drafter that cannot be
    shared out evenly stays whole on every rank. `drafter.config.decoder` describes the layers."""
    if not parallel():
        return
    try:
        config = parallel_config(drafter.config.decoder, dist.get_world_size())
    except ValueError:
        return
    _shard_layers(drafter, config, dist.get_rank())
    drafter.config = replace(drafter.config, decoder=config)


def _shard_layers(model: nn.Module, config: DecoderConfig, rank: int) -> None:
    for index, layer in enumerate(module for module in model.modules() if isinstance(module, Block)):
        shard_mixing(layer.mixing, config, index, rank)
        layer.mlp = shard_mlp(layer.mlp, config, index, rank)
