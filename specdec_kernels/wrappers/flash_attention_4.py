"""The real FlashAttention-4 (`flash_attn.cute`) for prefill, decode, chain and block calls, and for trees in two parts.

    chain, block   one `flash_attn_varlen_func` over the page table: `seqused_q` rows and L + q_len keys, aligned at the
                   end, causal or not, `window_size` = (window - 1, open)
    tree           the prefix without a mask through FlashAttention-4, the draft slots with their bit mask through
                   `paged_attention` as a pool of one-token pages, merged by log-sum-exp. Exact, and no mask is ever
                   evaluated over the prefix, which is what the package's `mask_mod` would do
    sinks          folded in by log-sum-exp, which serves both routes

What it cannot do here: float32 or fp8 (fp8 exists on compute capability 10 only), page tables on other chips than
9.x and 10.x, a window over a tree (it goes by depth, the package counts slots), and splitting keys on 9.x, which is
why decode and verify of few requests are slow there: `num_splits` must be 1, the automatic choice asserts.

Written against flash-attn-4 4.0.0b36 (`flash_attn/cute/interface.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from specdec_kernels.wrappers import contract
from specdec_kernels.wrappers.contract import AttentionCall, Needs, Unsupported

if TYPE_CHECKING:
    import torch

PACKAGE = "flash-attn-4"
_PAGED_CHIPS = (9, 10)


@dataclass(eq=False)
class FlashAttentionPlan:
    """Arguments of the package's call but q, k and v; with `draft` also those of the second part of a tree."""

    call: AttentionCall
    arguments: dict[str, Any]
    draft: dict[str, Any] | None


class FlashAttention4:
    """See `specdec_kernels.wrappers`."""

    name = "flash_attention_4"

    def __init__(self, impl: str = "auto") -> None:
        """`impl` is for the project's own kernels: index arrays, and the draft part of a tree."""
        self._impl = impl

    @staticmethod
    def available() -> str | None:
        """See `AttentionWrapper`."""
        return contract.no_device() or contract.missing("flash_attn.cute", PACKAGE)

    def refusal(self, needs: Needs) -> str | None:
        """See `AttentionWrapper`."""
        if reason := self.available():
            return reason
        chip = contract.capability(needs.device)
        if chip is None or chip[0] not in _PAGED_CHIPS:
            return f"it reads page tables on compute capability 9.x and 10.x only, {needs.device} has {chip}"
        if reason := contract.half_precision_only(needs):
            return reason
        if needs.mode == "tree" and needs.window is not None:
            return "a window over a tree goes by depth, it counts slots"
        return _head_dim_refusal(needs.head_dim, chip[0])

    def plan(self, call: AttentionCall) -> FlashAttentionPlan:
        """See `AttentionWrapper`. Reads nothing back."""
        import torch

        from specdec_kernels.kv_index import flash_attention_table

        if reason := self.refusal(call.needs):
            raise Unsupported(f"flash_attention_4: {reason}")
        tree, used = call.mode == "tree", call.used_rows()
        keys = call.lengths if tree else call.lengths + used
        pages = flash_attention_table(call.page_table.contiguous(), keys, call.page_size, impl=self._impl)
        arguments = dict(
            seqused_q=None if call.q_lens is None else used.to(torch.int32),
            seqused_k=pages.seqused_k,
            page_table=pages.page_table,
            max_seqlen_q=call.num_queries,
            max_seqlen_k=min(call.max_length, call.page_table.shape[1] * call.page_size),
            softmax_scale=call.softmax_scale,
            causal=call.mode == "chain",
            window_size=(None if call.window is None else call.window - 1, None),
            softcap=call.soft_cap or 0.0,
            num_splits=1,
            return_lse=True,
        )
        return FlashAttentionPlan(call, arguments, self._draft(call) if tree else None)

    def run(self, planned: FlashAttentionPlan, q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionWrapper`."""
        import torch

        from specdec_kernels.attention import paged_attention
        from specdec_kernels.wrappers.states import add_sinks, merge_states

        call = planned.call
        out, lse = import_module("flash_attn.cute").flash_attn_varlen_func(q, kv[0], kv[1], **planned.arguments)
        lse = lse.transpose(1, 2)
        unseen = torch.arange(call.num_queries, device=q.device) >= call.used_rows()[:, None]
        if planned.draft is not None:
            # Rows without a prefix have seen nothing yet, whatever the package leaves in them.
            lse = lse.masked_fill((unseen | (call.lengths == 0)[:, None])[..., None], float("-inf"))
            tokens = kv.view(2, -1, 1, *kv.shape[3:])
            part, part_lse = paged_attention(q, tokens, **planned.draft, return_lse=True, impl=self._impl)
            out, lse = merge_states(out, lse, part, part_lse)
        if call.sinks is not None:
            out, lse = add_sinks(out, lse, call.sinks)
        return out.masked_fill(unseen[..., None, None], 0.0), lse.masked_fill(unseen[..., None], float("-inf"))

    def _draft(self, call: AttentionCall) -> dict[str, Any]:
        """The draft slots as requests of their own: no prefix, one token a page, so they may begin anywhere."""
        import torch

        from specdec_kernels.kv_index import token_slots

        width = call.num_queries if call.tree_width is None else call.tree_width
        table = call.page_table.contiguous()
        slots = token_slots(table, call.lengths, call.drafted(), width, call.page_size, impl=self._impl)
        extent = {} if call.tree_width is None else {"tree_width": width}
        return dict(
            page_table=slots.clamp(min=0).to(torch.int32),
            lengths=torch.zeros_like(call.lengths),
            mode="tree",
            mask=call.mask,
            q_lens=call.q_lens,
            scale=call.softmax_scale,
            **({} if call.soft_cap is None else {"soft_cap": call.soft_cap}),
            **extent,
        )


def _head_dim_refusal(head_dim: int, major: int) -> str | None:
    most = 256 if major == 9 else 128
    if 8 <= head_dim <= most and head_dim % 8 == 0:
        return None
    return f"on compute capability {major}.x it takes multiples of 8 up to {most} as head dimension, got {head_dim}"
