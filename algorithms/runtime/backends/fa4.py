"""`backend=fa4`: the project's own paged attention in Triton, and the real FlashAttention-4 where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import specdec_kernels as kernels
from algorithms.runtime.backends import AttentionPlan, BackendError
from algorithms.runtime.backends.wrapped import Wrapped
from specdec_kernels.wrappers import FlashAttention4, Needs

if TYPE_CHECKING:
    from torch import Tensor

DISPATCH = ("triton", "auto", "flash_attention_4")


class FA4Backend:
    """Online softmax in base 2, packed GQA rows, split-KV; see `specdec_kernels.attention`."""

    name = "fa4"

    @dataclass
    class Config:
        name: str = "fa4"
        split_tokens: int | None = None
        """KV tokens a split covers; None takes the static table's value for the chip."""
        dispatch: str = "triton"
        """`triton`: the project's kernel for every call. `flash_attention_4`: the package for every call, which is
        refused where it is missing or cannot do it. `auto`: the package for prompts where it is installed and able,
        else Triton. The package has no split keys on Hopper, so verifying drafts stays with Triton."""

        def __post_init__(self) -> None:
            if self.split_tokens is not None and self.split_tokens < 16:
                raise ValueError(f"backend.split_tokens: expected at least 16 or null, got {self.split_tokens}")
            if self.dispatch not in DISPATCH:
                raise ValueError(f"backend.dispatch must be one of {', '.join(DISPATCH)}, got {self.dispatch!r}")

        @property
        def capturable(self) -> bool:
            return self.dispatch != "flash_attention_4"

    def __init__(self, config: Config, impl: str) -> None:
        self.capturable = config.capturable
        self.served: dict[str, str] = {}
        self._config, self._impl = config, impl
        self._package = Wrapped(FlashAttention4(impl)) if config.dispatch != "triton" else None
        if config.dispatch == "flash_attention_4" and (reason := FlashAttention4.available()):
            raise BackendError(f"backend.dispatch=flash_attention_4: {reason}; use backend.dispatch=triton")

    def refusal(self, needs: Needs, phase: str) -> str | None:
        """Triton serves every call; the package refuses some."""
        if self._package is None or self._config.dispatch == "auto":
            return None
        return self._package.refusal(needs)

    def plan(self, plan: AttentionPlan) -> AttentionPlan:
        wanted = self._package is not None and (self._config.dispatch != "auto" or plan.phase == "prefill")
        return replace(plan, prepared=self._package.prepare() if wanted and self._package else None)

    def run(self, plan: AttentionPlan, q: Tensor, kv: Tensor) -> Tensor:
        note = ""
        if plan.prepared is not None and self._package is not None:
            reason = self._package.refusal_of(plan, q, kv)
            if reason is None or self._config.dispatch == "flash_attention_4":
                self.served[plan.phase] = f"fa4: {self._package.label}"
                return self._package.run(plan, q, kv)
            note = f" ({self._package.label} not used: {reason})"
        self.served[plan.phase] = f"fa4: {'triton' if self._impl != 'reference' else 'reference'}{note}"
        return kernels.paged_attention(
            q,
            kv,
            plan.page_table,
            plan.lengths,
            mode=plan.mode,
            mask=plan.mask,
            q_lens=plan.q_lens,
            max_length=plan.max_length,
            split_tokens=self._config.split_tokens,
            impl=self._impl,
            **_options(plan),
        )


def _options(plan: AttentionPlan) -> dict[str, Any]:
    """The arguments that most calls leave out."""
    names = ("tree_width", "window", "depths", "row_depths", "soft_cap", "sinks", "scale")
    return {name: getattr(plan, name) for name in names if getattr(plan, name) is not None}
