"""Paged attention over a committed prefix plus a draft block: decode, chain, block and tree verification, and
prefill.

The keys of a request are its committed tokens at positions [0, L) followed by its draft slots at positions
L + j, whatever the shape of the draft: who sees whom inside the draft is a mode or a bit mask, never a
layout. So any page size works for any tree, and the mask is only as large as the draft.

`plan_attention` makes the work list of a step once, on the device; every layer of the same shape then passes
it. `specdec_kernels.attention.warmup` compiles ahead what a model will need.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, overload

import torch

from specdec_kernels.attention import reference, validate
from specdec_kernels.attention.configs import AttentionConfig, attention_config
from specdec_kernels.attention.types import AttentionPlan, PlanShape
from specdec_kernels.checks import expect_dtype, expect_shape
from specdec_kernels.launch import current_chip, use_triton

__all__ = ["AttentionPlan", "paged_attention", "plan_attention", "warmup"]


@overload
def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    mode: str,
    mask: torch.Tensor | None = None,
    tree_width: int | None = None,
    q_lens: torch.Tensor | None = None,
    window: int | None = None,
    depths: torch.Tensor | None = None,
    row_depths: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    max_length: int | None = None,
    split_tokens: int | None = None,
    plan: AttentionPlan | None = None,
    tuning: Mapping[str, Any] | None = None,
    return_lse: Literal[False] = False,
    impl: str = "auto",
) -> torch.Tensor: ...


@overload
def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    mode: str,
    mask: torch.Tensor | None = None,
    tree_width: int | None = None,
    q_lens: torch.Tensor | None = None,
    window: int | None = None,
    depths: torch.Tensor | None = None,
    row_depths: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    max_length: int | None = None,
    split_tokens: int | None = None,
    plan: AttentionPlan | None = None,
    tuning: Mapping[str, Any] | None = None,
    return_lse: Literal[True],
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    mode: str,
    mask: torch.Tensor | None = None,
    tree_width: int | None = None,
    q_lens: torch.Tensor | None = None,
    window: int | None = None,
    depths: torch.Tensor | None = None,
    row_depths: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    max_length: int | None = None,
    split_tokens: int | None = None,
    plan: AttentionPlan | None = None,
    tuning: Mapping[str, Any] | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of N query rows a request over its paged keys and values.

    Query row i stands at slot L + i and sees the prefix [0, L) and, of the draft, slot L + j when
    `mode="chain"`: j <= i; `mode="block"`: j < q_lens; `mode="tree"`: bit j of the row's mask words is set.
    Decoding is N = 1; prefill is `chain` with L tokens already stored (0 for a new request).

    Every slot below the last key must hold finite numbers, seen or not: its weight is zero, and zero times
    NaN is NaN. The last key is at L + q_lens - 1, with `tree_width` at L + tree_width - 1.

    Args:
        q: [B, N, H, D], D a multiple of 16 up to 256, H a multiple of H_kv. Contiguous.
        kv: [2, pages, page_size, H_kv, D] keys then values of one layer, dtype of q or float8_e4m3fn (finite
            codes only); the draft is already stored in it. Pages of 1 to 256 tokens.
        page_table: [B, P] int32; entries past the last used page are never read as page numbers.
        lengths: [B] int64 committed lengths L, without the draft.
        mask: [B, N, ceil(M / 64)] int64 words, only with `mode="tree"`; bit j of row i: the row sees slot j.
        tree_width: M draft slots behind L that the mask describes. Rows may then be any nodes of the draft,
            fewer or in another order than the slots. Default: row i is slot i, and M = N.
        q_lens: [B] int32 rows in use, default N for all. Rows past it are zeros with lse -inf.
        window: a key is seen only if position of the row - position of the key < window. Slot j stands at
            position L + j, in a tree at L + depth.
        depths: [B, M] int32 depth of each draft slot, only with `mode="tree"` and a window.
        row_depths: [B, N] int32 depth of each query row, default `depths`; needed where M is not N.
        sinks: [H] float32 logits that enter each row's denominator and carry no value.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap).
        scale: multiplies q . k, default D ** -0.5.
        k_scale, v_scale: multiply stored keys and values, a number or [H_kv] float32.
        max_length: host-side bound on the last key's position + 1, default P * page_size. Sizes the launch; a
            longer request is cut.
        split_tokens: keys a program works on before partial results are merged, default from the static
            table; doubled for long requests, see `configs`.
        plan: the work list of `plan_attention` for the same shape.
        tuning: fields of `configs.AttentionConfig` that replace the static table's.
        return_lse: also return the log-sum-exp (natural logarithm) of each row's scores, its sink included.

    Returns:
        out [B, N, H, D] in q's dtype, and with `return_lse` also lse [B, N, H] float32 (float64 for float64
        input). The result of a request depends on no other request of the batch, to the bit.

    Raises:
        ValueError: a shape, dtype, device, layout or option does not fit; the message names expected and
            actual.
    """
    validate.check_mode(mode, tree_width, window)
    validate.check_pool(q, kv, page_table, lengths)
    batch, num_nodes, heads, head_dim = q.shape
    num_slots = num_nodes if tree_width is None else tree_width
    scale = head_dim**-0.5 if scale is None else scale
    validate.check_q_lens(batch, q_lens, lengths)
    validate.check_tree(q, mode, mask, num_slots, window, depths, row_depths)
    validate.check_scales(q, kv.shape[3], scale, soft_cap, sinks, k_scale, v_scale)
    capacity = page_table.shape[1] * kv.shape[2]
    shape, config = _shape_and_config(
        q,
        (batch, num_nodes, heads, kv.shape[3], head_dim),
        kv.element_size(),
        capacity if max_length is None else min(max_length, capacity),
        tree_width,
        window,
        split_tokens,
        tuning,
    )
    if plan is not None:
        validate.check_plan(plan, shape)
    options: dict[str, Any] = dict(
        mode=mode,
        mask=mask,
        q_lens=q_lens,
        depths=depths,
        row_depths=depths if row_depths is None else row_depths,
        sinks=sinks,
        k_scale=k_scale if isinstance(k_scale, torch.Tensor) else float(k_scale),
        v_scale=v_scale if isinstance(v_scale, torch.Tensor) else float(v_scale),
        scale=scale,
        soft_cap=soft_cap,
        return_lse=return_lse,
        shape=shape,
    )
    if use_triton(impl, q):
        from specdec_kernels.attention import kernel

        return kernel.paged_attention(q, kv, page_table, lengths, **options, config=config, plan=plan)
    return reference.paged_attention(q, kv, page_table, lengths, **options)


def plan_attention(
    lengths: torch.Tensor,
    *,
    num_nodes: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_length: int,
    kv_bytes: int = 2,
    q_lens: torch.Tensor | None = None,
    mode: str = "chain",
    tree_width: int | None = None,
    window: int | None = None,
    split_tokens: int | None = None,
    tuning: Mapping[str, Any] | None = None,
    impl: str = "auto",
) -> AttentionPlan:
    """The work list of a step for `paged_attention` calls of one shape, made on the device without reading a
    length back, so that it can be captured with them.

    Args:
        lengths: [B] int64 committed lengths, those of the calls.
        num_nodes, heads, kv_heads, head_dim: N, H, H_kv, D of the calls.
        max_length: as the calls have it, at most their page table's capacity.
        kv_bytes: bytes of a stored key element.
        q_lens, mode, tree_width, window, split_tokens, tuning: as the calls have them.

    Returns:
        AttentionPlan; a call of another shape refuses it.

    Raises:
        ValueError: a shape, dtype or option does not fit; the message names expected and actual.
    """
    validate.check_mode(mode, tree_width, window)
    validate.at_least_one(num_nodes=num_nodes, kv_heads=kv_heads, head_dim=head_dim)
    expect_shape("lengths", lengths, (None,))
    expect_dtype("lengths", lengths, torch.int64)
    validate.check_q_lens(len(lengths), q_lens, lengths)
    if heads < 1 or heads % kv_heads:
        raise ValueError(f"heads: expected a multiple of kv_heads {kv_heads}, got {heads}")
    shape, _ = _shape_and_config(
        lengths,
        (len(lengths), num_nodes, heads, kv_heads, head_dim),
        kv_bytes,
        max_length,
        tree_width,
        window,
        split_tokens,
        tuning,
    )
    if use_triton(impl, lengths):
        from specdec_kernels.attention import plan

        return plan.plan_attention(lengths, q_lens, shape)
    return reference.plan_attention(lengths, q_lens, shape)


def _shape_and_config(
    on: torch.Tensor,
    sizes: tuple[int, int, int, int, int],
    kv_bytes: int,
    max_length: int,
    tree_width: int | None,
    window: int | None,
    split_tokens: int | None,
    tuning: Mapping[str, Any] | None,
) -> tuple[PlanShape, AttentionConfig]:
    """How the work of a call on the device of `on` is cut; `sizes` = (B, N, H, H_kv, D)."""
    batch, num_nodes, heads, kv_heads, head_dim = sizes
    validate.at_least_one(max_length=max_length, split_tokens=split_tokens)
    group = heads // kv_heads
    num_slots = num_nodes if tree_width is None else tree_width
    config = attention_config(current_chip(on), head_dim, num_nodes * group, max_length, split_tokens, kv_bytes, tuning)
    tokens = config.split_tokens
    # A split more where a window begins inside one; the last split takes a quarter of a split more.
    reach = max_length if window is None else min(max_length, window - 1 + num_slots + tokens)
    most = config.max_splits if window is None else config.max_splits + 1
    num_splits = min(most, -(-(reach - tokens // 4) // tokens))
    shape = PlanShape(
        batch,
        num_nodes,
        group,
        num_slots,
        tree_width is not None,
        max_length,
        window,
        config.block_m,
        tokens,
        config.first_splits,
        config.max_splits,
        max(1, num_splits),
    )
    return shape, config


from specdec_kernels.attention.warmup import warmup  # noqa: E402  (it calls the functions above)
