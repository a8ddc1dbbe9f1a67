"""`backend=torch`: gathered keys and values through torch.

An independent second opinion on the Triton kernel: it shares no code with `specdec_kernels.attention`, gathers whole
rows of the page table once a step, and leaves the arithmetic to torch. Soft caps and sinks, which
`scaled_dot_product_attention` does not know, are written out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from algorithms.runtime.backends import AttentionPlan

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_kernels.wrappers import Needs


class _Dense(NamedTuple):
    slots: Tensor
    """[B, S] int64: where position s of request b is stored; 0 past the end."""
    visible: Tensor
    """[B, 1, N, S] bool."""


class TorchBackend:
    """Dense gather and `F.scaled_dot_product_attention` with a boolean mask."""

    name = "torch"
    capturable = True

    @dataclass
    class Config:
        name: str = "torch"

        @property
        def capturable(self) -> bool:
            return True

    def __init__(self, config: Config, impl: str) -> None:
        """`impl` is for kernels; this backend has none."""
        self.served: dict[str, str] = {}

    def refusal(self, needs: Needs, phase: str) -> str | None:
        """It serves every call."""
        return None

    def plan(self, plan: AttentionPlan) -> AttentionPlan:
        self.served[plan.phase] = self.name
        return replace(plan, prepared=_Dense(_slots(plan), _visible(plan)))

    def run(self, plan: AttentionPlan, q: Tensor, kv: Tensor) -> Tensor:
        import torch.nn.functional as F

        dense: _Dense = plan.prepared
        keys, values = (half.flatten(0, 1)[dense.slots].transpose(1, 2) for half in kv)
        if plan.soft_cap is not None or plan.sinks is not None:
            out = _written_out(plan, q.transpose(1, 2), keys, values, dense.visible)
        else:
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=dense.visible, scale=plan.scale, enable_gqa=True
            )
        # A query that sees nothing (a padded row) comes out as NaN.
        return out.transpose(1, 2).masked_fill(~dense.visible.any(-1).transpose(1, 2)[..., None], 0.0)


def _written_out(plan: AttentionPlan, q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """softmax over [cap * tanh(scale q k / cap), sink] times the values, in float32; q [B, H, N, D]."""
    import torch

    group = q.shape[1] // keys.shape[1]
    keys, values = (half.float().repeat_interleave(group, 1) for half in (keys, values))
    scale = q.shape[-1] ** -0.5 if plan.scale is None else plan.scale
    scores = q.float() @ keys.transpose(2, 3) * scale
    if plan.soft_cap is not None:
        scores = plan.soft_cap * torch.tanh(scores / plan.soft_cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if plan.sinks is not None:
        sink = plan.sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    return (scores.softmax(-1)[..., : keys.shape[2]] @ values).to(q.dtype)


def _slots(plan: AttentionPlan) -> Tensor:
    import torch

    position = torch.arange(plan.max_length, device=plan.lengths.device)
    last_column = plan.page_table.shape[1] - 1
    pages = plan.page_table.long()[:, (position // plan.page_size).clamp(max=last_column)].clamp(min=0)
    return pages * plan.page_size + position % plan.page_size


def _visible(plan: AttentionPlan) -> Tensor:
    import torch

    from specdec_kernels.wrappers.visibility import visible_keys

    rows = torch.full_like(plan.lengths, plan.num_queries, dtype=torch.int32) if plan.q_lens is None else plan.q_lens
    return visible_keys(
        plan.lengths,
        rows,
        plan.num_queries,
        plan.max_length,
        plan.mode,
        mask=plan.mask,
        tree_width=plan.tree_width,
        window=plan.window,
        depths=plan.depths,
        row_depths=plan.row_depths,
    )[:, None]
