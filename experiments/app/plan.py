"""From a checked configuration to a plan: everything that can be settled or refused before weights load."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from algorithms.algorithm import AttentionCalls
from algorithms.attention.backends import backends
from algorithms.attention.cache import KVScales, load_kv_scales
from algorithms.engine.settings import graph_level
from algorithms.models.folder import is_absent, resolve_folder
from algorithms.models.loading import Target, TargetFolder, read_target
from algorithms.models.loading.stored import stored_tensors
from algorithms.models.loading.target import check_weight_dtype
from algorithms.models.tokenizer import Tokenizer
from algorithms.parallel.collectives import own_share
from algorithms.parallel.sharding import check_shareable
from algorithms.registry import available
from experiments.app.errors import UserError, unknown_option_message, user_errors
from experiments.app.hardware import Hardware, join, load_shared, resolve_hardware
from experiments.app.identity import SHARE_TARGET
from experiments.app.schema import DRAFT_PATH, ModelConfig, RunConfig, TrackerConfig
from experiments.app.task_schema import MethodsTask
from experiments.app.workload import Workload, make_workload
from experiments.data.prompts import load_prompts

Calls = AttentionCalls | None
_kept_targets: dict[tuple[str, str, str, str, int], Target] = {}


@dataclass(frozen=True)
class Plan:
    """The input of a task. Every part has been checked against the others."""

    config: RunConfig
    hardware: Hardware
    target: TargetFolder
    tokenizer: Tokenizer
    methods: Mapping[str, Any]  # label to algorithm configuration
    backends: tuple[Any, ...]  # configurations of the attention backends that the task uses
    workloads: tuple[Workload, ...]

    @property
    def model_label(self) -> str:
        """The name of the target, with the origin of its weights where its folder names one."""
        label = self.config.model.label
        return f"{label} ({self.target.origin})" if self.target.origin else label

    @property
    def graph(self) -> str:
        """How much of a step is captured."""
        return graph_level(self.config.runtime.graph, self.hardware.can_capture)

    def kv_scales(self) -> KVScales | None:
        """This process's share of the factors of stored keys and values, which were checked before."""
        path = self.config.runtime.kv_scales
        if kv_dtype_of(self.config) is None or path is None:
            return None
        return KVScales(*(own_share(scale, 1) for scale in load_kv_scales(path, self.target.config)))

    @property
    def exact(self) -> bool:
        """Whether outputs must be identical to autoregressive decoding, token for token."""
        return self.hardware.dtype == "float32" or self.config.runtime.deterministic

    def varied(self, backend: Any = None, **runtime: Any) -> Plan:
        """The same plan with another backend, or with other values of `runtime`."""
        changed = replace(self.config.runtime, **runtime)
        config = replace(self.config, backend=backend or self.config.backend, runtime=changed)
        return replace(self, config=config)

    def load_target(self) -> Target:
        """Read the target's weights. Raises UserError where they do not fit the model. A worker of a sweep keeps them
        for its next run."""
        processes = self.config.runtime.tensor_parallel
        weight_dtype = self.config.runtime.weight_dtype
        key = (str(self.target.path), self.hardware.device, self.hardware.dtype, weight_dtype, processes)
        if key in _kept_targets:
            return _kept_targets[key]
        with user_errors(ValueError, OSError):
            target = load_shared(self.target, self.hardware, processes, weight_dtype)
        if os.environ.get(SHARE_TARGET) == "1":
            _kept_targets.clear()
            _kept_targets[key] = target
        return target


def resolve(config: RunConfig) -> Plan:
    """Settle and check every setting of `config`; no weights are read.

    Raises UserError, in this order: a tracker without its key, a target that has to be fetched first, a drafter that is
    missing or ambiguous, the hardware, the target folder, settings and drafters of the algorithms, truncated weight
    files, the backends and what of them can be captured, prompts, processes, tokenizer.
    """
    task = config.task
    with user_errors(ValueError, OSError):
        methods, used, sets = task.methods_of(config), task.backends_of(config), task.data_of(config)
    _check_tracker(config.tracker)
    check_target_there(config.model)
    _check_drafters_named(config, methods)
    hardware = resolve_hardware(config.runtime)
    with user_errors(ValueError, OSError):
        target = read_target(config.model.path)
        check_weight_dtype(target, config.runtime.weight_dtype)
        check_shareable(target, config.runtime.tensor_parallel)
        own = AttentionCalls(target.config, {"prefill": "chain", "decode": "chain"})
        asked: list[tuple[str, Calls]] = [(f"model={config.model.name}", own)]
        folders = set[str]()
        for algo in methods.values():
            folder = config.model.drafter_of_method(algo)
            asked.append((f"algo={algo.name}", available()[algo.name].check(algo, target, folder)))
            if folder is not None and folder not in folders:
                stored_tensors(resolve_folder(folder, pickles=True), pickles=True)  # whole files, or an error
                folders.add(folder)
        stored_tensors(target.path)
        if kv_dtype_of(config) is not None and config.runtime.kv_scales is not None:
            load_kv_scales(config.runtime.kv_scales, target.config)
    _check_adaptive(config, methods)
    for backend in used:
        _check_backend(config, backend, hardware, asked)
    with user_errors(ValueError, OSError):
        prompts = [load_prompts(data) for data in sets]
    join(config.runtime.tensor_parallel, hardware.device)
    with user_errors(ValueError, OSError):
        tokenizer = Tokenizer.load(target.path, config.model.thinking)
        workloads = tuple(
            make_workload(config, data, chosen, tokenizer, target.config)
            for data, chosen in zip(sets, prompts, strict=True)
        )
    return Plan(config, hardware, target, tokenizer, methods, tuple(used), workloads)


def _check_tracker(tracker: TrackerConfig) -> None:
    """Refuse `tracker.mode=online` where no key of the server is stored or in the environment."""
    if tracker.name == "none" or tracker.mode != "online":
        return
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    stored = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    known = stored.is_file() and str(host) in stored.read_text(encoding="utf-8", errors="replace")
    settings = Path.home() / ".config/wandb/settings"
    if not (known or settings.is_file() or {"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"} & set(os.environ)):
        fix = "run wandb login, set WANDB_API_KEY, or use tracker.mode=offline and wandb sync later"
        raise UserError(f"tracker.mode=online: there is no key of {host}\n{fix}")


def check_target_there(model: ModelConfig) -> None:
    """Say how to get a target that is not there, where its option knows."""
    if model.obtain is not None and is_absent(model.path):
        raise UserError(f"model={model.name}: there is no folder {model.path}\n{model.obtain}")


def _check_drafters_named(config: RunConfig, methods: Mapping[str, Any]) -> None:
    """Refuse a drafter that is not named or not there, that no algorithm takes, or that several would take."""
    model = config.model
    for name in model.drafts:
        if name not in available():
            said = unknown_option_message("algo", name, sorted(available()))
            raise UserError(f"model.drafts.{name} names the drafter of no algorithm: {said}")
    with user_errors(ValueError):
        named = {label: getattr(algo, DRAFT_PATH, None) for label, algo in methods.items()}
        names = {
            label: None if named[label] else available()[algo.name].drafter_for(algo) for label, algo in methods.items()
        }
    drafting = [name for name in dict.fromkeys(names.values()) if name is not None]
    if model.draft_path is not None and len(drafting) > 1:
        raise UserError(
            f"model.draft_path is the drafter of one algorithm, and this task runs {', '.join(drafting)}\n"
            f"give model.drafts.{drafting[0]} and so on instead, or one of them as task.only"
        )
    for name in drafting:
        if model.drafter_of(name) is None and available()[name].finds_draft_model:
            continue
        if model.drafter_of(name) is None:
            served = [label for label, own in names.items() if own is None or model.drafter_of(own) is not None]
            fewer = f"\nor run the methods that have one: task.only=[{','.join(served)}]"
            raise UserError(
                f"algo={name} needs a drafter, and model={model.name} names none for it\n"
                f"give its folder or hub name as {'' if drafting[1:] else 'model.draft_path or '}model.drafts.{name}"
                + (fewer if served and isinstance(config.task, MethodsTask) else "")
            )
        if model.draft_path is None and is_absent(str(model.drafts[name])):
            raise UserError(
                f"algo={name}: the drafter of model={model.name} is not there: {model.drafts[name]}\n"
                f"train one with python -m experiments.train, or give another as model.drafts.{name}"
            )


def _check_backend(config: RunConfig, chosen: Any, hardware: Hardware, asked: Sequence[tuple[str, Calls]]) -> None:
    """Refuse graphs that the device cannot capture, and a backend that cannot run here or serve the calls that are
    `asked`, each with the setting that asks for it."""
    with user_errors(ValueError):
        backend = backends()[chosen.name](chosen, hardware.impl, config.runtime.deterministic)
        for level in config.task.graphs_of(config, hardware.can_capture):
            check_capture(graph_level(level, hardware.can_capture), hardware)
        dtype, device = getattr(torch, hardware.dtype), torch.device(hardware.device)
        page_size, kv_dtype = config.runtime.page_size, kv_dtype_of(config)
        for asker, calls in asked:
            if calls is not None:
                backend.check(calls.config, calls.modes, page_size, dtype, device, asker, kv_dtype)


def kv_dtype_of(config: RunConfig) -> torch.dtype | None:
    """The dtype of stored keys and values in `config`; None is the dtype of the weights."""
    unused = "runtime.kv_dtype" in config.task.IGNORED
    return None if unused or config.runtime.kv_dtype == "auto" else torch.float8_e4m3fn


def _check_adaptive(config: RunConfig, methods: Mapping[str, Any]) -> None:
    """Refuse `runtime.adaptive` where there is nothing to choose."""
    runtime = config.runtime
    if not runtime.adaptive or "runtime.adaptive" in config.task.IGNORED:
        return
    if all(algo.name == "autoregressive" for algo in methods.values()):
        raise UserError("runtime.adaptive=true: algo=autoregressive drafts none, there is no length\ngive another algo")
    for label, algo in methods.items():
        drawn = {"draft_sampling": getattr(algo, "draft_sampling", None), "rule": getattr(algo, "rule", None)}
        told = [f"{key} {value}" for key, value in drawn.items() if value not in (None, "topk", "target_only")]
        if told:
            why = "a number of nodes that depends on them would change the distribution"
            raise UserError(f"runtime.adaptive=true: {label} samples its drafts ({', '.join(told)}), and {why}")


def check_capture(level: str, hardware: Hardware) -> None:
    """Refuse a level of capture that the device cannot have. Raises UserError."""
    if level != "none" and not hardware.can_capture:
        raise UserError(f"runtime.graph={level}: there are no CUDA graphs on the CPU\nuse runtime.graph=none")
