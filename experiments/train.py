"""Trains a drafter for any target folder, or the target of the tiny family.

    python -m experiments.train drafter=eagle3 model=smollm2 train.minutes=40 out_dir=outputs/eagle3
    python -m experiments.train drafter=dflash model=local model.path=FOLDER_OR_HUB_NAME text=chat
    python -m experiments.train -m sweep=compared drafter=dflash,dspark,eagle3 model=smollm2 train.steps=4000
    torchrun --nproc-per-node=2 -m experiments.train drafter=dflash model=smollm2
    python -m experiments.train drafter=target train.minutes=45 out_dir=outputs/target

`drafter` is dflash, dflash2, domino, dspark, draft (a standalone draft model), eagle, eagle3, mtp, peagle or target;
`experiments/training/objectives` has their settings and losses. Drafters learn from the target's answers to the prompts
of `text`, which `text.folder` keeps for all drafters. A run uses a CPU, a GPU or several, ends by the clock
(`train.minutes`), resumes from its checkpoint, and writes a Hugging Face folder with the loss curve. Drafters of a
sweep learn from the same batches where `train.steps` is their budget, and `experiments.collect` compares them.
"""

import sys
from collections.abc import Mapping
from dataclasses import make_dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from experiments.app.cli import HELP, exits_of_errors
from experiments.app.errors import UserError, disk_is_full, user_errors
from experiments.app.files import to_json, write_whole
from experiments.app.provenance import measured_on
from experiments.report.run_folder import SUMMARY
from experiments.sweep.main import main as sweep_main
from experiments.training.export import SUMMARY_FILE, export_weights, plot_curve, write_json
from experiments.training.loop import CHECKPOINT, Trainer
from experiments.training.objectives import SCHEMAS
from experiments.training.objectives.base import TrainingConfig
from experiments.training.parallel import Replicas

for _name, _schema in SCHEMAS.items():
    _own = make_dataclass(_schema.__name__, [("out_dir", str, f"outputs/train_{_name}")], bases=(_schema,))
    ConfigStore.instance().store(group="drafter", name=_name, node=_own, package="_global_")


def train(config: TrainingConfig) -> dict[str, Any]:
    """Train, export and measure; returns the contents of `training_summary.json`."""
    folder = Path(config.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(config.train.seed)
    replicas = Replicas.join(config.train.device)
    objective = config.build(replicas)
    trainer = Trainer(objective, config.train, folder, replicas)
    if config.resume:
        trainer.resume()
    trainer.run()
    return export(trainer) if replicas.is_first else {}


def export(trainer: Trainer) -> dict[str, Any]:
    """Write and measure the best model of the run; returns the summary."""
    objective, folder, device = trainer.objective, trainer.folder, trainer.settings.device
    best = trainer.restore_best()
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
    write_json(folder / SUMMARY_FILE, summary)
    return summary


def _kept(config: TrainingConfig) -> str:
    """The remains of an interrupted run, and how to continue it."""
    checkpoint = Path(config.out_dir) / CHECKPOINT
    without = f"there is no checkpoint yet; text that was written whole is kept in {config.text.folder}"
    kept = f"the last checkpoint is {checkpoint}" if checkpoint.is_file() else without
    return f"{kept}\nthe same command goes on from there"


def results_of(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One result for each way to draft on each evaluation set, or one without."""
    losses = [value for key, value in summary.items() if key.startswith("heldout_")]
    shared = {
        "parameters": summary["parameters"],
        "training_tokens": summary["tokens"],
        "heldout_loss": fmean(losses) if losses else None,
    }
    return [
        {"data": data, "method": method, "tokens_per_step": tokens, **shared}
        for data, of_set in summary.get("tokens_per_step", {}).items()
        for method, tokens in of_set.items()
    ] or [shared]


def write_job(config: TrainingConfig, summary: Mapping[str, Any]) -> float | None:
    """Mark the job of a sweep as done, by the file that `experiments.collect` reads. Returns its tokens per step."""
    results, settings = results_of(summary), config.train
    where = measured_on("cuda" if settings.on_gpu else "cpu")
    about = {"name": "train", "task": "train", "objective": "tokens_per_step", "device": settings.device}
    write_whole(Path(config.out_dir) / SUMMARY, to_json({**about, **where, "rows": results}) + "\n")
    tokens = [result["tokens_per_step"] for result in results if "tokens_per_step" in result]
    return fmean(tokens) if tokens else None


def run(config: Any, composed: DictConfig) -> float | None:
    """Train by `config` and print the summary; settings or folders that cannot be used become user errors. Returns the
    figure of the run in the table of a sweep."""
    with user_errors(ValueError):
        try:
            summary = train(config)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(_kept(config)) from error
        except Exception as error:
            if not disk_is_full(error):
                raise
            raise UserError(f"the disk is full: make room for out_dir and text.folder\n{_kept(config)}") from error
    for key, value in summary.items():
        if value != {}:
            print(f"{key}: {value}")
    return write_job(config, summary) if summary and config.sweep.name is not None else None


def main() -> None:
    if set(sys.argv) & set(HELP):
        sys.argv.append("drafter=eagle3")  # without a drafter Hydra composes nothing, not even its help
    elif listed := [word for word in sys.argv if word.startswith("drafter=[")]:
        names = listed[0].removeprefix("drafter=[").rstrip("]")
        with exits_of_errors("train"):
            raise UserError(f"{listed[0]}: expected one; a sweep trains several: -m sweep=NAME drafter={names}")
    sweep_main(run, ["-m", "experiments.train"], "train")


if __name__ == "__main__":
    main()
