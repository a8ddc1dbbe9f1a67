"""`backend=flashinfer`: FlashInfer's paged prefill kernels for every phase."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from algorithms.runtime.backends import AttentionPlan, BackendError
from algorithms.runtime.backends.package import Wrapped
from specdec_kernels.wrappers import FlashInferAttention, Needs

if TYPE_CHECKING:
    from torch import Tensor

KERNELS = ("auto", "fa2", "fa3")


class FlashInferBackend:
    """See `specdec_kernels.wrappers.flashinfer`. Its planner reads lengths back, so no step of it is captured."""

    name = "flashinfer"
    capturable = False

    @dataclass
    class Config:
        name: str = "flashinfer"
        kernel: str = "auto"
        """FlashInfer's own backend for calls without a tree: `auto`, `fa2` or `fa3`."""
        workspace_mb: int = 128

        def __post_init__(self) -> None:
            if self.kernel not in KERNELS:
                raise ValueError(f"backend.kernel must be one of {', '.join(KERNELS)}, got {self.kernel!r}")
            if self.workspace_mb < 1:
                raise ValueError(f"backend.workspace_mb: expected at least 1, got {self.workspace_mb}")

        @property
        def capturable(self) -> bool:
            return False

    def __init__(self, config: Config, impl: str) -> None:
        if reason := FlashInferAttention.available():
            raise BackendError(f"backend=flashinfer: {reason}; use backend=fa4 or backend=torch")
        self.served: dict[str, str] = {}
        self._package = Wrapped(FlashInferAttention(config.kernel, config.workspace_mb << 20, impl))

    def refusal(self, needs: Needs, phase: str) -> str | None:
        return self._package.refusal(needs)

    def plan(self, plan: AttentionPlan) -> AttentionPlan:
        self.served[plan.phase] = self._package.label
        return replace(plan, prepared=self._package.prepare())

    def run(self, plan: AttentionPlan, q: Tensor, kv: Tensor) -> Tensor:
        return self._package.run(plan, q, kv)
