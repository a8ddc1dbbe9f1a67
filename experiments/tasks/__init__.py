"""The questions a run can ask: one module a task, each with `run(config, composed) -> float`.

This file is read with the command line, so it and the schemas in it stay free of torch.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.tasks.schemas import (
    CompareTask,
    GenerateTask,
    GraphAblationTask,
    LosslessnessTask,
    ThroughputTask,
    ignored_overrides,
)

TASKS: dict[str, type] = {
    task.NAME: task for task in (GenerateTask, CompareTask, ThroughputTask, LosslessnessTask, GraphAblationTask)
}


def run_task(config: Any, composed: DictConfig) -> float:
    """Run the configured task, having said what it was given in vain; torch is imported only now."""
    from experiments.report.console import plain_console

    if vain := ignored_overrides(config.task, HydraConfig.get().overrides.task):
        told = f"warning: task={config.task.name} does not use {', '.join(vain)}"
        plain_console().print(told, style="yellow", markup=False, highlight=False, soft_wrap=True)
    module = importlib.import_module(f"{__name__}.{config.task.name}")
    return cast(float, module.run(config, composed))
