"""The kinds of mixing and of MLP that a layer may have besides attention and SwiGLU.

A kind is a folder: a frozen dataclass of its sizes, of which `DecoderConfig` holds one for each layer, its module, and
for a kind of mixing also its definition over whole sequences and its memory. Here and in `algorithms.attention.memory`
it has a line; an architecture names it by a `LayerRule`.
"""

from collections.abc import Callable
from typing import Any

import torch

from algorithms.models.config import DecoderConfig
from algorithms.models.experts.config import ExpertsConfig
from algorithms.models.experts.module import Experts
from algorithms.models.latent.config import LatentConfig
from algorithms.models.latent.module import LatentAttention, LatentDenseMixer
from algorithms.models.layers import MLP, Attention, Mixer, Mixing, SwiGLU
from algorithms.models.linear.config import LinearConfig
from algorithms.models.linear.module import LinearAttention, LinearDenseMixer

MIXINGS: dict[type, Callable[[DecoderConfig, Any], Mixing]] = {
    LatentConfig: LatentAttention,
    LinearConfig: LinearAttention,
}
MLPS: dict[type, Callable[[DecoderConfig, Any], MLP]] = {ExpertsConfig: Experts}
DENSE_MIXERS: dict[type, Callable[[DecoderConfig, Any, int, torch.device | str], Mixer]] = {
    LatentConfig: LatentDenseMixer,
    LinearConfig: LinearDenseMixer,
}
"""The plain definition of a kind of mixing over whole sequences, by its sizes, the longest length and the device."""


def mixing_module(config: DecoderConfig, layer: int) -> Mixing:
    sizes = config.mixing(layer)
    return Attention(config) if sizes is None else MIXINGS[type(sizes)](config, sizes)


def mlp_module(config: DecoderConfig, layer: int) -> MLP:
    sizes = config.mlp(layer)
    return SwiGLU(config) if sizes is None else MLPS[type(sizes)](config, sizes)
