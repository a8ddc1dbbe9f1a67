"""What the arguments of paged attention must be, in words that name expected and actual."""

from __future__ import annotations

import torch

from specdec_kernels.attention.types import AttentionPlan, PlanShape
from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape

MODES = ("chain", "block", "tree")
_WORD_BITS = 64
_MAX_HEAD_DIM = 256
_MAX_PAGE_SIZE = 256
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_pool(q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor) -> None:
    """Shapes and types of queries, pool, page table and lengths."""
    expect_shape("q", q, (None, None, None, None))
    batch, _, heads, head_dim = q.shape
    expect_shape("kv", kv, (2, None, None, None, head_dim))
    expect_shape("page_table", page_table, (batch, None))
    expect_shape("lengths", lengths, (batch,))
    expect_dtype("q", q, *_FLOATS)
    expect_dtype("kv", kv, q.dtype, torch.float8_e4m3fn)
    expect_dtype("page_table", page_table, torch.int32)
    expect_dtype("lengths", lengths, torch.int64)
    if kv.shape[3] == 0 or heads % kv.shape[3]:
        raise ValueError(f"q: expected heads in a multiple of kv's {kv.shape[3]}, got {heads}")
    if head_dim % 16 or not 16 <= head_dim <= _MAX_HEAD_DIM:
        raise ValueError(f"q: expected a head dimension in multiples of 16 up to {_MAX_HEAD_DIM}, got {head_dim}")
    if not 1 <= kv.shape[2] <= _MAX_PAGE_SIZE:
        raise ValueError(f"kv: expected pages of 1 to {_MAX_PAGE_SIZE} tokens, got {kv.shape[2]}")
    if page_table.shape[1] > 1 and page_table.stride(1) != 1:
        raise ValueError(f"page_table: expected rows of adjacent entries, got strides {page_table.stride()}")
    expect_same_device(q=q, kv=kv, page_table=page_table, lengths=lengths)
    expect_contiguous(q=q, kv=kv, lengths=lengths)


def check_mode(mode: str, tree_width: int | None, window: int | None) -> None:
    """Options that describe the shape of the draft."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if tree_width is not None and mode != "tree":
        raise ValueError(f"tree_width: expected with mode 'tree' only, got mode {mode!r} and {tree_width}")
    at_least_one(tree_width=tree_width, window=window)


def at_least_one(**options: int | None) -> None:
    """Raise ValueError unless every given option is positive."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")


def check_q_lens(batch: int, q_lens: torch.Tensor | None, lengths: torch.Tensor) -> None:
    if q_lens is None:
        return
    expect_shape("q_lens", q_lens, (batch,))
    expect_dtype("q_lens", q_lens, torch.int32)
    expect_same_device(lengths=lengths, q_lens=q_lens)
    expect_contiguous(q_lens=q_lens)


def check_tree(
    q: torch.Tensor,
    mode: str,
    mask: torch.Tensor | None,
    num_slots: int,
    window: int | None,
    depths: torch.Tensor | None,
    row_depths: torch.Tensor | None,
) -> None:
    """The mask and, with a window, the depths of slots and rows."""
    batch, num_nodes = q.shape[:2]
    if (mask is not None) != (mode == "tree"):
        raise ValueError(f"mask: expected with mode 'tree' only, got mode {mode!r} and {type(mask).__name__}")
    if mask is not None:
        expect_shape("mask", mask, (batch, num_nodes, -(-num_slots // _WORD_BITS)))
        expect_dtype("mask", mask, torch.int64)
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
    expect_same_device(q=q, mask=mask, depths=depths, row_depths=row_depths)
    expect_contiguous(mask=mask, depths=depths, row_depths=row_depths)


def check_scales(
    q: torch.Tensor,
    kv_heads: int,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
) -> None:
    """Numbers and tensors that scale the scores and values."""
    if scale <= 0:
        raise ValueError(f"scale: expected a positive number, got {scale}")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap: expected a positive number, got {soft_cap}")
    wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
    per_head = {"sinks": (sinks, q.shape[2]), "k_scale": (k_scale, kv_heads), "v_scale": (v_scale, kv_heads)}
    for name, (value, size) in per_head.items():
        if isinstance(value, torch.Tensor):
            expect_shape(name, value, (size,))
            expect_dtype(name, value, wanted)
            expect_same_device(q=q, **{name: value})
            expect_contiguous(**{name: value})
        elif name == "k_scale" and value is not None and value <= 0:
            raise ValueError(f"k_scale: expected a positive number, got {value}")


def check_plan(plan: AttentionPlan, shape: PlanShape) -> None:
    """Whether `plan` cuts the work as the call would."""
    if plan.shape == shape:
        return
    differences = [
        f"{name} {ours} in the call, {theirs} in the plan"
        for name, ours, theirs in zip(PlanShape._fields, shape, plan.shape, strict=True)
        if ours != theirs
    ]
    raise ValueError(f"plan: expected the plan of a call of this shape, got {'; '.join(differences)}")
