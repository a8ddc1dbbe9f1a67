"""The dense mixer against attention spelled out in float64, one query of one head at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.models.decoder import Decoder
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.layers import MixerWeights
from tests.algorithms.tiny_folders import randomise, small_config

BATCH, LENGTH = 2, 11
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"sliding_windows": (None, 1, 3, 40)}, "soft cap": {"soft_cap": 1.5},
    "scale": {"scale": 0.7}, "sinks": {"sinks": True},
    "all": {"sliding_windows": (4,) * 4, "soft_cap": 0.8, "scale": 0.5, "sinks": True},
}  # fmt: skip


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag])


def definition(config: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention of one row, `q [T, H, D]`, `k`/`v [T, H_kv, D]`, before RoPE."""
    out = torch.zeros_like(q)
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    window = config.window(layer) or len(q)
    for t in range(len(q)):
        for head in range(config.num_heads):
            shared = head // (config.num_heads // config.num_kv_heads)
            seen = range(max(0, t - window + 1), t + 1)
            query = rotated(q[t, head], t, config.rope_theta)
            scores = torch.stack([query @ rotated(k[s, shared], s, config.rope_theta) for s in seen]) * scale
            if config.soft_cap is not None:
                scores = config.soft_cap * torch.tanh(scores / config.soft_cap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].exp())
            out[t, head] = (weights / total) @ v[list(seen), shared]
    return out


@pytest.mark.parametrize("options", list(OPTIONS))
@torch.no_grad()
def test_dense_mixer_agrees_with_its_definition(options: str) -> None:
    config = small_config("llama", **OPTIONS[options])
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(BATCH, LENGTH, heads, config.head_dim, generator=generator)
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    )
    sinks = torch.randn(config.num_heads, generator=generator) if config.sinks else None
    mixer = DenseMixer(config, LENGTH, "cpu")
    for layer in range(config.num_layers):
        out = mixer(layer, q, k, v, MixerWeights(sinks=sinks))
        wide = None if sinks is None else sinks.double()
        for row in range(BATCH):
            wanted = definition(config, layer, q[row].double(), k[row].double(), v[row].double(), wide)
            torch.testing.assert_close(out[row].double(), wanted, atol=1e-5, rtol=1e-5)


def test_sinks_are_parameters_that_the_mixer_receives() -> None:
    model = Decoder(small_config("llama", sinks=True))
    randomise(model, 0)
    tokens = torch.tensor([[1, 2, 3]])
    mixer = DenseMixer(model.config, 3, "cpu")
    hidden, _ = model(tokens, mixer)
    hidden.sum().backward()
    for layer in range(model.config.num_layers):
        sinks = model.get_parameter(f"model.layers.{layer}.self_attn.sinks")
        assert sinks.shape == (model.config.num_heads,) and sinks.grad is not None and sinks.grad.abs().min() > 0
