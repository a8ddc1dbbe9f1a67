"""Writes a trained model as a Hugging Face folder: bfloat16 safetensors, `config.json`, a summary and a loss curve."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from experiments.training.loop import Trainer
from experiments.training.objectives.base import Objective

NOT_A_LOSS = frozenset({"step", "tokens", "elapsed_s"})


def export(trainer: Trainer, objective: Objective) -> dict[str, Any]:
    """Round, write and measure the trained model; returns the summary."""
    model, folder, device = objective.model, trainer.folder, trainer.settings.device
    objective.finish()
    round_weights(model)
    model.eval()
    # The weights come first: a failed measurement must not cost them.
    export_weights(model, objective.hf_config(), folder)
    summary: dict[str, Any] = {
        **objective.measure(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": trainer.step,
        "tokens": trainer.tokens,
        "elapsed_s": round(trainer.elapsed_s, 1),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "threads": trainer.settings.threads,
        **{key: value for key, value in trainer.rows[-1].items() if key.startswith("heldout")},
    }
    write_json(folder / "training_summary.json", summary)
    plot_curve(trainer.rows, folder / "training.svg", f"{objective.title}: training and held-out loss")
    return summary


def round_weights(model: nn.Module) -> None:
    """Round the weights to bfloat16 in place and keep their dtype, as a reader of the exported file gets them."""
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


def plot_curve(rows: Sequence[dict[str, Any]], path: Path, title: str) -> bool:
    """Draw every loss column of `rows` against millions of tokens; returns whether a picture was written.

    There is no picture without matplotlib, which comes with the `dev` extra.
    """
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6))
    axis = figure.subplots()
    columns = dict.fromkeys(key for row in rows for key in row)
    for column in (key for key in columns if key not in NOT_A_LOSS and not key.startswith("tokens_per_step")):
        drawn = [row for row in rows if column in row]
        millions = [row["tokens"] / 1e6 for row in drawn]
        width = 1.0 if column == "loss" else 1.8
        axis.plot(millions, [row[column] for row in drawn], label=column, linewidth=width)
    axis.set(xlabel="training tokens, millions", ylabel="cross entropy, nats per token", title=title)
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    return True
