"""Sizes and switches of an engine, and the refusal of those that target, algorithm and backend cannot serve."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from algorithms.runtime.adaptive import StepCosts
from algorithms.runtime.algorithm import Algorithm
from algorithms.runtime.backends.protocol import Backend
from algorithms.runtime.backends.registry import check_calls
from algorithms.runtime.cache import KVScales
from algorithms.runtime.models.loading import Target
from algorithms.runtime.request import EngineError
from specdec_kernels.checks import expect_at_least


@dataclass(frozen=True)
class EngineSettings:
    """Sizes of a run. `max_length` bounds prompt and new tokens of a request together; None takes the target's context.

    `num_pages` None reserves enough for `max_batch` requests of that length. `graph` says how much of a step is
    captured, see `cuda_graph`. `overlap` is how many steps the host reads behind the device: None takes 1 on a GPU and
    0 elsewhere. `fused` runs the models by fused kernels, see `models.fusion`. Before a step at most `prefill_chunk`
    tokens are prefilled, in tiles of `prefill_tile` (None: of `default_tile`, on a GPU half as wide where all requests
    are short), or of the chunk where that is smaller.
    With `piggyback` prompts ride in captured steps, where the backend captures prompts.
    While all rows are taken, the prompts of `prefill_ahead` requests more are then prefilled (None: of
    `default_ahead`); `num_pages` None has room for them.
    `kv_dtype` is that of stored keys and values, None the one of the weights; `kv_scales` are the factors of the
    target's. With `deterministic` the target gives a token the same bits whatever stands beside it; that needs `fused`
    and a backend built for it. With `adaptive` each step verifies as many nodes as pay, see `adaptive`; that is decided
    with `step_costs`, or where they are None with what steps take before the first request.
    """

    page_size: int = 16
    max_batch: int = 8
    num_pages: int | None = None
    max_length: int | None = None
    impl: str = "auto"
    graph: str = "none"
    overlap: int | None = None
    fused: bool = False
    prefill_chunk: int = 2048
    prefill_tile: int | None = None
    piggyback: bool = True
    prefill_ahead: int | None = None
    kv_dtype: torch.dtype | None = None
    kv_scales: KVScales | None = None
    deterministic: bool = False
    adaptive: bool = False
    step_costs: StepCosts | None = None

    def __post_init__(self) -> None:
        for name in ("page_size", "max_batch", "prefill_chunk"):
            expect_at_least(name, getattr(self, name), 1)
        for name, least in dict(num_pages=1, prefill_tile=1, prefill_ahead=0, overlap=0).items():
            expect_at_least(name, getattr(self, name), least, nullable=True)


def check_tree(algorithm: Algorithm) -> None:
    """Raise EngineError if no tree has the size that the algorithm names."""
    nodes, depth = algorithm.num_nodes, algorithm.max_depth
    least, kind = (nodes - 1, "chain") if algorithm.chain else (min(1, nodes - 1), "tree")
    if not least <= depth < nodes:
        expected = str(least) if least == nodes - 1 else f"{least} to {nodes - 1}"
        raise EngineError(
            f"algo={algorithm.name}: max_depth: expected {expected} for a {kind} of {nodes} nodes, got {depth}"
        )


def check_adaptive(algorithm: Algorithm, level: str) -> None:
    """Raise EngineError where steps cannot differ in size."""
    if algorithm.rule != "target_only":
        raise EngineError(
            f"adaptive: algo={algorithm.name} draws its drafts (rule {algorithm.rule}), and a number of nodes that "
            "depends on them would change the distribution; expected the rule target_only"
        )
    if level not in ("none", "step"):
        raise EngineError(f"adaptive: a step of each size is one graph: expected graph none or step, got {level}")


def check_backend(backend: Backend, target: Target, algorithm: Algorithm, settings: EngineSettings, level: str) -> None:
    if level != "none" and not backend.capturable:
        raise EngineError(
            f"backend={backend.name} reads lengths back in every step and cannot be captured, got graph={level}"
        )
    if settings.deterministic and not (settings.fused and backend.deterministic):
        raise EngineError(
            f"deterministic: expected fused kernels and a backend built for it, got fused={settings.fused} and "
            f"backend={backend.name} with deterministic={backend.deterministic}"
        )
    weight, verify = target.model.model.norm.weight, "decode" if algorithm.num_nodes == 1 else "verify"
    modes = {"prefill": "chain", verify: "chain" if algorithm.chain else "tree"}
    if settings.adaptive:
        modes["decode"] = "chain"
    dtype, device, kv_dtype = weight.dtype, weight.device, settings.kv_dtype
    check_calls(backend, target.config, modes, settings.page_size, dtype, device, kv_dtype=kv_dtype)
