"""Dense attention for training: the whole row at once, no cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.runtime.models.config import DecoderConfig
from algorithms.runtime.models.decoder import Decoder, DecoderLayer
from algorithms.runtime.models.rope import apply_rope, rope_table


def head_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Per-head RMSNorm of `x [..., D]`; the identity without a weight."""
    if weight is None:
        return x
    wide = x.float()
    return weight.to(x.dtype) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class DenseMixer:
    """Causal self-attention over rows `[B, T]` whose positions are 0 … T-1."""

    def __init__(self, config: DecoderConfig, length: int, device: torch.device | str) -> None:
        self.eps = config.rms_norm_eps
        self.table = rope_table(config, length, device)
        self.positions = torch.arange(length, device=device)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> Tensor:
        positions = self.positions[: q.shape[-3]]
        q = apply_rope(head_norm(q, q_norm, self.eps), self.table, positions).transpose(-2, -3)
        k = apply_rope(head_norm(k, k_norm, self.eps), self.table, positions).transpose(-2, -3)
        group = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(group, -3), v.transpose(-2, -3).repeat_interleave(group, -3)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3)


def compile_layers(model: Decoder) -> None:
    """Give all layers one compiled forward.

    `DenseMixer` has no use for the layer index; a constant one spares a compilation per layer. Other mixers do need it:
    call `restore_layers` before the model meets one.
    """
    compiled = torch.compile(DecoderLayer.forward, dynamic=False)
    for layer in model.model.layers:
        layer.forward = partial(_with_constant_index, compiled, layer)  # type: ignore[method-assign]


def restore_layers(model: Decoder) -> None:
    """Undo `compile_layers`."""
    for layer in model.model.layers:
        layer.__dict__.pop("forward", None)


def _with_constant_index(
    compiled: Callable[..., Tensor], module: nn.Module, layer: int, x: Tensor, mixer: DenseMixer
) -> Tensor:
    return compiled(module, 0, x, mixer)
