"""The schema of a run: every key a user can type outside of the groups `task`, `algo`, `backend` and `data`.

Hydra composes YAML files over these dataclasses, so a misspelt key fails while composing. `__post_init__` checks the
values when `compose.build_config` turns the composed tree into objects. This module imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from algorithms.runtime.levels import GRAPH_LEVELS
from algorithms.runtime.sampling_params import SamplingParams
from specdec_kernels.checks import expect_at_least, expect_between, expect_choice

REPO_ROOT = Path(__file__).resolve().parents[2]
CONFIG_FOLDER = REPO_ROOT / "configs"
LARGEST_INT32 = 2**31 - 1
SEED_STRIDE = 1_000_003
"""Distance between the request seeds of two run seeds, so that no two requests of a small sweep share a stream."""
LARGEST_SEED = (2**63 - 1) // SEED_STRIDE - 1
"""Largest seed of a run: the seeds of its requests fit into 64 bits."""


@dataclass
class ModelConfig:
    """Folders in the Hugging Face layout, or hub names such as `org/model`.

    `drafts` names the drafter of each algorithm; `draft_path` replaces it for the algorithm of this run. `obtain` says
    how to get the target, and is shown where its folder is absent. `thinking` switches the reasoning of a model whose
    chat template knows `enable_thinking`; null leaves it to the template.
    """

    name: str = MISSING
    path: str = MISSING
    draft_path: str | None = None
    drafts: dict[str, str | None] = field(default_factory=dict)
    obtain: str | None = None
    thinking: bool | None = None

    def drafter_of(self, algo: str | None) -> str | None:
        """Folder or hub name of the drafter of `algo`; None where there is none, or none is needed."""
        return None if algo is None else self.draft_path or self.drafts.get(algo)

    @property
    def label(self) -> str:
        """What to call the target: its name, or its folder for `model=local`."""
        return self.name if self.name != "local" else Path(self.path).name


@dataclass
class RuntimeConfig:
    """Device, sizes and capture of a run.

    `impl` auto runs compiled kernels on a GPU, and the same kernels in Triton's interpreter without one. `forward` is
    how the models around attention are computed: by fused kernels, or by torch's operations one by one; auto is fused
    in half precision on a GPU. `graph` is how much of a step is captured in CUDA graphs; auto captures all of it on a
    GPU. `overlap` is how many steps the host reads behind the device at most. `tensor_parallel` is the number of
    processes that share the target. `prefill_chunk` bounds the prompt tokens that are prefilled between two steps. With
    `piggyback` they ride in captured steps where requests run; `prefill_ahead` is the number of requests whose prompts
    are then prefilled before a row is free, null a number that suits `max_batch`.
    `kv_dtype` is how keys and values are stored: as the weights are, or in float8 e4m3, divided by the factors that the
    file `kv_scales` has for each layer and head (`task=kv_scales` writes one), or by 1.
    With `deterministic` the target gives every token the same bits whatever is computed beside it, so that speculation
    changes no text in half precision either: it needs `backend=fa4` and the fused forward.
    With `adaptive` every step drafts and verifies as many nodes as pay, from none to the algorithm's own number. What
    steps cost is measured before the first request, or read from `adaptive_cost`, a file of step times or a run's
    folder.
    `num_pages` and `max_length` null take what `max_batch` requests of the longest prompt need.
    """

    device: str = "auto"
    dtype: str = "auto"
    impl: str = "auto"
    forward: str = "auto"
    page_size: int = 16
    max_batch: int = 8
    num_pages: int | None = None
    max_length: int | None = None
    graph: str = "auto"
    overlap: int | None = None
    tensor_parallel: int = 1
    prefill_chunk: int = 2048
    piggyback: bool = True
    prefill_ahead: int | None = None
    kv_dtype: str = "auto"
    kv_scales: str | None = None
    deterministic: bool = False
    adaptive: bool = False
    adaptive_cost: str | None = None

    def __post_init__(self) -> None:
        expect_choice("runtime.device", self.device, ("auto", "cpu", "cuda"))
        expect_choice("runtime.dtype", self.dtype, ("auto", "float32", "float16", "bfloat16"))
        expect_choice("runtime.impl", self.impl, ("auto", "triton", "reference"))
        expect_choice("runtime.forward", self.forward, ("auto", "fused", "torch"))
        expect_choice("runtime.graph", self.graph, ("auto", *GRAPH_LEVELS))
        expect_choice("runtime.kv_dtype", self.kv_dtype, ("auto", "fp8_e4m3"))
        if self.kv_scales is not None and self.kv_dtype == "auto":
            raise ValueError("runtime.kv_scales is for runtime.kv_dtype=fp8_e4m3, got runtime.kv_dtype=auto")
        for key, value in dict(forward=self.forward, impl=self.impl).items():
            if self.deterministic and value in ("torch", "reference"):
                raise ValueError(f"runtime.deterministic=true needs the fused kernels, got runtime.{key}={value}")
        if self.adaptive_cost is not None and not self.adaptive:
            raise ValueError("runtime.adaptive_cost is for runtime.adaptive=true, got runtime.adaptive=false")
        if self.adaptive and self.graph in ("draft", "verify"):
            raise ValueError(
                "runtime.adaptive=true: a step of each size is one CUDA graph: expected runtime.graph=auto, none or "
                f"step, got {self.graph}"
            )
        expect_at_least("runtime.tensor_parallel", self.tensor_parallel, 1)
        expect_at_least("runtime.page_size", self.page_size, 1)
        expect_at_least("runtime.prefill_chunk", self.prefill_chunk, 1)
        expect_at_least("runtime.prefill_ahead", self.prefill_ahead, 0, nullable=True)
        expect_at_least("runtime.max_batch", self.max_batch, 1)
        expect_between("runtime.num_pages", self.num_pages, 1, LARGEST_INT32, nullable=True)
        expect_at_least("runtime.max_length", self.max_length, 2, nullable=True)
        expect_at_least("runtime.overlap", self.overlap, 0, nullable=True)
        if self.graph not in ("auto", "none") and self.device == "cpu":
            raise ValueError(f"runtime.graph={self.graph} captures CUDA graphs: expected runtime.device=cuda, got cpu")
        if self.device == "cpu" and self.dtype == "bfloat16" and self.impl != "reference":
            raise ValueError(
                "runtime.dtype=bfloat16 on the CPU: Triton's interpreter computes bfloat16 wrongly; "
                "use runtime.dtype=float32, or runtime.impl=reference"
            )


@dataclass
class TrackerConfig:
    """Where the summary goes beside the run folder. `mode` offline keeps it inside that folder."""

    name: str = "none"
    mode: str = "disabled"
    project: str = "specdec-kernels"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        expect_choice("tracker.name", self.name, ("wandb", "none"))
        expect_choice("tracker.mode", self.mode, ("online", "offline", "disabled"))


@dataclass
class PathsConfig:
    """`assets`: shipped models. `outputs`: where run folders go, relative to the working directory."""

    assets: str = MISSING
    outputs: str = "outputs"


@dataclass
class SweepConfig:
    """A sweep that the run is a row of: `sweep=NAME` on the command line.

    `force` runs rows again that are done; `list` shows the rows and runs nothing. `lenient` applies keys that only
    some of the swept options have to these. `shard` i/n takes every n-th row from the i-th on. `share_target` keeps a
    process alive over the rows of one target. `share_baseline` decodes the target alone once for all rows that agree in
    target, prompts, sampling and runtime.
    """

    name: str | None = None
    force: bool = False
    list: bool = False
    lenient: bool = False
    shard: str | None = None
    share_target: bool = False
    share_baseline: bool = True

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
class RunConfig:
    """One run of a task.

    `baseline` asks for autoregressive decoding beside `algo`; `samples` completions are printed at the end. `resume` is
    the folder of an interrupted run to go on with, with `resume_force` also where configuration or revision changed.
    The keys of task, algo, backend and data depend on the option.
    """

    name: str = MISSING
    baseline: bool = True
    samples: int = 2
    resume: str | None = None
    resume_force: bool = False
    task: Any = MISSING
    algo: Any = MISSING
    backend: Any = MISSING
    model: ModelConfig = MISSING
    data: Any = MISSING
    sampling: SamplingParams = MISSING
    runtime: RuntimeConfig = MISSING
    tracker: TrackerConfig = MISSING
    paths: PathsConfig = MISSING
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        expect_at_least("samples", self.samples, 0)
        expect_between("sampling.seed", self.sampling.seed, 0, LARGEST_SEED)
        if self.resume is not None and self.runtime.tensor_parallel > 1:
            raise ValueError("resume: a run with runtime.tensor_parallel above 1 cannot be resumed: start it again")
        if self.resume is not None and self.task.NOT_RESUMED:
            raise ValueError(
                f"resume: task={self.task.name} cannot be resumed: {self.task.NOT_RESUMED}; start it again"
            )
        if not self.paths.outputs.strip():
            raise ValueError("paths.outputs: expected a folder, got none")
        if self.runtime.num_pages is not None and self.task.OWN_PAGES:
            raise ValueError(f"runtime.num_pages cannot be given to task={self.task.name}: {self.task.OWN_PAGES}")
        expect_plain_name("name", self.name, "outputs/")
