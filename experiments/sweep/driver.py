"""One start of a sweep: which rows it has, which of them are done, and a launcher for the rest.

The rows are found first, by composing every combination of the command line. A launcher of Hydra then gets the names of
the rows that are to run (`configs/sweep_rows.yaml`), in this process or on another machine.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments.app.compose import build_config, option_schemas
from experiments.app.errors import UserError, user_errors
from experiments.app.explain import MAIN_CONFIG
from experiments.app.identity import digest
from experiments.app.schema import CONFIG_FOLDER, SweepConfig
from experiments.sweep.folder import DONE, REFUSED, RUNNING, RowRecord, SweepFolder
from experiments.sweep.grid import Grid, parse, shard_of, without_foreign_keys
from experiments.sweep.row import environment, new_record, quoted, run_one

EXTRAS = {
    "joblib": ("hydra_joblib_launcher", "joblib"),
    "submitit_local": ("hydra_submitit_launcher", "slurm"),
    "slurm": ("hydra_submitit_launcher", "slurm"),
    "ray": ("hydra_ray_launcher", "ray"),
    "ray_cluster": ("hydra_ray_launcher", "ray"),
    "optuna": ("hydra_optuna_sweeper", "optuna"),
}
"""Option of hydra/launcher or hydra/sweeper to the plugin that it needs, and the extra that installs it."""
SHARING = ("basic", "gpus")
"""Launchers that can keep a worker alive."""
ROWS_CONFIG = "sweep_rows"


@dataclass(frozen=True)
class Sweep:
    """A start of a sweep, resolved: its folder, its rows, and the launcher for them."""

    folder: SweepFolder
    settings: SweepConfig
    rows: tuple[RowRecord, ...]
    keys: tuple[str, ...]
    launcher: str
    launcher_settings: tuple[str, ...]

    def states(self) -> dict[str, str]:
        """Row to its state now."""
        return {record.id: self.folder.state(record.id) for record in self.rows}


def expect_plugin(group: str, option: str) -> None:
    """Raise UserError naming what a launcher or a sweeper needs and this machine lacks."""
    package, extra = EXTRAS.get(option, (None, None))
    if package is not None and find_spec(f"hydra_plugins.{package}") is None:
        raise UserError(f"{group}={option} needs a package that is not installed\npip install -e '.[{extra}]'")
    if option == "slurm" and shutil.which("sbatch") is None:
        raise UserError("hydra/launcher=slurm submits jobs with sbatch, which this machine does not have")


def resolve(arguments: Sequence[str], config_name: str, program: Sequence[str]) -> Sweep:
    """What the command line asks for. Every combination is composed and checked, and nothing is run.

    Raises UserError or Hydra's errors for a key that no option has; a value that a check refuses makes a refused row.
    """
    with hydra.initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
        typed = parse(arguments)
        for text in typed.own:
            group, _, option = text.partition("=")
            if group == "hydra/launcher":
                expect_plugin(group, option)
        base = _base(typed, config_name)
        settings = _settings(base)
        choices = dict(base.hydra.runtime.choices)
        launcher = choices["hydra/launcher"]
        if settings.share_target and launcher not in SHARING:
            raise UserError(f"sweep.share_target works with hydra/launcher={' or '.join(SHARING)}, got {launcher}")
        grid = parse(arguments, base.hydra.sweeper.get("params"))
        schemas = option_schemas() if config_name == MAIN_CONFIG else {}
        jobs = without_foreign_keys(grid.jobs, choices, schemas, settings.lenient)
        composer = _Composer(config_name)
        records = [_row(job, composer, program) for job in jobs]
    rows = list({record.id: record for record in reversed(records)}.values())[::-1]
    own = tuple(text for text in typed.own if text.startswith("hydra.launcher."))
    folder = SweepFolder(Path(base.hydra.sweep.dir))
    return Sweep(folder, settings, tuple(shard_of(rows, settings.shard)), grid.keys, launcher, own)


def _settings(base: DictConfig) -> SweepConfig:
    """The checked settings of the sweep."""
    with user_errors(ValueError):
        return cast(SweepConfig, OmegaConf.to_object(base.sweep))


def _base(typed: Grid, config_name: str) -> DictConfig:
    """The configuration without the jobs' own values: options of groups, folders, the settings of sweep and Hydra."""
    common = [text for text in typed.common if "." not in text.partition("=")[0] or text.startswith("paths.")]
    base = hydra.compose(config_name, [*common, *typed.own], return_hydra_config=True)
    HydraConfig.instance().set_config(base)
    with open_dict(base):
        base.sweep.name = base.sweep.name or f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    return base


@dataclass
class _Composer:
    """Composes many jobs: those with the same options of groups differ in values alone, which are put into a copy."""

    config_name: str
    _found: dict[tuple[str, ...], DictConfig] = field(default_factory=dict)

    def compose(self, job: Sequence[str]) -> DictConfig:
        """The configuration of a job. Raises Hydra's errors for a key that does not exist."""
        values = [text for text in job if re.match(r"[\w.]+\.\w+=", text)]
        options = tuple(text for text in job if text not in values)
        if options not in self._found:
            self._found[options] = hydra.compose(self.config_name, list(options))
        found = copy.deepcopy(self._found[options])
        try:
            for override in OverridesParser.create().parse_overrides(values):
                OmegaConf.update(found, override.get_key_element(), override.value(), merge=True)
        except OmegaConfBaseException:
            return hydra.compose(self.config_name, list(job))  # whose errors the command line explains
        return found


def _row(job: Sequence[str], composer: _Composer, program: Sequence[str]) -> RowRecord:
    """The row that a job is; one that a check refuses has the reason."""
    composed = composer.compose(job)
    try:
        build_config(composed)
    except UserError as error:
        refused = RowRecord(digest(sorted(job)), list(job), list(program))
        return replace(refused, ended=REFUSED, reason=str(error), exit_code=error.exit_code)
    return new_record(composed, list(job), program)


def folder_of(arguments: Sequence[str], config_name: str) -> Path:
    """The folder of the sweep that `arguments` name."""
    own = [text for text in arguments if text.startswith(("sweep.", "paths."))]
    with hydra.initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
        return Path(_base(parse(own), config_name).hydra.sweep.dir)


def begin(sweep: Sweep, command: Sequence[str]) -> list[RowRecord]:
    """Enter the rows into the folder of the sweep, and return those that are to run."""
    sweep.folder.begin(sweep.keys, [record.id for record in sweep.rows], command)
    todo = []
    for record in sweep.rows:
        if record.ended == REFUSED or sweep.folder.record(record.id) is None:
            sweep.folder.write(record)
        state = sweep.folder.state(record.id)
        if record.ended != REFUSED and state != RUNNING and (state != DONE or sweep.settings.force):
            todo.append(record)
    return todo


def launch(sweep: Sweep, todo: Sequence[RowRecord]) -> None:
    """Run `todo` with the launcher that the command line chose."""
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]  # so that workers of any launcher find this repository
    own: dict[str, Any] = {
        "folder": quoted(str(sweep.folder.path)),
        "force": str(sweep.settings.force).lower(),
        "share_target": str(sweep.settings.share_target).lower(),
        "row": ",".join(quoted(record.id) for record in todo),
    }
    chosen = [f"hydra/launcher={sweep.launcher}", *sweep.launcher_settings]
    run_hydra(["-m", *chosen, *(f"{key}={value}" for key, value in own.items())], ROWS_CONFIG)


def run_hydra(arguments: Sequence[str], config_name: str) -> None:
    """Let Hydra's own sweeper and launcher call `run_one` for every job of `arguments`."""
    before, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name=config_name)(run_one)()
    finally:
        sys.argv = before
