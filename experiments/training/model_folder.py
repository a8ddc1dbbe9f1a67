"""Model folders in the Hugging Face layout: bfloat16 safetensors and `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from experiments.app.whole_file import whole_file

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def export_weights(weights: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    """Write `config.json` and `model.safetensors` into `folder`; the weights appear in one move.

    Weights are rounded to bfloat16. Integer and boolean buffers keep their dtype.
    """
    write_json(folder / CONFIG_FILE, config)
    tensors = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in weights.items()
    }
    with whole_file(folder / WEIGHTS_FILE) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(0o644)  # safetensors creates files that only the owner may read
