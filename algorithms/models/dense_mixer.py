"""Attention over whole sequences without a cache, for training and as the plain definition."""

from typing import Any

import torch
from einops import repeat
from torch import Tensor

from algorithms.models.config import DecoderConfig
from algorithms.models.kinds import DENSE_MIXERS
from algorithms.models.layers import MixerWeights, apply_rope, head_norm, plain_attention, rope_table


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
        # Written out for every query head, because not every kernel of torch that has gradients shares them.
        k, v = (repeat(x, "b s h d -> b s (h group) d", group=q.shape[2] // k.shape[2]) for x in (k, v))
        return plain_attention(q, k, v, visible, config.scale, config.soft_cap, weights.sinks)
