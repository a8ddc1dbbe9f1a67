"""Trains a drafter for any target folder, or the target of the tiny family.

    python -m experiments.train drafter=eagle3 model=smollm2 train.minutes=40 out_dir=outputs/eagle3
    python -m experiments.train drafter=dflash model=local model.path=FOLDER_OR_HUB_NAME text=chat
    torchrun --nproc-per-node=2 -m experiments.train drafter=dflash model=smollm2
    python -m experiments.train drafter=target train.minutes=45 out_dir=outputs/target

`drafter` is dflash, draft (a standalone draft model), eagle, eagle3 or target. `experiments/training/objectives` has
one file for each: its settings, its loss and what it reports. Drafters learn from what the target writes: `text` says
to which prompts, and `text.folder` keeps it, once for all drafters. A run uses a CPU, a GPU or several, ends by the
clock (`train.minutes`), resumes from its checkpoint, and writes a Hugging Face folder with the loss curve.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from experiments.app import cli
from experiments.app.arguments import HELP
from experiments.app.errors import UserError, disk_is_full, user_errors
from experiments.training.export import export
from experiments.training.loop import CHECKPOINT, Trainer
from experiments.training.objectives import SCHEMAS
from experiments.training.objectives.base import TrainingConfig
from experiments.training.parallel import Replicas

for _name, _schema in SCHEMAS.items():
    ConfigStore.instance().store(group="drafter", name=_name, node=_schema, package="_global_")


def train(config: TrainingConfig) -> dict[str, Any]:
    """Train, export and measure; returns the summary that is written beside the weights."""
    folder = Path(config.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(config.train.seed)
    replicas = Replicas.join(config.train.device)
    if config.text_only:
        return config.write_text(replicas)
    objective = config.build(replicas)
    trainer = Trainer(
        objective.model, config.train, folder, objective.loss, objective.held_out, objective.score, replicas
    )
    if config.resume:
        trainer.resume()
    trainer.run()
    return export(trainer, objective) if replicas.is_first else {}


def _kept(config: TrainingConfig) -> str:
    """What an interrupted run has left, and how it goes on."""
    checkpoint = Path(config.out_dir) / CHECKPOINT
    if checkpoint.is_file():
        kept = f"the last checkpoint is {checkpoint}"
    else:
        kept = f"there is no checkpoint yet; text that was written whole is kept in {config.text.folder}"
    return f"{kept}\nthe same command goes on from there"


def run(config: Any, composed: DictConfig) -> None:
    """Train by `config` and print the summary; settings or folders that cannot be used become user errors."""
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


def main() -> None:
    """Command line entry."""
    if set(sys.argv) & set(HELP):
        sys.argv.append("drafter=eagle3")  # without a drafter Hydra composes nothing, not even its help
    cli.main(run, "train")


if __name__ == "__main__":
    main()
