"""Several drafters of one target, trained one after the other on the same batches, and a table that compares them.

    python -m experiments.train 'drafter=[dflash,dspark,eagle3]' model=smollm2 train.steps=4000 dspark.drafter.slots=own

A setting holds for all drafters, or for the one whose name is in front of it. The budget is `train.steps`: batches are
the same for all, so each has learned from the same tokens in the same order. The folder `out_dir` gets a folder for
each drafter, and `drafters.md`. The same command goes on where it was interrupted.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.app.cli import explain
from experiments.app.compose import build_config
from experiments.app.errors import UserError
from experiments.app.schema import CONFIG_FOLDER
from experiments.report.tables import Column, Result, at, console_table, figure, markdown
from experiments.training.export import SUMMARY_FILE
from experiments.training.objectives import SCHEMAS
from experiments.training.objectives.base import TrainingConfig
from experiments.training.objectives.drafter import DrafterTraining
from experiments.training.parallel import Replicas
from experiments.training.text.source import USED

SETTINGS, TABLE = "settings.yaml", "drafters.md"
LIST = re.compile(r"drafter=\[(.*)\]")
Run = Callable[[Any, DictConfig, Replicas], dict[str, Any]]


def is_asked(words: Sequence[str]) -> bool:
    """Whether `words` give a list of drafters."""
    return any(LIST.fullmatch(word) for word in words)


def compare(words: Sequence[str], run: Run) -> None:
    """Train the drafters that `words` list by `run`, which returns a summary, and print and write the table."""
    composed = settings_of(words)
    configs = {name: build_config(settings) for name, settings in composed.items()}
    replicas = Replicas.join(next(iter(configs.values())).train.device)
    summaries = {}
    for name, config in configs.items():
        own = replicas.renamed(name)
        share_text([Path(each.out_dir) for each in configs.values()], Path(config.out_dir), own)
        summaries[name] = _finished(config, composed[name])
        if not summaries[name]:
            print(f"drafter={name}", flush=True)
            summaries[name] = run(config, composed[name], own)
            if replicas.is_first:
                OmegaConf.save(composed[name], Path(config.out_dir) / SETTINGS)
    if replicas.is_first:
        _show(summaries, Path(config.out_dir).parent)


def settings_of(words: Sequence[str]) -> dict[str, DictConfig]:
    """Drafter to its composed settings. Raises UserError for words that do not fit."""
    listed = next(found for word in words if (found := LIST.fullmatch(word)))[1]
    names = [name.strip() for name in listed.split(",")]
    words = [word for word in words if not LIST.fullmatch(word)]
    learning = [name for name, schema in SCHEMAS.items() if issubclass(schema, DrafterTraining)]
    if len(set(names)) < len(names) or not set(names) <= set(learning):
        raise UserError(f"drafter=[{listed}]: expected names of {', '.join(learning)}, each once")
    if options := [word for word in words if word.startswith("-")]:
        raise UserError(f"a list of drafters takes settings alone, got the option {options[0]}")
    if not any(word.startswith("train.steps=") for word in words):
        raise UserError("a list of drafters is trained on the same tokens: give their number of steps as train.steps=…")
    if any(word.startswith("train.minutes=") for word in words):
        raise UserError("a list of drafters is trained on the same tokens: expected no train.minutes")
    with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
        return {name: _composed(name, names, words) for name in names}


def _composed(name: str, names: Sequence[str], words: Sequence[str]) -> DictConfig:
    """The settings of `name`, in a folder of its own; words of other `names` are left out."""
    others = tuple(f"{other}." for other in names if other != name)
    own = [word.removeprefix(f"{name}.") for word in words if not word.startswith(others)]
    try:
        settings = compose("train", [f"drafter={name}", "train.minutes=null", *own])
    except HydraException as error:
        hint = "a setting of one drafter has its name in front, as dflash.drafter.block_size=8"
        raise UserError(f"drafter={name}: {explain(error)}\n{hint}") from error
    is_given = any(word.startswith("out_dir=") for word in words)
    settings.out_dir = f"{settings.out_dir if is_given else TrainingConfig.out_dir}/{name}"
    return settings


def share_text(folders: Sequence[Path], own: Path, replicas: Replicas) -> None:
    """Give the folder `own` the list of text that another of the `folders` has: text that is written by the clock would
    differ."""
    lists = [folder / USED for folder in folders if (folder / USED).is_file()]
    if replicas.is_first and lists and not (own / USED).is_file():
        own.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(lists[0], own / USED)
    replicas.wait()


def _finished(config: TrainingConfig, composed: DictConfig) -> dict[str, Any]:
    """The summary of a run with these settings that has ended; empty where there is none."""
    settings, summary = (Path(config.out_dir) / name for name in (SETTINGS, SUMMARY_FILE))
    if not (config.resume and summary.is_file() and settings.is_file()) or OmegaConf.load(settings) != composed:
        return {}
    return json.loads(summary.read_text())


def _show(summaries: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Print the table of the `summaries` and write it to `folder`."""
    results = [line for name, summary in summaries.items() for line in _lines(name, summary)]
    columns = [
        Column("drafter", lambda line: line["drafter"], numeric=False),
        Column("parameters", lambda line: f"{line['parameters']:,}"),
        Column("training tokens", lambda line: f"{line['tokens']:,}"),
        Column("held-out loss", lambda line: figure(line["loss"], 3)),
        Column("drafts", lambda line: line["method"], numeric=False),
    ]
    for name in dict.fromkeys(name for line in results for name in line["tokens_per_step"]):
        columns.append(Column(f"tokens/step {name}", _tokens_per_step(name)))
    Console(soft_wrap=True).print(console_table("", columns, results), crop=False)
    (folder / TABLE).write_text(markdown(columns, results))
    print(folder / TABLE)


def _tokens_per_step(name: str) -> Callable[[Result], str]:
    return lambda line: figure(at(line, f"tokens_per_step/{name}"), 3)


def _lines(name: str, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One line for each way to draft with the drafter `name`, or one without."""
    losses = [value for key, value in summary.items() if key.startswith("heldout_")]
    measured: Mapping[str, Mapping[str, float]] = summary["tokens_per_step"]
    methods = dict.fromkeys(method for found in measured.values() for method in found)
    same = {
        "drafter": name,
        "parameters": summary["parameters"],
        "tokens": summary["tokens"],
        "loss": sum(losses) / len(losses) if losses else None,
    }
    return [
        {**same, "method": method, "tokens_per_step": {key: found[method] for key, found in measured.items()}}
        for method in methods
    ] or [{**same, "method": "", "tokens_per_step": {}}]
