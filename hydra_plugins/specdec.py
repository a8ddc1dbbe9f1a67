"""The launcher of `hydra/launcher=basic` and `hydra/launcher=gpus`. Hydra looks for plugins in hydra_plugins."""

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class Processes(Launcher):
    """Runs each job in a process of its own: one at a time, or one on each of `gpus_per_job` visible GPUs."""

    def __init__(self, gpus_per_job: int = 0) -> None:
        self._gpus_per_job = gpus_per_job

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Raises UserError where there are fewer GPUs than a job needs."""
        from experiments.sweep.job import located
        from experiments.sweep.processes import run_jobs, slots

        load = self._context.config_loader.load_sweep_config
        composed = [load(self._config, list(overrides)) for overrides in job_overrides]
        share = any(cfg.get("share_target") for cfg in composed)
        run_jobs([located(cfg) for cfg in composed], slots(self._gpus_per_job), share)
        return [JobReturn(status=JobStatus.COMPLETED) for _ in composed]


# Plugins are read after Hydra's own `basic`, so this one replaces it.
for _name, _gpus_per_job in (("basic", 0), ("gpus", 1)):
    _node = {"_target_": "hydra_plugins.specdec.Processes", "gpus_per_job": _gpus_per_job}
    ConfigStore.instance().store(group="hydra/launcher", name=_name, node=_node, provider="specdec")
