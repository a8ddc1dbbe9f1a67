"""The real FlashAttention-4 (`flash_attn.cute`) for prefill, decode, chain and block calls, and for trees in two parts.

    chain, block   one `flash_attn_varlen_func` over the page table: `seqused_q` rows and L + q_len keys, aligned at the
                   end, causal or not, `window_size` = (window - 1, open)
    tree           the prefix without a mask through FlashAttention-4, the draft slots with their bit mask through
                   `paged_attention` as a pool of one-token pages, merged by log-sum-exp, which is exact
    sinks          folded in by log-sum-exp, which serves both routes

The package compiles a kernel for the first call of a kind and reads lengths on the device, so a call can be captured
after a warm-up has made it once. Not supported: float32 and fp8, page tables on other chips than 9.x and 10.x, and a
window over a tree, which goes by depth while the package counts slots. It splits no keys on 9.x, where the automatic
choice of `num_splits` asserts. Written against flash-attn-4 4.0.0b36 (`flash_attn/cute/interface.py`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import specdec_kernels as kernels
from algorithms.attention.backends import packages
from algorithms.attention.backends.packages import add_sinks, merge_states
from algorithms.attention.backends.protocol import BackendError, LayerInputs, Reason
from algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_kernels import AttentionMetadata, AttentionShape

_PAGED_CHIPS = (9, 10)


class FlashAttentionPlan(NamedTuple):
    """Arguments of the package's call but q, k and v."""

    metadata: AttentionMetadata
    arguments: dict[str, Any]
    draft: AttentionMetadata | None


class FlashAttention4(packages.PackageBackend):
    """See `Backend`. Configurations reach it through `backend.dispatch` of `fa4`."""

    name, package, module = "flash_attention_4", "flash-attn-4", "flash_attn.cute"

    def __init__(self, impl: str = "auto") -> None:
        """`impl` is for the project's own kernels: index arrays, and the draft part of a tree."""
        self.served: dict[str, str] = {}
        self._impl = impl

    def refuse(self, shape: AttentionShape, mode: str, window: int | None, device: torch.device, phase: str) -> Reason:
        if reason := self.unavailable():
            return reason
        chip = packages.capability(device)
        if chip is None or chip[0] not in _PAGED_CHIPS:
            return f"it reads page tables on compute capability 9.x and 10.x only, {device} has {chip}"
        if reason := packages.half_precision_only(shape):
            return reason
        if mode == "tree" and window is not None:
            return "a window over a tree goes by depth, and it counts slots"
        most = 256 if chip[0] == 9 else 128
        if 8 <= shape.head_dim <= most and shape.head_dim % 8 == 0:
            return None
        allowed = f"multiples of 8 up to {most} as head dimension"
        return f"on compute capability {chip[0]}.x it takes {allowed}, got {shape.head_dim}"

    def plan(self, metadata: AttentionMetadata, shape: AttentionShape, phase: str) -> FlashAttentionPlan:
        if reason := self.refuse(shape, metadata.mode, metadata.window, metadata.lengths.device, phase):
            raise BackendError(f"flash_attention_4: {reason}")
        self.served[phase] = self.name
        tree, used = metadata.mode == "tree", metadata.used_rows(shape.num_nodes).to(torch.int32)
        keys = metadata.lengths if tree else metadata.lengths + used
        table, page_size = metadata.page_table.contiguous(), shape.page_size
        pages = kernels.flash_attention_table(table, keys, page_size, impl=self._impl)
        capacity = table.shape[1] * page_size
        arguments = dict(
            seqused_q=None if metadata.q_lens is None else used,
            seqused_k=pages.seqused_k,
            page_table=pages.page_table,
            max_seqlen_q=shape.num_nodes,
            max_seqlen_k=min(metadata.max_length or capacity, capacity),
            softmax_scale=shape.head_dim**-0.5 if metadata.scale is None else metadata.scale,
            causal=metadata.mode == "chain",
            window_size=(None if metadata.window is None else metadata.window - 1, None),
            softcap=metadata.soft_cap or 0.0,
            num_splits=1,
        )
        return FlashAttentionPlan(metadata, arguments, self._draft(metadata, shape) if tree else None)

    def run_with_lse(
        self, plan: FlashAttentionPlan, q: Tensor, kv: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`run`, and lse [B, N, H] float32, natural logarithm, sinks included; -inf for rows past `q_lens`."""
        metadata, unused = plan.metadata, _unused(plan.metadata, q)
        out, lse = self._attend(plan, q, kv, with_lse=True)
        assert lse is not None
        if plan.draft is not None:
            # Rows without a prefix have seen nothing yet; the package leaves them unwritten.
            lse = lse.masked_fill((unused | (metadata.lengths == 0)[:, None])[..., None], float("-inf"))
            tokens = kv.view(2, -1, 1, *kv.shape[3:])
            draft = kernels.paged_attention_with_lse(q, tokens, plan.draft, impl=self._impl)
            out, lse = merge_states(out, lse, *draft)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        return out.masked_fill(unused[..., None, None], 0.0), lse.masked_fill(unused[..., None], float("-inf"))

    def run(self, plan: FlashAttentionPlan, layer: LayerInputs) -> Tensor:
        if layer.sinks is not None or plan.draft is not None:
            return super().run(plan, layer)
        result = self._attend(plan, layer.q, layer.kv, with_lse=False)[0]
        return result.masked_fill(_unused(plan.metadata, layer.q)[..., None, None], 0.0)

    def _attend(self, plan: FlashAttentionPlan, q: Tensor, kv: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """The package's part of a call: of a tree the prefix. Rows that are not in use hold anything."""
        attention = import_module("flash_attn.cute").flash_attn_varlen_func
        out, lse = attention(q, kv[0], kv[1], **plan.arguments, return_lse=with_lse)
        return out, lse.transpose(1, 2) if with_lse else None

    def _draft(self, metadata: AttentionMetadata, shape: AttentionShape) -> AttentionMetadata:
        """The draft slots as requests without a prefix, with one token per page, so they may begin anywhere."""
        width = metadata.tree_width or shape.num_nodes
        table, used = metadata.page_table.contiguous(), metadata.used_slots(shape.num_nodes).to(torch.int32)
        slots = kernels.token_slots(table, metadata.lengths, used, width, shape.page_size, impl=self._impl)
        pages, no_prefix = slots.clamp(min=0).to(torch.int32), torch.zeros_like(metadata.lengths)
        return metadata._replace(page_table=pages, lengths=no_prefix, max_length=None)


def _unused(metadata: AttentionMetadata, q: Tensor) -> Tensor:
    """[B, N] bool: rows of q past `q_lens`."""
    return torch.arange(q.shape[1], device=q.device) >= metadata.used_rows(q.shape[1])[:, None]
