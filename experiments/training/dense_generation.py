"""Batched greedy generation with a dense cache, for making training data and measuring a freshly trained model.

Unlike the runtime's engine it holds many prompts in one dense tensor, drops rows that finish, and needs no pages and no
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from algorithms.runtime.models.config import DecoderConfig
from algorithms.runtime.models.decoder import Decoder, MixerWeights
from algorithms.runtime.models.dense_mixer import dense_attention, head_norm, visible_keys
from algorithms.runtime.models.rope import apply_rope, rope_table


class DenseCache:
    """Keys and values `[layers, B, capacity, H_kv, D]` and the mixer that reads and extends them."""

    def __init__(
        self, config: DecoderConfig, batch: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.table = rope_table(config, capacity, device)
        shape = (config.num_layers, batch, capacity, config.num_kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but `rows [n]`."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        positions, eps = self.positions, self.config.rms_norm_eps
        q = apply_rope(head_norm(q, weights.q_norm, eps), self.table, positions)
        k = apply_rope(head_norm(k, weights.k_norm, eps), self.table, positions)
        rows = torch.arange(q.shape[0], device=q.device)[:, None]
        keys, values = self.keys[layer], self.values[layer]
        keys[rows, positions], values[rows, positions] = k.to(keys.dtype), v.to(values.dtype)
        used = int(positions.max()) + 1
        visible = visible_keys(positions, torch.arange(used, device=q.device), self.config.window(layer))
        keys, values = keys[:, :used].to(q.dtype), values[:, :used].to(q.dtype)
        return dense_attention(q, keys, values, rearrange(visible, "b t s -> b 1 t s"), self.config, weights.sinks)


@torch.no_grad()
def greedy(
    model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: int, batch: int = 128
) -> list[list[int]]:
    """Greedy continuations of `prompts`, each up to and including `stop` or `max_new_tokens` long."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        written = _greedy_batch(model, [prompts[i] for i in chosen], max_new_tokens, stop)
        for index, tokens in zip(chosen, written, strict=True):
            outputs[index] = tokens
    return outputs


def _greedy_batch(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: int) -> list[list[int]]:
    weight = model.model.embed_tokens.weight
    lengths = torch.tensor([len(p) for p in prompts], device=weight.device)
    width = int(lengths.max())
    cache = DenseCache(model.config, len(prompts), width + max_new_tokens, weight.device, weight.dtype)
    padded = torch.tensor([[*p, *[stop] * (width - len(p))] for p in prompts], device=weight.device)
    # Padding behind a short prompt is written to the cache, but each decoded token overwrites it before it is visible.
    cache.positions = torch.arange(width, device=weight.device).expand(len(prompts), width)
    hidden, _ = model(padded, cache)
    alive = torch.arange(len(prompts), device=weight.device)
    last = hidden[alive, lengths - 1]
    outputs: list[list[int]] = [[] for _ in prompts]
    for produced in range(max_new_tokens):
        tokens = model.logits(last).argmax(-1)
        for row, token in zip(alive.tolist(), tokens.tolist(), strict=True):
            outputs[row].append(token)
        going = (tokens != stop).nonzero().squeeze(-1)
        if len(going) == 0 or produced == max_new_tokens - 1:
            break
        if len(going) < len(alive):
            cache.keep(going)
            alive, lengths, tokens = alive[going], lengths[going], tokens[going]
        cache.positions = lengths[:, None]
        hidden, _ = model(tokens[:, None], cache)
        last, lengths = hidden[:, 0], lengths + 1
    return outputs
