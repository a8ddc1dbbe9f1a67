"""The schema of a run: every key a user can type outside of the groups `task`, `algo`, `backend` and `data`.

Hydra composes YAML files over these dataclasses, so a misspelt key fails while composing. `__post_init__` checks the
values when `compose.build_config` turns the composed tree into objects. This module imports no torch.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from omegaconf import MISSING

from algorithms.checked import Between, Checked
from algorithms.engine.settings import RuntimeSettings
from algorithms.frontend import SEED_STRIDE
from algorithms.registry import available
from algorithms.step.sampling_params import SamplingParams
from specdec_kernels.checks import expect_between

REPO_ROOT = Path(__file__).resolve().parents[2]
CONFIG_FOLDER = REPO_ROOT / "configs"
DRAFT_PATH = "draft_path"  # key of a method's own drafter
LARGEST_SEED = (2**63 - 1) // SEED_STRIDE - 1  # largest seed of a run: the seeds of its requests fit into 64 bits


@dataclass
class ModelConfig:
    """The target and its drafters: folders in the Hugging Face layout, or hub names such as `org/model`."""

    name: str = MISSING
    path: str = MISSING
    """Folder or hub name of the target."""
    draft_path: str | None = None
    """Drafter of this run's algorithm, in place of the one in `drafts`."""
    drafts: dict[str, str | None] = field(default_factory=dict)
    """Algorithm to its drafter."""
    obtain: str | None = None
    """How to get the target; shown where its folder is absent."""
    thinking: bool | None = None
    """Reasoning of a model whose chat template knows `enable_thinking`; null leaves it to the template."""

    def drafter_of(self, algo: str | None) -> str | None:
        """Folder or hub name of the drafter of `algo`; None where there is none, or none is needed."""
        return None if algo is None else self.draft_path or self.drafts.get(algo)

    def drafter_of_method(self, algo: Any) -> str | None:
        """As `drafter_of`, of the configuration of a method, which may name a drafter of its own."""
        own = getattr(algo, DRAFT_PATH, None)
        return own or self.drafter_of(available()[algo.name].drafter_for(algo))

    @property
    def label(self) -> str:
        """The name of the target, or of its folder for `model=local`."""
        return self.name if self.name != "local" else Path(self.path).name


@dataclass
class TrackerConfig(Checked):
    """A tracker that receives the summary too."""

    GROUP = "tracker."
    name: Annotated[str, ("wandb", "none")] = "none"
    """wandb, or none."""
    mode: Annotated[str, ("online", "offline", "disabled")] = "offline"
    """offline keeps the run of wandb inside the run folder; online; or disabled."""
    project: str = "specdec-kernels"
    entity: str | None = None
    """Account or team of wandb."""
    group: str | None = None
    """Group of the run in wandb; null is the name of the sweep."""
    tags: list[str] = field(default_factory=list)


@dataclass
class PathsConfig:
    assets: str = str(REPO_ROOT / "assets")
    """Shipped models."""
    outputs: str = "outputs"
    """The folder of run folders, relative to the working directory."""


@dataclass
class SweepConfig:
    """A sweep that the run is a job of. `sweep=NAME` is short for sweep.name, and `shard=i/n` for sweep.shard."""

    name: str | None = None
    """Name of the sweep and of its folder; null is the time of the start."""
    force: bool = False
    """Run jobs again that are done."""
    list: bool = False
    """Show the jobs and their states; run nothing."""
    shard: str | None = None
    """i/n takes every n-th job from the i-th on, for several machines."""
    share_target: bool = False
    """Run the jobs of one target in one process, which loads it once."""
    share_baseline: bool = True
    """Decode the target alone once for all jobs that agree in target, prompts, sampling and runtime."""

    def __post_init__(self) -> None:
        if self.name is not None:
            expect_plain_name("sweep", self.name, "outputs/sweeps/")
        found = re.fullmatch(r"(\d+)/(\d+)", self.shard or "1/1")
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"shard: expected i/n with i from 1 to n, such as 1/4, got {self.shard!r}")


def expect_plain_name(key: str, name: str, place: str) -> None:
    """Raise ValueError unless `name` can be a folder under `place`."""
    if not name or any(c in name for c in "/\\\0") or name.startswith("."):
        raise ValueError(f"{key} becomes a folder under {place}: expected a plain name, got {name!r}")


@dataclass
class RunConfig(Checked):
    """One run of a task. The keys of task, algo, backend and data depend on the option."""

    name: str = MISSING
    """Name of the run and of its folder; by default what it measures."""
    baseline: bool = True
    """Measure autoregressive decoding too."""
    samples: Annotated[int, Between(0)] = 2
    """Completions that are printed at the end."""
    resume: str | None = None
    """Folder of an interrupted run to go on with."""
    resume_force: bool = False
    """Go on with a run though its configuration or revision changed."""
    task: Any = MISSING
    algo: Any = MISSING
    backend: Any = MISSING
    model: ModelConfig = MISSING
    data: Any = MISSING
    sampling: SamplingParams = MISSING
    runtime: RuntimeSettings = MISSING
    tracker: TrackerConfig = MISSING
    paths: PathsConfig = field(default_factory=PathsConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_between("sampling.seed", self.sampling.seed, 0, LARGEST_SEED)
        if self.resume is not None and self.runtime.tensor_parallel > 1:
            raise ValueError("resume: a run with runtime.tensor_parallel above 1 cannot be resumed: start it again")
        if self.resume is not None and self.task.NOT_RESUMED:
            raise ValueError(f"resume: task={self.task.name} cannot be resumed: {self.task.NOT_RESUMED}")
        if not self.paths.outputs.strip():
            raise ValueError("paths.outputs: expected a folder, got none")
        if self.runtime.num_pages is not None and self.task.OWN_PAGES:
            raise ValueError(f"runtime.num_pages cannot be given to task={self.task.name}: {self.task.OWN_PAGES}")
        expect_plain_name("name", self.name, "outputs/")
