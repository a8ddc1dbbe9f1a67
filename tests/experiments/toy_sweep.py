"""A program that sweeps in milliseconds: its runs write folders like real ones, and their settings decide the figures.

`TOY_ENDING` has an ending for some seeds, such as `1:failed 2:refused`.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

from experiments.app.errors import NotLossless, UserError
from experiments.app.schema import SweepConfig
from experiments.report.run_folder import open_run_folder
from experiments.sweep.main import main

WAIT, ENDING, NAME = "TOY_WAIT_S", "TOY_ENDING", "toy_sweep"
LOGS = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
HYDRA = {
    "output_subdir": None,
    "run": {"dir": "${run_folder:outputs/toy/now,outputs}"},
    "sweep": {"dir": "outputs/sweeps/${sweep.name}", "subdir": "${job_id:}"},
}


@dataclass
class ToyConfig:
    """What the figures depend on, and a value that is checked."""

    defaults: list[Any] = field(default_factory=lambda: ["_self_", *LOGS])
    hydra: Any = field(default_factory=lambda: HYDRA)
    name: str = "toy"
    algo: str = "dflash"
    limit: int = 1
    seed: int = 0
    heat: float = 0.0
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        if self.heat < 0:
            raise ValueError(f"heat: expected at least 0, got {self.heat}")


ConfigStore.instance().store(name=NAME, node=ToyConfig)


def run(config: Any, composed: Any) -> float:
    """A run whose figures are functions of `limit` and `seed`."""
    endings = dict(pair.split(":") for pair in os.environ.get(ENDING, "").split())
    ending = endings.get(str(config.seed))
    with open_run_folder(Path(HydraConfig.get().runtime.output_dir)) as folder:
        if ending == "refused":
            raise UserError(f"seed {config.seed} is not served")
        time.sleep(float(os.environ.get(WAIT, "0")))
        folder.record({"id": 0, "pid": os.getpid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")})
        if ending == "killed":
            os.kill(os.getpid(), 9)
        if ending == "failed":
            raise ZeroDivisionError(f"seed {config.seed} is a bug")
        folder.write_results({}, summary(config.algo, config.limit, config.seed))
    if ending == "lossy":
        raise NotLossless(f"not lossless\nseed {config.seed} differs")
    return float(config.limit)


def summary(algo: str, limit: int, seed: int) -> dict[str, Any]:
    """What summary.json holds: the conditions, and a row of each method."""
    conditions = {"machine": "toy", "revision": "abc", "device": "cpu", "impl": "reference", "dtype": "float32"}
    rows = [
        {"data": "arithmetic", "method": method, "algo": method, "num_requests": limit}
        | {"wall_tokens_per_s": rate, "tokens_per_step": rate / 10, "speedup_decode": rate / 10.0}
        for method, rate in (("autoregressive", 10.0), (algo, 10.0 * limit + seed))
    ]
    return {"name": "toy", "task": "generate", **conditions, "failures": [], "rows": rows}


if __name__ == "__main__":
    main(run, [os.path.abspath(__file__)], NAME)
