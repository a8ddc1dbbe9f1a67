"""Trains a drafter for any target folder, or the target of the tiny family.

    python -m experiments.train drafter=eagle3 model=smollm2 train.minutes=40 out_dir=outputs/eagle3
    python -m experiments.train drafter=dflash model=local model.path=FOLDER_OR_HUB_NAME text=chat
    python -m experiments.train 'drafter=[dflash,dspark,eagle3]' model=smollm2 train.steps=4000 out_dir=outputs/compared
    torchrun --nproc-per-node=2 -m experiments.train drafter=dflash model=smollm2
    python -m experiments.train drafter=target train.minutes=45 out_dir=outputs/target

`drafter` is dflash, dflash2, domino, dspark, draft (a standalone draft model), eagle, eagle3, mtp, peagle or target;
`experiments/training/objectives` has their settings and losses. Drafters learn from the target's answers to the prompts
of `text`, which `text.folder` keeps for all drafters. A run uses a CPU, a GPU or several, ends by the clock
(`train.minutes`), resumes from its checkpoint, and writes a Hugging Face folder with the loss curve. With a list of
drafters, each is trained on the same batches, and a table compares them (`experiments/training/comparison.py`).
"""

import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from experiments.app import cli
from experiments.app.errors import UserError, disk_is_full, user_errors
from experiments.training import comparison
from experiments.training.export import SUMMARY_FILE, export_weights, plot_curve, write_json
from experiments.training.loop import CHECKPOINT, Trainer
from experiments.training.objectives import SCHEMAS
from experiments.training.objectives.base import Objective, TrainingConfig
from experiments.training.parallel import Replicas

for _name, _schema in SCHEMAS.items():
    _own = make_dataclass(_schema.__name__, [("out_dir", str, f"outputs/train_{_name}")], bases=(_schema,))
    ConfigStore.instance().store(group="drafter", name=_name, node=_own, package="_global_")


def train(config: TrainingConfig, replicas: Replicas | None = None) -> dict[str, Any]:
    """Train, export and measure; returns the contents of `training_summary.json`."""
    folder = Path(config.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(config.train.seed)
    replicas = replicas or Replicas.join(config.train.device)
    objective = config.build(replicas)
    parts = objective.loss, objective.held_out, objective.score
    trainer = Trainer(objective.model, config.train, folder, *parts, replicas)
    if config.resume:
        trainer.resume()
    trainer.run()
    return export(trainer, objective) if replicas.is_first else {}


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
    write_json(folder / SUMMARY_FILE, summary)
    return summary


def _kept(config: TrainingConfig) -> str:
    """The remains of an interrupted run, and how to continue it."""
    checkpoint = Path(config.out_dir) / CHECKPOINT
    without = f"there is no checkpoint yet; text that was written whole is kept in {config.text.folder}"
    kept = f"the last checkpoint is {checkpoint}" if checkpoint.is_file() else without
    return f"{kept}\nthe same command goes on from there"


def run(config: Any, composed: DictConfig, *replicas: Replicas) -> dict[str, Any]:
    """Train by `config` and print the summary; settings or folders that cannot be used become user errors."""
    with user_errors(ValueError):
        try:
            summary = train(config, *replicas)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(_kept(config)) from error
        except Exception as error:
            if not disk_is_full(error):
                raise
            raise UserError(f"the disk is full: make room for out_dir and text.folder\n{_kept(config)}") from error
    for key, value in summary.items():
        if value != {}:
            print(f"{key}: {value}")
    return summary


def main() -> None:
    if set(sys.argv) & set(cli.HELP):
        sys.argv.append("drafter=eagle3")  # without a drafter Hydra composes nothing, not even its help
    elif comparison.is_asked(sys.argv):
        with cli.exits_of_errors("train"):
            comparison.compare(sys.argv[1:], run)
        return
    cli.main(run, "train")


if __name__ == "__main__":
    main()
