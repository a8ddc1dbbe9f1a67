"""Attention backends: one contract, `plan` once a step and `run` once a layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """What all layers of one forward share.

    Queries `[B, num_queries]` stand at slots `lengths[b] + i`; `mode` (`chain`, `block`, `tree`), `mask` and `q_lens`
    mean what they mean to `specdec_kernels.paged_attention`. `max_length` bounds lengths + num_queries on the host.
    `prepared` is the backend's own.
    """

    page_table: Tensor
    lengths: Tensor
    mode: str
    mask: Tensor | None
    q_lens: Tensor | None
    num_queries: int
    page_size: int
    max_length: int
    prepared: Any = field(default=None)


class Backend(Protocol):
    """Computes attention of new tokens over [committed prefix; new tokens], whose KV is already stored."""

    name: str

    def plan(self, plan: AttentionPlan) -> AttentionPlan:
        """Do once what all layers need; no host synchronisation."""
        ...

    def run(self, plan: AttentionPlan, q: Tensor, kv: Tensor) -> Tensor:
        """`q [B, N, H, D]`, `kv [2, pages, page_size, H_kv, D]` of one layer; returns `[B, N, H, D]`."""
        ...


def backends() -> dict[str, type]:
    """Every backend by name. Each has a `Config` dataclass and is built as `cls(config, impl)`."""
    from algorithms.runtime.backends.fa4 import FA4Backend
    from algorithms.runtime.backends.sdpa import TorchBackend

    return {"fa4": FA4Backend, "torch": TorchBackend}
