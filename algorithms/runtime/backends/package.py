"""From a step's plan to the calls of a wrapped attention package.

A step is planned before any layer has shown its heads and dtype, so the package's own plan is made at the first layer
and kept for those that look the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from algorithms.runtime.backends import AttentionPlan
from specdec_kernels.wrappers import AttentionCall, AttentionWrapper, Needs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Prepared = dict[tuple[Any, ...], Any]
"""Shape of a layer -> the package's plan."""


class Wrapped:
    """A package and its name for the records."""

    def __init__(self, package: AttentionWrapper) -> None:
        self._package = package
        self.label = package.name

    def refusal(self, needs: Needs) -> str | None:
        return self._package.refusal(needs)

    def refusal_of(self, plan: AttentionPlan, q: Tensor, kv: Tensor) -> str | None:
        return self._package.refusal(_call(plan, q, kv).needs)

    def prepare(self) -> Prepared:
        """What a plan carries as `prepared`."""
        return {}

    def run(self, plan: AttentionPlan, q: Tensor, kv: Tensor) -> torch.Tensor:
        """Attention of one layer; raises `Unsupported` where the package cannot serve it."""
        prepared: Prepared = plan.prepared
        shape = layer_shape(q, kv)
        if shape not in prepared:
            prepared[shape] = self._package.plan(_call(plan, q, kv))
        return self._package.run(prepared[shape], q, kv)[0]


def layer_shape(q: Tensor, kv: Tensor) -> tuple[Any, ...]:
    """What layers must have in common to share a package's plan or a work list."""
    return (*q.shape[2:], kv.shape[3], q.dtype)


def _call(plan: AttentionPlan, q: Tensor, kv: Tensor) -> AttentionCall:
    return AttentionCall(
        page_table=plan.page_table,
        lengths=plan.lengths,
        mode=plan.mode,
        num_queries=q.shape[1],
        num_heads=q.shape[2],
        num_kv_heads=kv.shape[3],
        head_dim=q.shape[3],
        page_size=kv.shape[2],
        max_length=plan.max_length,
        dtype=q.dtype,
        kv_dtype=kv.dtype,
        mask=plan.mask,
        q_lens=plan.q_lens,
        tree_width=plan.tree_width,
        window=plan.window,
        depths=plan.depths,
        row_depths=plan.row_depths,
        soft_cap=plan.soft_cap,
        sinks=plan.sinks,
        scale=plan.scale,
    )
