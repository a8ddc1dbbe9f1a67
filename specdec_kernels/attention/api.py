"""Public functions of paged attention: what their arguments must be, and which implementation runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specdec_kernels.attention import configs
from specdec_kernels.attention.configs import AttentionConfig, attention_config, bounded_splits, fixed_borders
from specdec_kernels.attention.types import (
    MODES,
    AttentionMetadata,
    AttentionShape,
    Cut,
    LayerScales,
    WorkList,
    WorkShape,
)
from specdec_kernels.checks import (
    expect_at_least,
    expect_choice,
    expect_contiguous,
    expect_dtype,
    expect_same_device,
    expect_shape,
)
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
    batch_invariant: bool = False,
    in_order: bool | None = None,
    out: torch.Tensor | None = None,
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
        split_tokens: fewest keys a program works on before partial results are merged, default from the static
            table; more where fewer splits fill the chip, see `configs`.
        tuning: fields of `configs.AttentionConfig` that replace the static table's.
        batch_invariant: cut the keys at fixed positions and use one tile for any number of rows, so that the bits of a
            row depend on its query and on the keys that it sees, and on nothing else: not on the number of rows, and
            not on whether a key is committed, in a chain or in a tree. A tree needs `metadata.paths`, whose order
            takes the place of depth as the position of a key.
        in_order: with `batch_invariant`, whether one program walks all splits of its rows, which needs no memory for
            partial results and changes no bit; default where the rows or the partial results are many, or where so
            many requests fill the chip.
        out: where to write the result, of the shape, dtype and device of q, contiguous; a new tensor by default.

    Returns:
        out [B, N, H, D] in q's dtype. The result of a request depends on how many requests there are, because that
        decides how keys are split, and on nothing else of the others.

    Raises:
        ValueError: a shape, dtype, device, layout or option does not fit; the message names expected and
            actual.
    """
    scales, cut = LayerScales(sinks, k_scale, v_scale), Cut(split_tokens, tuning, batch_invariant, in_order)
    call = _checked(q, kv, metadata, scales, work_list, cut)
    if out is not None:
        expect_shape("out", out, tuple(q.shape))
        expect_dtype("out", out, q.dtype)
        expect_same_device(q=q, out=out)
        expect_contiguous(out=out)
    return dispatch("paged_attention", __package__, impl, q)(*call, out)


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
    batch_invariant: bool = False,
    in_order: bool | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention`, and the log-sum-exp (natural logarithm) of each row's scores, its sink included: (out,
    lse [B, N, H] float32, float64 for float64 input)."""
    scales, cut = LayerScales(sinks, k_scale, v_scale), Cut(split_tokens, tuning, batch_invariant, in_order)
    call = _checked(q, kv, metadata, scales, work_list, cut)
    return dispatch("paged_attention_with_lse", __package__, impl, q)(*call)


def plan_attention(
    metadata: AttentionMetadata,
    shape: AttentionShape,
    *,
    split_tokens: int | None = None,
    tuning: Mapping[str, Any] | None = None,
    batch_invariant: bool = False,
    in_order: bool | None = None,
    impl: str = "auto",
) -> WorkList:
    """The work list for `paged_attention` calls with `metadata`, made on the device without reading a length back, so
    that it can be captured with them.

    Args:
        metadata, split_tokens, tuning, batch_invariant, in_order: as the calls have them.
        shape: `AttentionShape.of(q, kv)` of the calls.

    Returns:
        WorkList; a call of another shape refuses it.

    Raises:
        ValueError: a shape, dtype or option does not fit; the message names expected and actual.
    """
    _check_plan(metadata, shape)
    work, _ = _divide(metadata, shape, Cut(split_tokens, tuning, batch_invariant, in_order))
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
    cut = Cut(split_tokens, tuning)
    works = [_divide(metadata._replace(tree_width=each), shape, cut)[0] for each in widths]
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


def mask_paths(mask: torch.Tensor, most: int, *, impl: str = "auto") -> torch.Tensor:
    """The slots that each row of a tree sees in rising order. Parents have lower slots than their children, so this is
    the order of the text.

    Args:
        mask: [B, N, ceil(M / 64)] int64 words; bit j of row i: the row sees slot j. Contiguous.
        most: P, most slots that a row sees: the depth of the tree + 1.

    Returns:
        [B, N, P] int32, -1 behind the last slot. Slots past the first P are left out.

    Raises:
        ValueError: a shape, dtype, layout or option does not fit; the message names expected and actual.
    """
    expect_shape("mask", mask, (None, None, None))
    expect_dtype("mask", mask, torch.int64)
    expect_contiguous(mask=mask)
    expect_at_least_one(most=most, words=mask.shape[2])
    return dispatch("mask_paths", __package__, impl, mask, kernel="kernel_paths")(mask, most)


def _checked(
    q: torch.Tensor,
    kv: torch.Tensor,
    metadata: AttentionMetadata,
    scales: LayerScales,
    work_list: WorkList | None,
    cut: Cut,
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, LayerScales, WorkShape, AttentionConfig, WorkList | None]:
    """Arguments of both implementations, every default filled in; raises ValueError where one does not fit."""
    _check_pool(q, kv, metadata)
    check_draft(q, metadata)
    _check_depths(q, metadata)
    _check_paths(q, metadata, cut)
    filled = metadata._replace(
        scale=q.shape[3] ** -0.5 if metadata.scale is None else metadata.scale,
        row_depths=metadata.depths if metadata.row_depths is None else metadata.row_depths,
    )
    _check_scales(q, kv.shape[3], filled, scales)
    work, config = _divide(metadata, AttentionShape.of(q, kv), cut)
    if work_list is not None and work_list.shape != work:
        differences = [
            f"{name} {ours} in the call, {theirs} in the list"
            for name, ours, theirs in zip(WorkShape._fields, work, work_list.shape, strict=True)
            if ours != theirs
        ]
        raise ValueError(f"work_list: expected the list of a call of this shape, got {'; '.join(differences)}")
    k_scale, v_scale = (x if isinstance(x, torch.Tensor) else float(x) for x in (scales.k_scale, scales.v_scale))
    return q, kv, filled, LayerScales(scales.sinks, k_scale, v_scale), work, config, work_list


def _divide(metadata: AttentionMetadata, shape: AttentionShape, cut: Cut) -> tuple[WorkShape, AttentionConfig]:
    """How the work of a call on the device of `metadata` is divided."""
    max_length = bounded_length(metadata, shape.page_size)
    expect_at_least_one(split_tokens=cut.split_tokens)
    group, num_slots = shape.heads // shape.kv_heads, metadata.tree_width or shape.num_nodes
    chip, rows, kv_bytes = current_chip(metadata.lengths), shape.num_nodes * group, shape.kv_dtype.itemsize
    config = attention_config(
        chip, shape.head_dim, rows, max_length, cut.split_tokens, kv_bytes, cut.tuning, cut.batch_invariant,
        metadata.window, len(metadata.lengths) * shape.kv_heads,
    )  # fmt: skip
    if not cut.batch_invariant:
        config = configs.spread(config, len(metadata.lengths) * shape.kv_heads * -(-rows // config.block_m))
    work = WorkShape(
        batch=len(metadata.lengths),
        num_nodes=shape.num_nodes,
        group=group,
        num_slots=num_slots,
        all_slots=metadata.tree_width is not None,
        max_length=max_length,
        window=metadata.window,
        block_m=config.block_m,
        split_tokens=config.split_tokens,
        first_splits=config.first_splits,
        longest_split=config.longest_split,
        max_splits=config.max_splits,
        num_splits=1,
    )
    if cut.batch_invariant:
        work = _fixed_cut(work, metadata, shape, cut.in_order, config)
        if work.in_order and not cut.tuning:
            config = configs.in_order_config(chip, config, rows, shape.dtype.itemsize)
        return work._replace(block_m=config.block_m), config
    return _cut_by_length(work, shape), config


def _cut_by_length(work: WorkShape, shape: AttentionShape) -> WorkShape:
    """`work` with as many splits as a request of the greatest length has."""
    bound = bounded_splits(work.max_splits, shape.num_nodes * shape.heads, shape.head_dim, shape.dtype.itemsize)
    work, keys = work._replace(max_splits=bound), work.max_length
    if work.window is not None:
        # A window may begin behind the first key of its first split.
        keys = min(keys, work.window - 1 + work.num_slots + work.split_tokens // 8 - 1)
    return work._replace(num_splits=work.splits_of(keys))


def _fixed_cut(
    work: WorkShape,
    metadata: AttentionMetadata,
    shape: AttentionShape,
    in_order: bool | None,
    config: AttentionConfig,
) -> WorkShape:
    """`work` with splits at fixed positions."""
    if work.first_splits % 2:
        raise ValueError(f"tuning: expected an even number of first_splits, got {work.first_splits}")
    if metadata.paths is not None:
        if in_order:
            raise ValueError("in_order: expected None or False for a tree, whose nodes have splits of their own")
        work, in_order = work._replace(num_slots=metadata.paths.shape[2], all_slots=True), False
    num_splits = len(fixed_borders(work.max_length, work.split_tokens, work.first_splits))
    if work.window is not None:
        num_splits = min(num_splits, -(-(work.window - 1 + work.num_slots) // work.split_tokens) + 1)
    if in_order is None:
        row_bytes = shape.dtype.itemsize * shape.head_dim + 4
        partial_bytes = work.batch * num_splits * shape.num_nodes * shape.heads * row_bytes
        in_order = (
            partial_bytes > configs.INVARIANT_PARTIAL_BYTES
            or configs.fills_the_chip(shape.num_nodes * work.group, work.block_m)
            or configs.is_spread_without_splits(config, work.batch * shape.kv_heads * work.row_tiles, work.max_length)
        )
    in_order = in_order and num_splits > 1
    return work._replace(num_splits=1 if in_order else num_splits, fixed_cut=True, in_order=in_order)


def bounded_length(metadata: AttentionMetadata, page_size: int) -> int:
    """`max_length` of a call: at most what the page table holds."""
    capacity = metadata.page_table.shape[1] * page_size
    max_length = capacity if metadata.max_length is None else min(metadata.max_length, capacity)
    expect_at_least_one(max_length=max_length)
    return max_length


def expect_at_least_one(**numbers: int | None) -> None:
    """Raise ValueError unless all given numbers (None is skipped) are at least 1."""
    for name, number in numbers.items():
        if number is not None:
            expect_at_least(name, number, 1)


def check_mode(metadata: AttentionMetadata) -> None:
    """Options that describe the shape of the draft."""
    mode, tree_width = metadata.mode, metadata.tree_width
    expect_choice("mode", mode, MODES)
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


def _check_paths(q: torch.Tensor, metadata: AttentionMetadata, cut: Cut) -> None:
    """The slots of each row in the order of the text, which a batch-invariant call of a tree has."""
    if cut.in_order is not None and not cut.batch_invariant:
        raise ValueError(f"in_order: expected with batch_invariant only, got {cut.in_order}")
    if metadata.paths is None:
        if cut.batch_invariant and metadata.mode == "tree":
            raise ValueError("metadata: expected paths for a batch-invariant call of a tree, got None; see mask_paths")
        return
    if not cut.batch_invariant or metadata.mode != "tree":
        raise ValueError(f"paths: expected for a batch-invariant call of a tree only, got mode {metadata.mode!r}")
    expect_shape("paths", metadata.paths, (*q.shape[:2], None))
    expect_dtype("paths", metadata.paths, torch.int32)
    expect_same_device(q=q, paths=metadata.paths)
    expect_contiguous(paths=metadata.paths)


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
