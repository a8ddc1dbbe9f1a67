"""Writes a model folder in the Hugging Face layout, and the loss curve."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from experiments.app.files import whole_file

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
SUMMARY_FILE = "training_summary.json"
NOT_A_LOSS = ("step", "tokens", "elapsed_s")  # prefixes of columns that are no losses


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def export_weights(weights: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    """Write `config.json` and `model.safetensors` into `folder`; the weights appear in one move. Weights are rounded to
    bfloat16. Integer and boolean buffers keep their dtype."""
    write_json(folder / CONFIG_FILE, config)
    tensors = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in weights.items()
    }
    with whole_file(folder / WEIGHTS_FILE) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(0o644)  # safetensors creates files that only the owner may read


def plot_curve(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw every loss column of `rows` against millions of tokens, where matplotlib is installed (extra `plots`)."""
    if find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6))
    axis = figure.subplots()
    columns = dict.fromkeys(key for row in rows for key in row)
    for column in (key for key in columns if not key.startswith(NOT_A_LOSS)):
        points = [row for row in rows if column in row]
        millions = [row["tokens"] / 1e6 for row in points]
        width = 1.0 if column == "loss" else 1.8
        axis.plot(millions, [row[column] for row in points], label=column, linewidth=width)
    axis.set(xlabel="training tokens, millions", ylabel="cross entropy, nats per token", title=title)
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
