"""`backend=torch`: gathered keys and values through torch's scaled_dot_product_attention.

An independent second opinion on the Triton kernel: it shares no code with `specdec_kernels.attention`, gathers whole
rows of the page table once a step, and leaves the arithmetic to torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from algorithms.runtime.backends import AttentionPlan

if TYPE_CHECKING:
    from torch import Tensor


class _Dense(NamedTuple):
    slots: Tensor
    """[B, S] int64: where position s of request b is stored; 0 past the end."""
    visible: Tensor
    """[B, 1, N, S] bool."""


class TorchBackend:
    """Dense gather and `F.scaled_dot_product_attention` with a boolean mask."""

    name = "torch"

    @dataclass
    class Config:
        name: str = "torch"

    def __init__(self, config: Config, impl: str) -> None:
        """`impl` is for kernels; this backend has none."""

    def plan(self, plan: AttentionPlan) -> AttentionPlan:
        return replace(plan, prepared=_Dense(_slots(plan), _visible(plan)))

    def run(self, plan: AttentionPlan, q: Tensor, kv: Tensor) -> Tensor:
        import torch.nn.functional as F

        dense: _Dense = plan.prepared
        keys, values = (half.flatten(0, 1)[dense.slots].transpose(1, 2) for half in kv)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=dense.visible, enable_gqa=True
        )
        # A query that sees nothing (a padded row) comes out as NaN.
        return out.transpose(1, 2).masked_fill(~dense.visible.any(-1).transpose(1, 2)[..., None], 0.0)


def _positions(plan: AttentionPlan) -> Tensor:
    import torch

    return torch.arange(plan.max_length, device=plan.lengths.device)


def _slots(plan: AttentionPlan) -> Tensor:
    position = _positions(plan)
    last_column = plan.page_table.shape[1] - 1
    pages = plan.page_table.long()[:, (position // plan.page_size).clamp(max=last_column)].clamp(min=0)
    return pages * plan.page_size + position % plan.page_size


def _visible(plan: AttentionPlan) -> Tensor:
    import torch

    query = torch.arange(plan.num_queries, device=plan.lengths.device)
    # Index of a key among the new tokens; negative for the committed prefix.
    node = _positions(plan)[None, None, :] - plan.lengths[:, None, None]
    count = plan.num_queries if plan.q_lens is None else plan.q_lens[:, None, None]
    if plan.mode == "block":
        among_new = node < count
    elif plan.mode == "chain":
        among_new = node <= query[None, :, None]
    else:
        among_new = _mask_bits(plan, node)
    visible = (node < 0) | (among_new & (node < count))
    visible = visible & (query[None, :, None] < count)
    return visible[:, None]


def _mask_bits(plan: AttentionPlan, node: Tensor) -> Tensor:
    assert plan.mask is not None
    inside = node.clamp(0, plan.num_queries - 1).expand(-1, plan.num_queries, -1)
    words = plan.mask.gather(2, inside // 64)
    return ((words >> (inside % 64)) & 1).bool() & (node >= 0) & (node < plan.num_queries)
