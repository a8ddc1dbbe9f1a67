"""`backend=fa4`: the project's own paged attention in Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import specdec_kernels as kernels
from algorithms.runtime.backends import AttentionPlan

if TYPE_CHECKING:
    from torch import Tensor


class FA4Backend:
    """Online softmax in base 2, packed GQA rows, split-KV; see `specdec_kernels.attention`."""

    name = "fa4"

    @dataclass
    class Config:
        name: str = "fa4"
        split_tokens: int | None = None
        """KV tokens a split covers; None takes the static table's value for the chip."""

        def __post_init__(self) -> None:
            if self.split_tokens is not None and self.split_tokens < 16:
                raise ValueError(f"backend.split_tokens: expected at least 16 or null, got {self.split_tokens}")

    def __init__(self, config: Config, impl: str) -> None:
        self._split_tokens = config.split_tokens
        self._impl = impl

    def plan(self, plan: AttentionPlan) -> AttentionPlan:
        return plan

    def run(self, plan: AttentionPlan, q: Tensor, kv: Tensor) -> Tensor:
        return kernels.paged_attention(
            q,
            kv,
            plan.page_table,
            plan.lengths,
            mode=plan.mode,
            mask=plan.mask,
            q_lens=plan.q_lens,
            max_length=plan.max_length,
            split_tokens=self._split_tokens,
            impl=self._impl,
        )
