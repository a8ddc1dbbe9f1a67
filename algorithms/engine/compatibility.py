"""The meaning of settings for one target and backend, and checks of what these cannot serve."""

import torch

from algorithms.algorithm import Algorithm
from algorithms.attention.backends.protocol import Backend
from algorithms.attention.backends.selection import check_calls
from algorithms.engine.request import EngineError
from algorithms.engine.settings import RuntimeSettings
from algorithms.models.loading import Target


def kv_dtype_of(settings: RuntimeSettings) -> torch.dtype | None:
    """The dtype of stored keys and values; None: the dtype of the weights."""
    return None if settings.kv_dtype == "auto" else torch.float8_e4m3fn


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
            f"adaptive: algo={algorithm.name} samples its drafts (rule {algorithm.rule}), and a number of nodes that "
            "depends on them would change the distribution; expected the rule target_only"
        )
    if level not in ("none", "step"):
        raise EngineError(f"adaptive: a step of each size is one graph: expected graph none or step, got {level}")


def check_backend(
    backend: Backend, target: Target, algorithm: Algorithm, settings: RuntimeSettings, level: str, fused: bool = False
) -> None:
    """Raise EngineError or ValueError where the backend cannot serve the target at this level of capture."""
    if level != "none" and not backend.capturable:
        raise EngineError(
            f"backend={backend.name} reads lengths back in every step and cannot be captured, got graph={level}"
        )
    if settings.deterministic and not (fused and backend.deterministic):
        raise EngineError(
            f"deterministic: expected fused kernels and a backend built for it, got fused={fused} and "
            f"backend={backend.name} with deterministic={backend.deterministic}"
        )
    verify = "decode" if algorithm.num_nodes == 1 else "verify"
    modes = {"prefill": "chain", verify: "chain" if algorithm.chain else "tree"}
    if settings.adaptive:
        modes["decode"] = "chain"
    dtype, device = target.dtype, target.device
    check_calls(backend, target.config, modes, settings.page_size, dtype, device, kv_dtype=kv_dtype_of(settings))
