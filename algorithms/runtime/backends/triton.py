"""`backend=fa4`: the project's own paged attention in Triton, and the real FlashAttention-4 where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import specdec_kernels as kernels
from algorithms.runtime.backends import AttentionPlan, BackendError
from algorithms.runtime.backends.package import Wrapped, layer_shape
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
        work_list: bool | None = None
        """Whether a fixed grid walks a list of work made on the device once a step, which a captured graph with a wide
        `max_length` needs; None: on a GPU. The interpreter does without: there it is one more kernel a forward."""

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
        return replace(plan, prepared={})

    def run(self, plan: AttentionPlan, q: Tensor, kv: Tensor) -> Tensor:
        note = ""
        if self._package is not None and self._config.dispatch == "flash_attention_4":
            return self._through(self._package, plan, q, kv)
        if self._package is not None and plan.phase == "prefill":
            reason = self._package.refusal_of(plan, q, kv)
            if reason is None:
                return self._through(self._package, plan, q, kv)
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
            plan=self._work_list(plan, q, kv),
            impl=self._impl,
            **_options(plan),
        )

    def _through(self, package: Wrapped, plan: AttentionPlan, q: Tensor, kv: Tensor) -> Tensor:
        self.served[plan.phase] = f"fa4: {package.label}"
        return package.run(plan, q, kv)

    def _work_list(self, plan: AttentionPlan, q: Tensor, kv: Tensor) -> kernels.AttentionPlan | None:
        """Made at the first layer, when the heads are known, and kept for the layers that look the same."""
        if not (q.is_cuda if self._config.work_list is None else self._config.work_list):
            return None
        shape = layer_shape(q, kv)
        if shape not in plan.prepared:
            plan.prepared[shape] = kernels.plan_attention(
                plan.lengths,
                num_nodes=q.shape[1],
                heads=q.shape[2],
                kv_heads=kv.shape[3],
                head_dim=q.shape[3],
                max_length=min(plan.max_length, plan.page_table.shape[1] * plan.page_size),
                kv_bytes=kv.element_size(),
                q_lens=plan.q_lens,
                mode=plan.mode,
                tree_width=plan.tree_width,
                window=plan.window,
                split_tokens=self._config.split_tokens,
                impl=self._impl,
            )
        return plan.prepared[shape]


def _options(plan: AttentionPlan) -> dict[str, Any]:
    """The arguments that most calls leave out."""
    names = ("tree_width", "window", "depths", "row_depths", "soft_cap", "sinks", "scale")
    return {name: getattr(plan, name) for name in names if getattr(plan, name) is not None}
