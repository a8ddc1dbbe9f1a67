"""One start of a sweep: which jobs it has, which of them are done, and a launcher for the rest.

Every combination is composed and checked before any job runs. A launcher of Hydra then gets the ids of the jobs that
are to run (`configs/sweep_jobs.yaml`), in this process or on another machine.
"""

import copy
import itertools
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments.app.compose import build_config
from experiments.app.errors import UserError, user_errors
from experiments.app.identity import digest
from experiments.app.schema import CONFIG_FOLDER, SweepConfig
from experiments.sweep.folder import DONE, REFUSED, RUNNING, JobRecord, SweepFolder
from experiments.sweep.job import JOB_KEYS, new_record
from experiments.sweep.processes import python_path, quoted, run_one

EXTRAS = {
    "joblib": ("hydra_joblib_launcher", "joblib"),
    "submitit_local": ("hydra_submitit_launcher", "slurm"),
    "slurm": ("hydra_submitit_launcher", "slurm"),
    "ray": ("hydra_ray_launcher", "ray"),
    "ray_cluster": ("hydra_ray_launcher", "ray"),
}
"""Launcher to the plugin that it needs, and the extra that installs it."""
SHARING = ("basic", "gpus")  # launchers that can keep a process for several jobs
JOBS_CONFIG = "sweep_jobs"


@dataclass(frozen=True)
class Sweep:
    """A start of a sweep, resolved: its folder, its jobs, and the launcher for them."""

    folder: SweepFolder
    settings: SweepConfig
    jobs: tuple[JobRecord, ...]
    keys: tuple[str, ...]
    launcher: str
    launcher_settings: tuple[str, ...]

    def states(self) -> dict[str, str]:
        """Job to its state now."""
        return {record.id: self.folder.state(record.id) for record in self.jobs}


@dataclass(frozen=True)
class Grid:
    """`jobs`: the overrides of each job, the last key changing fastest. `keys`: those with several values. `common`:
    overrides of keys with one value. `own`: those of the sweep and of Hydra."""

    jobs: list[list[str]]
    keys: tuple[str, ...]
    common: tuple[str, ...]
    own: tuple[str, ...]


def parse(arguments: Sequence[str], params: Mapping[str, Any] | None = None) -> Grid:
    """The grid of `arguments`; `params` are the axes of a recipe, which arguments replace. Raises UserError for a key
    of the sweep itself with several values, and for a value that is no list of choices."""
    axes = [f"{k}={v if isinstance(v, str) else ','.join(map(str, v))}" for k, v in (params or {}).items()]
    loader = GlobalHydra.instance().config_loader() if GlobalHydra.instance().is_initialized() else None
    own, values = [], dict[str, list[str]]()
    for override in OverridesParser.create(config_loader=loader).parse_overrides([*axes, *arguments]):
        key, text = override.get_key_element(), str(override.input_line)
        is_own = key.lstrip("+~").startswith(("sweep.", "hydra.", "hydra/")) and not text.startswith(JOB_KEYS)
        if is_own and override.is_sweep_override():
            raise UserError(f"{key} is a setting of the sweep: expected one value, got {text}")
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise UserError(f"{text}: expected a list of values")
        if is_own:
            own.append(text)
        elif override.is_sweep_override():
            values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            values[key] = [text]
    keys = tuple(key.lstrip("+~") for key, several in values.items() if len(several) > 1)
    common = tuple(several[0] for several in values.values() if len(several) == 1)
    return Grid([list(job) for job in itertools.product(*values.values())], keys, common, tuple(own))


def expect_plugin(launcher: str) -> None:
    """Raise UserError naming what a launcher needs and this machine lacks."""
    package, extra = EXTRAS.get(launcher, (None, None))
    if package is not None and find_spec(f"hydra_plugins.{package}") is None:
        raise UserError(f"hydra/launcher={launcher} needs a package that is not installed\npip install -e '.[{extra}]'")
    if launcher == "slurm" and shutil.which("sbatch") is None:
        raise UserError("hydra/launcher=slurm submits jobs with sbatch, which this machine does not have")


def resolve(arguments: Sequence[str], config_name: str, program: Sequence[str]) -> Sweep:
    """The sweep of a command line; nothing is run. A job that a check refuses is a refused job. Raises UserError or
    Hydra's errors for a key that an option of a job does not have."""
    with hydra.initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
        typed = parse(arguments)
        for group, _, option in (text.partition("=") for text in typed.own):
            if group == "hydra/launcher":
                expect_plugin(option)
        base = _base(typed, config_name)
        with user_errors(ValueError):
            settings = cast(SweepConfig, OmegaConf.to_object(base.sweep))
        launcher = base.hydra.runtime.choices["hydra/launcher"]
        if settings.share_target and launcher not in SHARING:
            raise UserError(f"sweep.share_target works with hydra/launcher={' or '.join(SHARING)}, got {launcher}")
        grid = parse(arguments, base.hydra.sweeper.get("params"))
        known: dict[tuple[str, ...], DictConfig] = {}
        found = [_record(_composed(job, config_name, known), job, program) for job in grid.jobs]
        records = {record.id: record for record in found}
    own = tuple(text for text in typed.own if text.startswith("hydra.launcher."))
    index, count = map(int, (settings.shard or "1/1").split("/"))
    shard = tuple(records.values())[index - 1 :: count]
    return Sweep(SweepFolder(Path(base.hydra.sweep.dir)), settings, shard, grid.keys, launcher, own)


def _base(typed: Grid, config_name: str) -> DictConfig:
    """The configuration without the jobs' own values: options of groups, folders, the settings of sweep and Hydra. A
    group may need a choice, so it has that of the first job; of several recipes none has axes for all jobs."""
    shared = [text for text in typed.jobs[0] if text in typed.common or not text.startswith("experiment=")]
    chosen = [text for text in shared if "." not in text.partition("=")[0] or text.startswith("paths.")]
    base = hydra.compose(config_name, [*chosen, *typed.own], return_hydra_config=True)
    HydraConfig.instance().set_config(base)
    with open_dict(base):
        base.sweep.name = base.sweep.name or f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    return base


def _composed(job: Sequence[str], config_name: str, known: dict[tuple[str, ...], DictConfig]) -> DictConfig:
    """The configuration of a job. Raises Hydra's errors for a key that does not exist. Composing takes long: jobs with
    the same options of groups, in `known`, differ in values that are put into a copy."""
    values = [text for text in job if re.match(r"[\w.]+\.\w+=", text)]
    options = tuple(text for text in job if text not in values)
    if options not in known:
        known[options] = hydra.compose(config_name, list(options))
    found = copy.deepcopy(known[options])
    try:
        for override in OverridesParser.create().parse_overrides(values):
            OmegaConf.update(found, override.get_key_element(), override.value(), merge=True)
    except OmegaConfBaseException:
        return hydra.compose(config_name, list(job))  # whose errors the command line explains
    return found


def _record(composed: DictConfig, job: list[str], program: Sequence[str]) -> JobRecord:
    """The record of a job; one that a check refuses has the reason."""
    try:
        build_config(composed)
    except UserError as error:
        name = digest(sorted(job))
        return JobRecord(name, job, list(program), ended=REFUSED, reason=str(error), exit_code=error.exit_code)
    return new_record(composed, job, program)


def begin(sweep: Sweep, command: Sequence[str]) -> list[JobRecord]:
    """Enter the jobs into the folder of the sweep, and return those that are to run."""
    sweep.folder.begin(sweep.keys, [record.id for record in sweep.jobs], command)
    todo = []
    for record in sweep.jobs:
        if record.ended == REFUSED or sweep.folder.record(record.id) is None:
            sweep.folder.write(record)
        state = sweep.folder.state(record.id)
        if record.ended != REFUSED and state != RUNNING and (state != DONE or sweep.settings.force):
            todo.append(record)
    return todo


def launch(sweep: Sweep, todo: Sequence[JobRecord]) -> None:
    """Run `todo` with the launcher that the command line chose."""
    os.environ["PYTHONPATH"] = python_path()  # of the processes of any launcher
    own: dict[str, Any] = {
        "folder": quoted(str(sweep.folder.path)),
        "force": str(sweep.settings.force).lower(),
        "share_target": str(sweep.settings.share_target).lower(),
        "job": ",".join(quoted(record.id) for record in todo),
    }
    chosen = [f"hydra/launcher={sweep.launcher}", *sweep.launcher_settings]
    run_hydra(["-m", *chosen, *(f"{key}={value}" for key, value in own.items())])


def run_hydra(arguments: Sequence[str]) -> None:
    """Let Hydra's own launcher call `run_one` for every job of `arguments`."""
    before, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name=JOBS_CONFIG)(run_one)()
    finally:
        sys.argv = before
