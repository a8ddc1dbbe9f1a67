"""Attention backends: one contract, `plan` once a step and `run` once a layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from algorithms.runtime.models.config import DecoderConfig
    from specdec_kernels.wrappers import Needs

PHASES = ("prefill", "decode", "verify", "draft")
"""What a forward is for: prompts, one token a request, drafted tokens of the target; everything of a drafter."""


class BackendError(ValueError):
    """A backend that cannot run here, or not this call; the message says why and what else there is."""


@dataclass(frozen=True)
class AttentionPlan:
    """What all layers of one forward share.

    Queries `[B, num_queries]` stand at slots `lengths[b] + i`; `mode` (`chain`, `block`, `tree`), `mask`, `q_lens`,
    `tree_width`, `window`, `depths`, `row_depths`, `soft_cap`, `sinks` and `scale` mean what they mean to
    `specdec_kernels.paged_attention`. `max_length` bounds lengths + draft slots on the host. `prepared` is the
    backend's own.
    """

    page_table: Tensor
    lengths: Tensor
    mode: str
    mask: Tensor | None
    q_lens: Tensor | None
    num_queries: int
    page_size: int
    max_length: int
    phase: str = "verify"
    """One of `PHASES`."""
    tree_width: int | None = None
    window: int | None = None
    depths: Tensor | None = None
    """[B, draft slots] int32, for a window over a tree."""
    row_depths: Tensor | None = None
    """[B, num_queries] int32 where the query rows are not the first slots of the tree."""
    soft_cap: float | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    prepared: Any = field(default=None)


class Backend(Protocol):
    """Computes attention of new tokens over [committed prefix; new tokens], whose KV is already stored."""

    name: str
    capturable: bool
    """Whether `plan` and `run` can be captured in a CUDA graph: they read nothing back."""
    served: dict[str, str]
    """Phase -> what computed it in this run, for the records."""

    def refusal(self, needs: Needs, phase: str) -> str | None:
        """Why forwards of this kind cannot be served, or None. Asked before weights load and before anything runs."""
        ...

    def plan(self, plan: AttentionPlan) -> AttentionPlan:
        """Do once what all layers need."""
        ...

    def run(self, plan: AttentionPlan, q: Tensor, kv: Tensor) -> Tensor:
        """`q [B, N, H, D]`, `kv [2, pages, page_size, H_kv, D]` of one layer; returns `[B, N, H, D]`."""
        ...


def backends() -> dict[str, Any]:
    """Every backend by name. Each has a `Config` dataclass and is built as `cls(config, impl)`; the constructor raises
    `BackendError` where the backend cannot run."""
    from algorithms.runtime.backends.flashinfer import FlashInferBackend
    from algorithms.runtime.backends.hybrid import HybridBackend
    from algorithms.runtime.backends.torch_sdpa import TorchBackend
    from algorithms.runtime.backends.triton import FA4Backend

    return {"fa4": FA4Backend, "flashinfer": FlashInferBackend, "hybrid": HybridBackend, "torch": TorchBackend}


def check_backend(config: Any, impl: str, graph: str, instead: str = "use runtime.graph=none") -> None:
    """Raise `BackendError` where the configured backend cannot run on this machine, or not with `graph` captured.

    `instead` is what else the user may do about the level. Costs no weights and no device memory, so it belongs before
    both.
    """
    backend = backends()[config.name](config, impl)
    if graph != "none" and not backend.capturable:
        able = [name for name, kind in backends().items() if kind.Config().capturable]
        raise BackendError(
            f"backend={config.name} reads lengths back in every step and cannot be captured: {instead}, "
            f"or one of backend={', '.join(able)}"
        )


def check_calls(
    backend: Backend, shape: DecoderConfig, modes: Mapping[str, str], page_size: int, dtype: Any, device: Any
) -> None:
    """Raise `BackendError` where `backend` cannot serve a model of `shape` in a phase; `modes` maps phase to mode."""
    from specdec_kernels.wrappers import Needs

    for phase, mode in modes.items():
        needs = Needs(mode, shape.num_heads, shape.num_kv_heads, shape.head_dim, page_size, dtype, device)
        if (reason := backend.refusal(needs, phase)) is not None:
            raise BackendError(f"backend={backend.name} cannot serve {phase} here: {reason}; use backend=fa4 or torch")
