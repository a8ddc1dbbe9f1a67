"""Writes what a run leaves: the model's folder, the figures that it reaches, and the loss curve."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from experiments.training.loop import Trainer
from experiments.training.model_folder import export_weights, write_json
from experiments.training.objectives.base import Objective

NOT_A_LOSS = ("step", "tokens", "elapsed_s", "served_")
"""What the names of columns begin with that are no losses."""


def export(trainer: Trainer, objective: Objective) -> dict[str, Any]:
    """Write and measure the best model of the run; returns the summary."""
    folder, device, best = trainer.folder, trainer.settings.device, trainer.restore_best()
    objective.model.eval()
    # The weights come first: a failed measurement must not cost them.
    export_weights(objective.weights(), objective.hf_config(), folder)
    plot_curve(trainer.rows, folder / "training.svg", f"{objective.title}: training and held-out loss")
    summary: dict[str, Any] = {
        **objective.measure(folder),
        "parameters": sum(parameter.numel() for parameter in objective.model.parameters()),
        "steps": trainer.step,
        "best_step": best,
        "tokens": trainer.tokens,
        "elapsed_s": round(trainer.elapsed_s, 1),
        "device": torch.cuda.get_device_name(device) if trainer.settings.on_gpu else device,
        "processes": trainer.replicas.world,
        "threads": torch.get_num_threads(),
        **{key: value for key, value in trainer.rows[-1].items() if key.startswith("heldout")},
    }
    write_json(folder / "training_summary.json", summary)
    return summary


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
    for column in (key for key in columns if not key.startswith(NOT_A_LOSS)):
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
