"""Public functions of paged attention: what their arguments must be, and which implementation runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specdec_kernels.attention.configs import AttentionConfig, attention_config, bounded_splits
from specdec_kernels.attention.types import (
    MODES,
    AttentionMetadata,
    AttentionShape,
    LayerScales,
    WorkList,
    WorkShape,
)
from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import current_chip, dispatch

_WORD_BITS = 64
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    sinks: torch.Tensor | None = None,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    work_list: WorkList | None = None,
    split_tokens: int | None = None,
    tuning: Mapping[str, Any] | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Attention of N query rows per request over its paged keys and values.

    `AttentionMetadata` says who sees whom. Decoding is N = 1; prefill is `mode="chain"` with L tokens already stored (0
    for a new request). Every slot below the last key must hold finite numbers, seen or not: its weight is zero, and
    zero times NaN is NaN. The last key is at L + q_lens - 1, with `tree_width` at L + tree_width - 1.

    Args:
        q: [B, N, H, D], D a multiple of 16 up to 256, H a multiple of H_kv. Contiguous.
        kv: [2, pages, page_size, H_kv, D] keys then values of one layer, dtype of q or float8_e4m3fn (finite
            codes only); the draft is already stored in it. Pages of 1 to 256 tokens.
        metadata: what the layers of the forward share.
        sinks: [H] float32 logits that enter each row's denominator and carry no value.
        k_scale, v_scale: multiply stored keys and values, a number or [H_kv] float32.
        work_list: the result of `plan_attention` for the same shape.
        split_tokens: keys a program works on before partial results are merged, default from the static
            table; doubled for long requests, see `configs`.
        tuning: fields of `configs.AttentionConfig` that replace the static table's.

    Returns:
        out [B, N, H, D] in q's dtype. The result of a request depends on no other request of the batch, to the bit.

    Raises:
        ValueError: a shape, dtype, device, layout or option does not fit; the message names expected and
            actual.
    """
    call = _checked(q, kv, metadata, LayerScales(sinks, k_scale, v_scale), work_list, split_tokens, tuning)
    return dispatch("paged_attention", __package__, impl, q)(*call)


def paged_attention_with_lse(
    q: torch.Tensor,
    kv: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    sinks: torch.Tensor | None = None,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    work_list: WorkList | None = None,
    split_tokens: int | None = None,
    tuning: Mapping[str, Any] | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention`, and the log-sum-exp (natural logarithm) of each row's scores, its sink included: (out,
    lse [B, N, H] float32, float64 for float64 input)."""
    call = _checked(q, kv, metadata, LayerScales(sinks, k_scale, v_scale), work_list, split_tokens, tuning)
    return dispatch("paged_attention_with_lse", __package__, impl, q)(*call)


def plan_attention(
    metadata: AttentionMetadata,
    shape: AttentionShape,
    *,
    split_tokens: int | None = None,
    tuning: Mapping[str, Any] | None = None,
    impl: str = "auto",
) -> WorkList:
    """The work list for `paged_attention` calls with `metadata`, made on the device without reading a length back, so
    that it can be captured with them.

    Args:
        metadata, split_tokens, tuning: as the calls have them.
        shape: `AttentionShape.of(q, kv)` of the calls.

    Returns:
        WorkList; a call of another shape refuses it.

    Raises:
        ValueError: a shape, dtype or option does not fit; the message names expected and actual.
    """
    _check_plan(metadata, shape)
    work, _ = _divide(metadata, shape, split_tokens, tuning)
    return dispatch("plan_attention", __package__, impl, metadata.lengths, kernel="kernel_plan")(metadata, work)


def plan_levels(
    metadata: AttentionMetadata,
    shape: AttentionShape,
    num_levels: int,
    *,
    length_step: int = 0,
    width_step: int = 0,
    split_tokens: int | None = None,
    tuning: Mapping[str, Any] | None = None,
    impl: str = "auto",
) -> tuple[WorkList, ...]:
    """The work lists of calls that a drafter makes one after another, in one launch.

    Args:
        metadata: of the first call. Call l has lengths + l * `length_step`, tree_width + l * `width_step`, and the rest
            unchanged.
        shape: `AttentionShape.of(q, kv)` of every call.
        num_levels: number of calls, at least 1.
        length_step: at least 0.
        width_step: at least 0; 0 without a tree_width.
        split_tokens, tuning: as the calls have them.

    Returns:
        A WorkList for each call, as `plan_attention` makes it.

    Raises:
        ValueError: a shape, dtype or option does not fit; the message names expected and actual.
    """
    _check_plan(metadata, shape)
    expect_at_least_one(num_levels=num_levels)
    if min(length_step, width_step) < 0 or (width_step and metadata.tree_width is None):
        raise ValueError(
            "length_step, width_step: expected at least 0, and width_step with a tree_width only, got "
            f"{length_step} and {width_step} with tree_width {metadata.tree_width}"
        )
    width = metadata.tree_width
    widths = [None if width is None else width + level * width_step for level in range(num_levels)]
    works = [_divide(metadata._replace(tree_width=each), shape, split_tokens, tuning)[0] for each in widths]
    plan = dispatch("plan_levels", __package__, impl, metadata.lengths, kernel="kernel_plan")
    if len({work.num_splits > 1 for work in works}) == 1:
        return plan(metadata, works, length_step, width_step)
    # A short window may let the first levels do without splits; they are planned by another variant of the kernel.
    lengths = [metadata.lengths + level * length_step for level in range(num_levels)]
    return tuple(
        plan(metadata._replace(lengths=each), (work,), 0, 0)[0] for each, work in zip(lengths, works, strict=True)
    )


def _check_plan(metadata: AttentionMetadata, shape: AttentionShape) -> None:
    check_mode(metadata)
    expect_at_least_one(num_nodes=shape.num_nodes, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
    check_lengths(metadata)
    if shape.heads < 1 or shape.heads % shape.kv_heads:
        raise ValueError(f"heads: expected a multiple of kv_heads {shape.kv_heads}, got {shape.heads}")


def _checked(
    q: torch.Tensor,
    kv: torch.Tensor,
    metadata: AttentionMetadata,
    scales: LayerScales,
    work_list: WorkList | None,
    split_tokens: int | None,
    tuning: Mapping[str, Any] | None,
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, LayerScales, WorkShape, AttentionConfig, WorkList | None]:
    """Arguments of both implementations, every default filled in; raises ValueError where one does not fit."""
    _check_pool(q, kv, metadata)
    check_draft(q, metadata)
    _check_depths(q, metadata)
    filled = metadata._replace(
        scale=q.shape[3] ** -0.5 if metadata.scale is None else metadata.scale,
        row_depths=metadata.depths if metadata.row_depths is None else metadata.row_depths,
    )
    _check_scales(q, kv.shape[3], filled, scales)
    work, config = _divide(metadata, AttentionShape.of(q, kv), split_tokens, tuning)
    if work_list is not None and work_list.shape != work:
        differences = [
            f"{name} {ours} in the call, {theirs} in the list"
            for name, ours, theirs in zip(WorkShape._fields, work, work_list.shape, strict=True)
            if ours != theirs
        ]
        raise ValueError(f"work_list: expected the list of a call of this shape, got {'; '.join(differences)}")
    k_scale, v_scale = (x if isinstance(x, torch.Tensor) else float(x) for x in (scales.k_scale, scales.v_scale))
    return q, kv, filled, LayerScales(scales.sinks, k_scale, v_scale), work, config, work_list


def _divide(
    metadata: AttentionMetadata, shape: AttentionShape, split_tokens: int | None, tuning: Mapping[str, Any] | None
) -> tuple[WorkShape, AttentionConfig]:
    """How the work of a call on the device of `metadata` is divided."""
    max_length = bounded_length(metadata, shape.page_size)
    expect_at_least_one(split_tokens=split_tokens)
    group, num_slots = shape.heads // shape.kv_heads, metadata.tree_width or shape.num_nodes
    chip, rows, kv_bytes = current_chip(metadata.lengths), shape.num_nodes * group, shape.kv_dtype.itemsize
    config = attention_config(chip, shape.head_dim, rows, max_length, split_tokens, kv_bytes, tuning)
    itemsize = shape.dtype.itemsize
    bound = bounded_splits(config.max_splits, shape.num_nodes * shape.heads, shape.head_dim, itemsize)
    tokens, window = config.split_tokens, metadata.window
    # One more split where a window begins inside one; the last split takes a quarter of a split more.
    reach = max_length if window is None else min(max_length, window - 1 + num_slots + tokens)
    most = bound if window is None or bound == 1 else bound + 1
    num_splits = min(most, -(-(reach - tokens // 4) // tokens))
    work = WorkShape(
        batch=len(metadata.lengths),
        num_nodes=shape.num_nodes,
        group=group,
        num_slots=num_slots,
        all_slots=metadata.tree_width is not None,
        max_length=max_length,
        window=window,
        block_m=config.block_m,
        split_tokens=tokens,
        first_splits=config.first_splits,
        max_splits=bound,
        num_splits=max(1, num_splits),
    )
    return work, config


def bounded_length(metadata: AttentionMetadata, page_size: int) -> int:
    """`max_length` of a call: at most what the page table holds."""
    capacity = metadata.page_table.shape[1] * page_size
    max_length = capacity if metadata.max_length is None else min(metadata.max_length, capacity)
    expect_at_least_one(max_length=max_length)
    return max_length


def expect_at_least_one(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name}: expected at least 1, got {number}")


def check_mode(metadata: AttentionMetadata) -> None:
    """Options that describe the shape of the draft."""
    mode, tree_width = metadata.mode, metadata.tree_width
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if tree_width is not None and mode != "tree":
        raise ValueError(f"tree_width: expected with mode 'tree' only, got mode {mode!r} and {tree_width}")
    expect_at_least_one(tree_width=tree_width, window=metadata.window)


def check_lengths(metadata: AttentionMetadata) -> None:
    """Page table, lengths and rows in use."""
    page_table, lengths, q_lens = metadata.page_table, metadata.lengths, metadata.q_lens
    expect_shape("lengths", lengths, (None,))
    expect_dtype("lengths", lengths, torch.int64)
    expect_shape("page_table", page_table, (len(lengths), None))
    expect_dtype("page_table", page_table, torch.int32)
    if page_table.shape[1] > 1 and page_table.stride(1) != 1:
        raise ValueError(f"page_table: expected rows of adjacent entries, got strides {page_table.stride()}")
    if q_lens is not None:
        expect_shape("q_lens", q_lens, (len(lengths),))
        expect_dtype("q_lens", q_lens, torch.int32)
    expect_same_device(page_table=page_table, lengths=lengths, q_lens=q_lens)
    expect_contiguous(lengths=lengths, q_lens=q_lens)


def _check_pool(q: torch.Tensor, kv: torch.Tensor, metadata: AttentionMetadata) -> None:
    """Shapes and types of queries, pool, page table and lengths."""
    expect_shape("q", q, (None, None, None, None))
    batch, _, heads, head_dim = q.shape
    expect_shape("kv", kv, (2, None, None, None, head_dim))
    expect_shape("lengths", metadata.lengths, (batch,))
    check_lengths(metadata)
    expect_dtype("q", q, *_FLOATS)
    expect_dtype("kv", kv, q.dtype, torch.float8_e4m3fn)
    if kv.shape[3] == 0 or heads % kv.shape[3]:
        raise ValueError(f"q: expected heads in a multiple of kv's {kv.shape[3]}, got {heads}")
    if (problem := AttentionShape.of(q, kv).problem) is not None:
        raise ValueError(f"q, kv: {problem}")
    expect_same_device(q=q, kv=kv, lengths=metadata.lengths)
    expect_contiguous(q=q, kv=kv)


def check_draft(q: torch.Tensor, metadata: AttentionMetadata) -> None:
    """The mode, and the mask words of the query rows q [B, N, ...], which a tree has and no other mode."""
    check_mode(metadata)
    mode, mask = metadata.mode, metadata.mask
    if (mask is not None) != (mode == "tree"):
        raise ValueError(f"mask: expected with mode 'tree' only, got mode {mode!r} and {type(mask).__name__}")
    if mask is not None:
        words = -(-(metadata.tree_width or q.shape[1]) // _WORD_BITS)
        expect_shape("mask", mask, (*q.shape[:2], words))
        expect_dtype("mask", mask, torch.int64)
        expect_same_device(q=q, mask=mask)
        expect_contiguous(mask=mask)


def _check_depths(q: torch.Tensor, metadata: AttentionMetadata) -> None:
    """Depths of slots and rows, which a tree with a window has."""
    batch, num_nodes = q.shape[:2]
    mode, window, depths, row_depths = metadata.mode, metadata.window, metadata.depths, metadata.row_depths
    num_slots = metadata.tree_width or num_nodes
    wanted = mode == "tree" and window is not None
    if wanted and depths is None:
        raise ValueError("depths: expected with mode 'tree' and a window, got None")
    if not wanted and (depths is not None or row_depths is not None):
        raise ValueError(f"depths: expected with mode 'tree' and a window only, got mode {mode!r}, window {window}")
    if depths is not None:
        expect_shape("depths", depths, (batch, num_slots))
        expect_dtype("depths", depths, torch.int32)
        if row_depths is None and num_slots != num_nodes:
            raise ValueError(f"row_depths: expected where tree_width {num_slots} is not the {num_nodes} rows, got None")
    if row_depths is not None:
        expect_shape("row_depths", row_depths, (batch, num_nodes))
        expect_dtype("row_depths", row_depths, torch.int32)
    expect_same_device(q=q, depths=depths, row_depths=row_depths)
    expect_contiguous(depths=depths, row_depths=row_depths)


def _check_scales(q: torch.Tensor, kv_heads: int, metadata: AttentionMetadata, scales: LayerScales) -> None:
    """Numbers and tensors that scale the scores and values."""
    for number, value in dict(scale=metadata.scale, soft_cap=metadata.soft_cap).items():
        if value is not None and value <= 0:
            raise ValueError(f"{number}: expected a positive number, got {value}")
    wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, scale in scales._asdict().items():
        if isinstance(scale, torch.Tensor):
            expect_shape(name, scale, (q.shape[2] if name == "sinks" else kv_heads,))
            expect_dtype(name, scale, wanted)
            expect_same_device(q=q, **{name: scale})
            expect_contiguous(**{name: scale})
        elif name == "k_scale" and scale <= 0:
            raise ValueError(f"k_scale: expected a positive number, got {scale}")
