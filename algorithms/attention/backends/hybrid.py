"""`backend=hybrid`: one backend for prompts, one for decoding, and a choice of the two for verifying and drafting.

After SGLang's `speculative_attention_mode`: prompts go to the prefill backend, forwards of one token per request to the
decode backend, trees and blocks of drafts to the one that `verify` names, everything a drafter runs to the one that
`draft` names. Each backend's own settings are under its name, as in `backend.fa4.dispatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from algorithms.attention.backends.flashinfer import FlashInferBackend
from algorithms.attention.backends.protocol import Backend, LayerInputs, Reason
from algorithms.attention.backends.torch import TorchBackend
from algorithms.attention.backends.triton import TritonBackend
from algorithms.checked import Checked

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specdec_kernels import AttentionMetadata, AttentionShape

SINGLE: dict[str, Any] = {kind.name: kind for kind in (TritonBackend, FlashInferBackend, TorchBackend)}
"""Backends that a side can be, by name."""
SIDES = ("prefill", "decode")


class HybridPlan(NamedTuple):
    side: Backend
    planned: Any


class HybridBackend(Backend):
    """Routes a forward by its phase. Both sides read one KV pool, so any two can be combined."""

    name = "hybrid"

    @dataclass
    class Config(Checked):
        GROUP = "backend."
        name: str = "hybrid"
        prefill: Annotated[str, tuple(SINGLE)] = "fa4"
        """Backend that serves prompts."""
        decode: Annotated[str, tuple(SINGLE)] = "fa4"
        """Backend that serves one token per request."""
        verify: Annotated[str, SIDES] = "decode"
        """Which of the two verifies drafts: `prefill` or `decode`."""
        draft: Annotated[str, SIDES] = "decode"
        """Which of the two serves the drafter: `prefill` or `decode`."""
        fa4: TritonBackend.Config = field(default_factory=TritonBackend.Config)
        flashinfer: FlashInferBackend.Config = field(default_factory=FlashInferBackend.Config)
        torch: TorchBackend.Config = field(default_factory=TorchBackend.Config)

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in SINGLE:
                settings = getattr(self, name)
                if settings.name != name:
                    raise ValueError(f"backend.{name}.name: expected {name}, got {settings.name!r}")
                if name not in (self.prefill, self.decode) and settings != type(settings)():
                    raise ValueError(f"backend.{name} is set, and serves neither backend.prefill nor backend.decode")

    def __init__(self, config: Config, impl: str, deterministic: bool = False) -> None:
        kinds = {name: SINGLE[name] for name in (config.prefill, config.decode)}
        built: dict[str, Backend] = {
            name: kind(getattr(config, name), impl, deterministic) for name, kind in kinds.items()
        }
        self.deterministic = deterministic
        sides = {"prefill": "prefill", "decode": "decode", "verify": config.verify, "draft": config.draft}
        self._by_phase = {phase: built[getattr(config, side)] for phase, side in sides.items()}
        self.captures_prompts = self._by_phase["prefill"].captures_prompts

    @property
    def served(self) -> dict[str, str]:  # type: ignore[override]
        return {phase: name for side in self._by_phase.values() for phase, name in side.served.items()}

    def refuse(self, shape: AttentionShape, mode: str, window: int | None, device: torch.device, phase: str) -> Reason:
        side = self._by_phase[phase]
        reason = side.refuse(shape, mode, window, device, phase)
        return None if reason is None else f"{side.name} for {phase}: {reason}"

    def plan(self, metadata: AttentionMetadata, shape: AttentionShape, phase: str) -> HybridPlan:
        side = self._by_phase[phase]
        return HybridPlan(side, side.plan(metadata, shape, phase))

    def plan_levels(
        self, levels: Sequence[AttentionMetadata], shape: AttentionShape, phase: str
    ) -> list[HybridPlan] | None:
        side = self._by_phase[phase]
        planned = side.plan_levels(levels, shape, phase)
        return None if planned is None else [HybridPlan(side, each) for each in planned]

    def run(self, plan: HybridPlan, layer: LayerInputs) -> Tensor:
        return plan.side.run(plan.planned, layer)
