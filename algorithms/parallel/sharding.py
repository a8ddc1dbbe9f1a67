"""A decoder's slice for tensor parallelism (Megatron-LM, arXiv 1909.08053): one process per device.

Query, key, value, gate and up projections are split by their outputs, so a rank holds some of the heads and some of the
MLP's columns, of every expert as well. Output and down projections are split by their inputs, and a sum over ranks
follows each of them. A rank computes the logits of its own part of the vocabulary, and the parts are joined; a
vocabulary that cannot be shared out evenly stays whole, as embedding, norms, routers and projections to latents do. The
cache of a rank holds its own heads, or the latents that all heads read; its state slots those of its own heads.

Each rank chooses experts for itself. Where a process group does not add in the same order on all ranks, see
`collectives`, two experts whose scores differ by a rounding may each be computed in part.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import Block, Decoder, SharedHead
from algorithms.models.experts.config import MXFP4_GROUP, ExpertsConfig
from algorithms.models.folder import ModelError
from algorithms.models.linear.config import LinearConfig
from algorithms.models.loading.target import CONFIG_FILE, TargetFolder
from algorithms.parallel.collectives import exchange_of, join_columns, parallel
from algorithms.parallel.layers import part, shard_mixing, shard_mlp
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


def check_shareable(found: TargetFolder, processes: int) -> None:
    """ModelError where the weights cannot be divided among `processes`, ValueError where the shape cannot be."""
    if processes == 1:
        return
    if found.weight_format is not None:
        raise ModelError(
            f"runtime.tensor_parallel={processes}: the scales of float8 weights are not divided among processes",
            where=found.path / CONFIG_FILE,
            expected="weights that are not quantised",
            fix="use runtime.tensor_parallel=1, or the unquantised checkpoint",
        )
    parallel_config(found.config, processes)


def parallel_config(config: DecoderConfig, world_size: int) -> DecoderConfig:
    """The shape of one rank's slice. Raises ValueError where heads or MLP columns cannot be shared out evenly."""
    names = ["num_heads", "num_kv_heads"]
    if not config.mlps or None in config.mlps:  # else no layer has an MLP of this width
        names.append("intermediate_size")
    return replace(
        config,
        **_divided({name: getattr(config, name) for name in names}, world_size),
        mixings=tuple(_mixing(sizes, world_size) for sizes in config.mixings),
        mlps=tuple(_mlp(sizes, world_size) for sizes in config.mlps),
    )


def _mixing(sizes: Any, world_size: int) -> Any:
    if not isinstance(sizes, LinearConfig):
        return sizes  # latents are whole on every rank
    given = {"linear_num_key_heads": sizes.key_heads, "linear_num_value_heads": sizes.value_heads}
    keys, values = _divided(given, world_size).values()
    return replace(sizes, key_heads=keys, value_heads=values)


def _mlp(sizes: ExpertsConfig | None, world_size: int) -> ExpertsConfig | None:
    if sizes is None:
        return None
    given = {"experts' width": sizes.width, "shared expert's width": sizes.gated_shared}
    width, gated_shared = _divided(given, world_size).values()
    if sizes.mxfp4 and width % MXFP4_GROUP:
        raise ValueError(
            f"runtime.tensor_parallel={world_size} splits blocks of the target's MXFP4 experts: expected a width that "
            f"{world_size * MXFP4_GROUP} divides, got {sizes.width}"
        )
    return replace(sizes, width=width, gated_shared=gated_shared)


def _divided(sizes: Mapping[str, int], world_size: int) -> dict[str, Any]:
    for name, size in sizes.items():
        if size % world_size:
            raise ValueError(
                f"runtime.tensor_parallel={world_size} does not divide the target's {name}: expected a multiple of "
                f"{world_size}, got {size}"
            )
    return {name: size // world_size for name, size in sizes.items()}
