"""One compiled forward for all layers of a model that is trained on dense rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from algorithms.runtime.models.decoder import Decoder, DecoderLayer
from algorithms.runtime.models.dense_mixer import DenseMixer


def compile_layers(model: Decoder) -> None:
    """Give all layers one compiled forward.

    `DenseMixer` uses the layer index for the window only, so the first layer with the same window stands for all of
    them, which spares a compilation per layer. Call `restore_layers` before the model meets another mixer.
    """
    compiled = torch.compile(DecoderLayer.forward, dynamic=False)
    windows = [model.config.window(index) for index in range(model.config.num_layers)]
    for layer, window in zip(model.model.layers, windows, strict=True):
        layer.forward = partial(_with_constant_index, compiled, layer, windows.index(window))  # type: ignore


def restore_layers(model: Decoder) -> None:
    """Undo `compile_layers`."""
    for layer in model.model.layers:
        layer.__dict__.pop("forward", None)


def _with_constant_index(
    compiled: Callable[..., Tensor], module: nn.Module, constant: int, _: int, x: Tensor, mixer: DenseMixer
) -> Tensor:
    return compiled(module, constant, x, mixer)
