"""`backend=hybrid`: one backend for prompts, one for decoding, and a choice of the two for verifying and drafting.

After SGLang's `speculative_attention_mode`: prompts go to the prefill backend, forwards of one token a request to the
decode backend, trees and blocks of drafts to the one that `verify` names, everything a drafter runs to the one that
`draft` names. Each backend's own settings stand under its name, as in `backend.fa4.dispatch`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from algorithms.runtime.backends import AttentionPlan, Backend, backends
from algorithms.runtime.backends.flashinfer import FlashInferBackend
from algorithms.runtime.backends.torch_sdpa import TorchBackend
from algorithms.runtime.backends.triton import FA4Backend
from specdec_kernels.wrappers import Needs

if TYPE_CHECKING:
    from torch import Tensor

SIDES = ("prefill", "decode")


class HybridBackend:
    """Routes a plan by its phase; both sides read and write one KV pool, so they may be mixed at will."""

    name = "hybrid"

    @dataclass
    class Config:
        name: str = "hybrid"
        prefill: str = "fa4"
        """Backend that serves prompts."""
        decode: str = "fa4"
        """Backend that serves one token a request."""
        verify: str = "decode"
        """Which of the two verifies drafts: `prefill` or `decode`."""
        draft: str = "decode"
        """Which of the two serves the drafter: `prefill` or `decode`."""
        fa4: FA4Backend.Config = field(default_factory=FA4Backend.Config)
        flashinfer: FlashInferBackend.Config = field(default_factory=FlashInferBackend.Config)
        torch: TorchBackend.Config = field(default_factory=TorchBackend.Config)

        def __post_init__(self) -> None:
            valid = [name for name in backends() if name != "hybrid"]
            for key in SIDES:
                if getattr(self, key) not in valid:
                    raise ValueError(f"backend.{key} must be one of {', '.join(valid)}, got {getattr(self, key)!r}")
            for key in ("verify", "draft"):
                if getattr(self, key) not in SIDES:
                    raise ValueError(f"backend.{key} must be one of {', '.join(SIDES)}, got {getattr(self, key)!r}")

            for name in valid:
                settings = self.settings_of(name)
                if settings.name != name:
                    raise ValueError(f"backend.{name}.name: expected {name}, got {settings.name!r}")
                if name not in (self.prefill, self.decode) and settings != type(settings)():
                    raise ValueError(f"backend.{name} is set, and serves neither backend.prefill nor backend.decode")

        def settings_of(self, name: str) -> Any:
            """Configuration of the backend called `name`."""
            return getattr(self, name)

        def side_of(self, phase: str) -> str:
            """`prefill` or `decode`."""
            return {"prefill": "prefill", "decode": "decode", "verify": self.verify, "draft": self.draft}[phase]

        @property
        def capturable(self) -> bool:
            """Prompts are never captured."""
            named = {getattr(self, self.side_of(phase)) for phase in ("decode", "verify", "draft")}
            return all(self.settings_of(name).capturable for name in named)

    def __init__(self, config: Config, impl: str) -> None:
        kinds = {name: backends()[name] for name in (config.prefill, config.decode)}
        built: dict[str, Backend] = {name: kind(config.settings_of(name), impl) for name, kind in kinds.items()}
        self.capturable = config.capturable
        self._config = config
        self._sides = {side: built[getattr(config, side)] for side in SIDES}

    @property
    def served(self) -> dict[str, str]:
        """Phase -> what computed it."""
        return {phase: name for side in self._sides.values() for phase, name in side.served.items()}

    def refusal(self, needs: Needs, phase: str) -> str | None:
        side = self._sides[self._config.side_of(phase)]
        reason = side.refusal(needs, phase)
        return None if reason is None else f"{side.name} for {phase}: {reason}"

    def plan(self, plan: AttentionPlan) -> AttentionPlan:
        phase = "decode" if plan.phase == "verify" and plan.num_queries == 1 else plan.phase
        side = self._sides[self._config.side_of(phase)]
        return replace(plan, prepared=(side, side.plan(replace(plan, phase=phase))))

    def run(self, plan: AttentionPlan, q: Tensor, kv: Tensor) -> Tensor:
        side, planned = plan.prepared
        return side.run(planned, q, kv)
