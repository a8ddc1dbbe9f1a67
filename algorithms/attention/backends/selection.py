"""Backends by name, and the checks that precede a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import specdec_kernels as kernels
from algorithms.attention.backends.hybrid import SINGLE, HybridBackend
from algorithms.attention.backends.protocol import Backend, BackendError

if TYPE_CHECKING:
    from algorithms.models.config import DecoderConfig


def backends() -> dict[str, Any]:
    return dict(sorted({**SINGLE, HybridBackend.name: HybridBackend}.items()))


def check_calls(
    backend: Backend,
    config: DecoderConfig,
    modes: Mapping[str, str],
    page_size: int,
    dtype: Any,
    device: Any,
    asker: str = "the target",
    kv_dtype: Any = None,
) -> None:
    """Raise `BackendError` where `backend` cannot serve a layer of the model `asker` in a phase, of `modes` by phase,
    or where no cache can hold its heads. `kv_dtype` of stored keys and values: None is `dtype`."""
    if config.mixings and None not in config.mixings:
        return
    if (problem := kernels.head_dim_problem(config.head_dim)) is not None:
        raise BackendError(f"{asker}: no KV cache can hold its keys: {problem}")
    sizes = (1, config.num_heads, config.num_kv_heads, config.head_dim, page_size)
    shape = kernels.AttentionShape(*sizes, dtype, kv_dtype or dtype)
    for phase, mode in modes.items():
        for window in dict.fromkeys(config.sliding_windows or (None,)):
            if (reason := backend.refuse(shape, mode, window, device, phase)) is not None:
                others = " or ".join(name for name in ("fa4", "torch") if name != backend.name)
                raise BackendError(
                    f"backend={backend.name} cannot serve {phase} of {asker} here: {reason}; use backend={others}"
                )
