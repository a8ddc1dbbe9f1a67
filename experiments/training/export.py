"""Writes trained weights as a Hugging Face folder: bfloat16 safetensors and `config.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn


def round_weights(model: nn.Module) -> None:
    """Round the weights to bfloat16 in place and keep their dtype: what a reader of the exported file computes with."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def export_weights(model: nn.Module, config: Mapping[str, Any], folder: Path) -> None:
    """Write `config.json` and `model.safetensors` into `folder`; the weights appear in one move.

    Integer and boolean buffers keep their dtype.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    tensors = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in weights.items()
    }
    partial = folder / "model.safetensors.tmp"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors creates files that only the owner may read
    os.replace(partial, folder / "model.safetensors")
