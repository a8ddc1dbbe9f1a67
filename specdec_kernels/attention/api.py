"""Public functions of paged attention: what their arguments must be, and which implementation runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.attention import configs
from specdec_kernels.attention.configs import AttentionConfig, attention_config, bounded_splits, fixed_borders
from specdec_kernels.attention.types import (
    MODES,
    AttentionCall,
    AttentionMetadata,
    AttentionShape,
    LayerScales,
    SplitOptions,
    TileSchedule,
    WorkShape,
)
from specdec_kernels.checks import expect_at_least_one, expect_choice, expect_fields, expect_shape, expect_tensors
from specdec_kernels.launch import current_chip, dispatch

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    metadata: AttentionMetadata,
    *,
    sinks: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    tile_schedule: TileSchedule | None = None,
    split_tokens: int | None = None,
    tuning: Mapping[str, Any] | None = None,
    batch_invariant: bool = False,
    in_order: bool | None = None,
    out: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention of N query rows per request over its paged keys and values: [B, N, H, D] in q's dtype.

    Decoding is N = 1; prefill is `mode="chain"` with L tokens already stored. Every slot up to the last key, which is
    L + q_lens - 1 or L + tree_width - 1, must hold finite numbers, seen or not. A result depends on the number of
    requests, which decides how keys are split, and on nothing else of the other requests.

    Args:
        q: [B, N, H, D], D a multiple of 16 up to 256, H a multiple of H_kv. Contiguous.
        kv: [2, pages, page_size, H_kv, D] keys then values of one layer, dtype of q or float8_e4m3fn (finite codes
            only), the draft included. Pages of 1 to 256 tokens.
        metadata: who sees whom; shared by the layers of the forward.
        sinks: [H] float32 logits that enter each row's denominator and carry no value.
        k_scale, v_scale: multiply stored keys and values, a number or [H_kv] float32.
        tile_schedule: the result of `plan_attention` for the same shape.
        split_tokens: fewest keys a program works on before partial results are merged, default from the static table;
            `UNSPLIT` leaves the keys of a request whole.
        tuning: fields of `configs.AttentionConfig` that replace the static table's.
        batch_invariant: splits at fixed positions and one tile for any number of rows, so that the bits of a row depend
            on its query and the keys that it sees alone. A tree needs `metadata.paths`.
        in_order: with `batch_invariant`, whether one program computes all splits of its rows, which needs no memory for
            partial results and changes no bit; by default where the rows, the partial results or the requests are many.
        out: where to write the result, like q; a new tensor by default.
    """
    scales, options = (sinks, k_scale, v_scale), (split_tokens, tuning, batch_invariant, in_order)
    call = _checked(q, kv, metadata, LayerScales(*scales), SplitOptions(*options), tile_schedule)
    expect_tensors({"q": q}, out=(out, tuple(q.shape), q.dtype))
    return dispatch("paged_attention", __package__, impl, q)(call, out)


def paged_attention_with_lse(
    q: Tensor, kv: Tensor, metadata: AttentionMetadata, *, impl: str = "auto", **options: Any
) -> tuple[Tensor, Tensor]:
    """`paged_attention`, and the log-sum-exp (natural logarithm) of each row's scores, its sink included: (out,
    lse [B, N, H] float32, float64 for float64 input). `options` are those of `paged_attention` but `out`."""
    scales = LayerScales(**{name: options.pop(name) for name in LayerScales._fields if name in options})
    tile_schedule = options.pop("tile_schedule", None)
    call = _checked(q, kv, metadata, scales, SplitOptions(**options), tile_schedule)
    return dispatch("paged_attention_with_lse", __package__, impl, q)(call)


def plan_attention(
    metadata: AttentionMetadata,
    shape: AttentionShape,
    *,
    split_tokens: int | None = None,
    tuning: Mapping[str, Any] | None = None,
    batch_invariant: bool = False,
    in_order: bool | None = None,
    impl: str = "auto",
) -> TileSchedule:
    """The tile schedule for `paged_attention` calls with `metadata`, whose `AttentionShape.of(q, kv)` is `shape`.

    It is made on the device without reading a length back. The options are those of the calls. A call of another shape
    refuses it.
    """
    _check_plan(metadata, shape)
    work, _ = _divide(metadata, shape, SplitOptions(split_tokens, tuning, batch_invariant, in_order))
    plan = dispatch("plan_levels", __package__, impl, metadata.lengths, kernel="kernel_plan")
    return plan(metadata, (work,), 0, 0)[0]


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
) -> tuple[TileSchedule, ...]:
    """The tile schedules of `num_levels` calls that a drafter makes one after another, in one launch.

    Call l has lengths + l * `length_step`, tree_width + l * `width_step` (0 without a tree_width), and the rest of
    `metadata` unchanged.
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
    options = SplitOptions(split_tokens, tuning)
    works = [_divide(metadata._replace(tree_width=each), shape, options)[0] for each in widths]
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


def mask_paths(mask: Tensor, most: int, *, impl: str = "auto") -> Tensor:
    """The slots that each row of a tree sees, in rising order: [B, N, most] int32, -1 after the last.

    Args:
        mask: [B, N, ceil(M / 64)] int64 words; bit j of row i: the row sees slot j. Parents have lower slots than their
            children. Contiguous.
        most: most slots that a row sees: the depth of the tree + 1. Slots past it are left out.
    """
    expect_tensors(mask=(mask, (None, None, None), torch.int64))
    expect_at_least_one(most=most, words=mask.shape[2])
    return dispatch("mask_paths", __package__, impl, mask, kernel="kernel_plan")(mask, most)


def _checked(
    q: Tensor,
    kv: Tensor,
    metadata: AttentionMetadata,
    scales: LayerScales,
    options: SplitOptions,
    tile_schedule: TileSchedule | None,
) -> AttentionCall:
    """The call with every default filled in."""
    _check_pool(q, kv, metadata)
    check_draft(q, metadata)
    _check_depths(q, metadata)
    _check_paths(metadata, options)
    filled = metadata._replace(
        scale=q.shape[3] ** -0.5 if metadata.scale is None else metadata.scale,
        row_depths=metadata.depths if metadata.row_depths is None else metadata.row_depths,
    )
    _check_scales(q, kv.shape[3], filled, scales)
    work, config = _divide(metadata, AttentionShape.of(q, kv), options)
    if tile_schedule is not None and tile_schedule.shape != work:
        differences = [
            f"{name} {ours} in the call, {theirs} in the list"
            for name, ours, theirs in zip(WorkShape._fields, work, tile_schedule.shape, strict=True)
            if ours != theirs
        ]
        raise ValueError(f"tile_schedule: expected the list of a call of this shape, got {'; '.join(differences)}")
    scales = LayerScales(scales.sinks, *(x if isinstance(x, Tensor) else float(x) for x in scales[1:]))
    return AttentionCall(q, kv, filled, scales, work, config, tile_schedule)


def _divide(
    metadata: AttentionMetadata, shape: AttentionShape, options: SplitOptions
) -> tuple[WorkShape, AttentionConfig]:
    """How the work of a call on the device of `metadata` is divided."""
    max_length = bounded_length(metadata, shape.page_size)
    expect_at_least_one(split_tokens=options.split_tokens)
    group, num_slots = shape.heads // shape.kv_heads, metadata.tree_width or shape.num_nodes
    chip, rows = current_chip(metadata.lengths), shape.num_nodes * group
    # Keys are widened to the type of float32 queries, and then take the room of float32 keys.
    kv_bytes = 4 if shape.dtype.itemsize > 2 else shape.kv_dtype.itemsize
    config = attention_config(
        chip, shape.head_dim, rows, max_length, options.split_tokens, kv_bytes, options.tuning, options.batch_invariant,
        metadata.window, len(metadata.lengths) * shape.kv_heads,
    )  # fmt: skip
    if not options.batch_invariant:
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
    if options.batch_invariant:
        work = _with_fixed_splits(work, metadata, shape, options.in_order, config)
        if work.in_order and not options.tuning:
            config = configs.in_order_config(chip, config, rows, shape.dtype.itemsize)
        return work._replace(block_m=config.block_m), config
    return _split_by_length(work, shape), config


def _split_by_length(work: WorkShape, shape: AttentionShape) -> WorkShape:
    """`work` with as many splits as a request of the greatest length has."""
    bound = bounded_splits(work.max_splits, shape.num_nodes * shape.heads, shape.head_dim, shape.dtype.itemsize)
    work, keys = work._replace(max_splits=bound), work.max_length
    if work.window is not None:
        # A window may begin after the first key of its first split.
        keys = min(keys, work.window - 1 + work.num_slots + work.split_tokens // 8 - 1)
    return work._replace(num_splits=work.splits_of(keys))


def _with_fixed_splits(
    work: WorkShape, metadata: AttentionMetadata, shape: AttentionShape, in_order: bool | None, config: AttentionConfig
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
    return work._replace(num_splits=1 if in_order else num_splits, fixed_splits=True, in_order=in_order)


def bounded_length(metadata: AttentionMetadata, page_size: int) -> int:
    """`max_length` of a call: at most what the page table holds."""
    capacity = metadata.page_table.shape[1] * page_size
    max_length = capacity if metadata.max_length is None else min(metadata.max_length, capacity)
    expect_at_least_one(max_length=max_length)
    return max_length


def check_mode(metadata: AttentionMetadata) -> None:
    """Options that describe the shape of the draft."""
    mode, tree_width = metadata.mode, metadata.tree_width
    expect_choice("mode", mode, MODES)
    if tree_width is not None and mode != "tree":
        raise ValueError(f"tree_width: expected with mode 'tree' only, got mode {mode!r} and {tree_width}")
    expect_at_least_one(tree_width=tree_width, window=metadata.window)


def check_lengths(metadata: AttentionMetadata) -> None:
    """The forms of the tensors, for some number of rows and slots."""
    expect_fields(metadata, ("page_table",))


def _check_pool(q: Tensor, kv: Tensor, metadata: AttentionMetadata) -> None:
    """Shapes and types of queries, pool, page table and lengths."""
    expect_shape("q", q, (None, None, None, None))
    heads, head_dim = q.shape[2:]
    expect_tensors(
        {"lengths": metadata.lengths},
        q=(q, q.shape, _FLOATS),
        kv=(kv, (2, None, None, None, head_dim), (q.dtype, torch.float8_e4m3fn)),
    )
    if kv.shape[3] == 0 or heads % kv.shape[3]:
        raise ValueError(f"q: expected heads in a multiple of kv's {kv.shape[3]}, got {heads}")
    if (problem := AttentionShape.of(q, kv).problem) is not None:
        raise ValueError(f"q, kv: {problem}")


def check_draft(q: Tensor, metadata: AttentionMetadata) -> None:
    """The mode, the forms of the tensors for the query rows q [B, N, ...], and the mask, of trees alone."""
    check_mode(metadata)
    mode, mask = metadata.mode, metadata.mask
    if (mask is not None) != (mode == "tree"):
        raise ValueError(f"mask: expected with mode 'tree' only, got mode {mode!r} and {type(mask).__name__}")
    batch, num_nodes = q.shape[:2]
    expect_fields(metadata, ("page_table",), dict(q=q), B=batch, N=num_nodes, M=metadata.tree_width or num_nodes)


def _check_depths(q: Tensor, metadata: AttentionMetadata) -> None:
    """Depths of slots and rows, which a tree with a window has."""
    mode, window, depths, row_depths = metadata.mode, metadata.window, metadata.depths, metadata.row_depths
    num_nodes = q.shape[1]
    num_slots = metadata.tree_width or num_nodes
    wanted = mode == "tree" and window is not None
    if wanted and depths is None:
        raise ValueError("depths: expected with mode 'tree' and a window, got None")
    if not wanted and (depths is not None or row_depths is not None):
        raise ValueError(f"depths: expected with mode 'tree' and a window only, got mode {mode!r}, window {window}")
    if depths is not None and row_depths is None and num_slots != num_nodes:
        raise ValueError(f"row_depths: expected where tree_width {num_slots} is not the {num_nodes} rows, got None")


def _check_paths(metadata: AttentionMetadata, options: SplitOptions) -> None:
    """The slots of each row in the order of the text, which a batch-invariant call of a tree has."""
    if options.in_order is not None and not options.batch_invariant:
        raise ValueError(f"in_order: expected with batch_invariant only, got {options.in_order}")
    of_paths = options.batch_invariant and metadata.mode == "tree"
    if metadata.paths is None and of_paths:
        raise ValueError("metadata: expected paths for a batch-invariant call of a tree, got None; see mask_paths")
    if metadata.paths is not None and not of_paths:
        raise ValueError(f"paths: expected for a batch-invariant call of a tree only, got mode {metadata.mode!r}")


def _check_scales(q: Tensor, kv_heads: int, metadata: AttentionMetadata, scales: LayerScales) -> None:
    """Numbers and tensors that scale the scores and values."""
    for number, value in dict(scale=metadata.scale, soft_cap=metadata.soft_cap).items():
        if value is not None and value <= 0:
            raise ValueError(f"{number}: expected a positive number, got {value}")
    wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, scale in scales._asdict().items():
        if isinstance(scale, Tensor):
            shape = (q.shape[2] if name == "sinks" else kv_heads,)
            expect_tensors({"q": q}, **{name: (scale, shape, wanted)})
        elif name == "k_scale" and scale <= 0:
            raise ValueError(f"k_scale: expected a positive number, got {scale}")
