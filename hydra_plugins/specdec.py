"""The launcher behind `hydra/launcher=basic` and `hydra/launcher=gpus`. Hydra looks for plugins in hydra_plugins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict


class Processes(Launcher):
    """Runs each row in a process of its own: one at a time, or one on each of `gpus_per_row` visible GPUs.

    Raises UserError where there are fewer GPUs than a row needs.
    """

    def __init__(self, gpus_per_row: int = 0) -> None:
        self._gpus_per_row = gpus_per_row

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from experiments.sweep.processes import Queue, Task, slots
        from experiments.sweep.row import located

        before, tasks = HydraConfig.instance().cfg, []
        share = False
        for overrides in job_overrides:
            cfg = self._context.config_loader.load_sweep_config(self._config, list(overrides))
            HydraConfig.instance().set_config(cfg)
            with open_dict(cfg):
                job: Any = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
            tasks.append(Task(*located(job)))
            share = share or bool(cfg.get("share_target"))
        HydraConfig.instance().cfg = before
        results = Queue(slots(self._gpus_per_row), share).run(tasks)
        return [_returned(overrides, results[task.row]) for overrides, task in zip(job_overrides, tasks, strict=True)]


def _returned(overrides: Sequence[str], result: Any) -> JobReturn:
    """What Hydra's sweepers read of a job: the figure to maximise."""
    from experiments.sweep.row import objective

    if isinstance(result, BaseException):
        raise result
    value = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
    value.return_value = objective(result)
    return value


def _store(name: str, gpus_per_row: int) -> None:
    """Make `hydra/launcher=NAME` known. Plugins are read after Hydra's own `basic`, so this one replaces it."""
    node = {"_target_": "hydra_plugins.specdec.Processes", "gpus_per_row": gpus_per_row}
    ConfigStore.instance().store(group="hydra/launcher", name=name, node=node, provider="specdec")


_store("basic", 0)
_store("gpus", 1)
