"""`backend=torch`: gathered keys and values through torch.

An independent second opinion on the Triton kernel: it gathers whole rows of the page table once per forward and leaves
the arithmetic to torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import specdec_kernels as kernels
from algorithms.attention.backends.protocol import NO_BITS, Backend, BackendError, LayerInputs, Reason
from algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_kernels import AttentionMetadata, AttentionShape


class TorchPlan(NamedTuple):
    """The places of the keys of each request, and which tokens see them."""

    metadata: AttentionMetadata
    slots: Tensor
    """[B, S] int64: where position s of request b is stored; any slot past the end."""
    visible: Tensor
    """[B, 1, N, S] bool."""
    unwritten: Tensor
    """[B, S, 1, 1] bool: no token of the request is there, so the pool may hold anything, even NaN."""


class TorchBackend(Backend):
    """Dense gather and `F.scaled_dot_product_attention` with a boolean mask."""

    name = "torch"
    # `captures_prompts` is off: captured, every tile would gather keys up to the longest context.

    @dataclass
    class Config:
        name: str = "torch"

    def __init__(self, config: Config, impl: str, deterministic: bool = False) -> None:
        """`impl` is for kernels; this backend has none."""
        if deterministic:
            raise BackendError(f"backend=torch {NO_BITS}; use backend=fa4")
        self.served: dict[str, str] = {}

    def refuse(self, shape: AttentionShape, mode: str, window: int | None, device: torch.device, phase: str) -> Reason:
        return None

    def plan(self, metadata: AttentionMetadata, shape: AttentionShape, phase: str) -> TorchPlan:
        self.served[phase] = self.name
        table, page_size = metadata.page_table.long(), shape.page_size
        width = metadata.max_length or table.shape[1] * page_size
        position = torch.arange(width, device=table.device)
        pages = table[:, (position // page_size).clamp(max=table.shape[1] - 1)].clamp(min=0)
        visible = kernels.visible_keys(metadata, shape.num_nodes, width)[:, None]
        unwritten = ~kernels.stored_keys(metadata, shape.num_nodes, width)[..., None, None]
        return TorchPlan(metadata, pages * page_size + position % page_size, visible, unwritten)

    def run(self, plan: TorchPlan, layer: LayerInputs) -> Tensor:
        from algorithms.models.layers import plain_attention

        q, factors = layer.q, layer.scales or (None, None)
        halves = (_gathered(half, plan.slots, q.dtype, factor) for half, factor in zip(layer.kv, factors, strict=True))
        keys, values = (half.masked_fill(plan.unwritten, 0.0) for half in halves)
        metadata = plan.metadata
        result = plain_attention(q, keys, values, plan.visible, metadata.scale, metadata.soft_cap, layer.sinks)
        # A query that sees nothing (a padded row) comes out as NaN.
        return result.masked_fill(~plan.visible.any(-1).transpose(1, 2)[..., None], 0.0)


def _gathered(half: Tensor, slots: Tensor, dtype: torch.dtype, factor: Tensor | None) -> Tensor:
    """The keys or values [B, S, H_kv, D] at `slots`, times `factor [H_kv]`. torch gathers no float8, but its bytes."""
    flat = half.flatten(0, 1)
    if flat.dtype == dtype:
        return flat[slots]
    found = flat.view(torch.uint8)[slots].view(flat.dtype).to(dtype)
    return found if factor is None else found * factor[:, None].to(dtype)
