"""Public functions of the family: checks, then the kernel or the definition.

Every function takes `impl`: `auto`, `triton` or `reference`. All raise ValueError for a wrong shape, dtype, stride or
device and for a size out of its range, and RuntimeError where `impl="triton"` can run no kernel.
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import (
    expect_at_least,
    expect_contiguous,
    expect_dtype,
    expect_same_device,
    expect_shape,
    expect_tensors,
)
from specdec_kernels.kv_index.types import FlashAttentionIndices, FlashInferIndices, LevelSlots
from specdec_kernels.launch import dispatch


def token_slots(
    page_table: torch.Tensor,
    start: torch.Tensor,
    counts: torch.Tensor,
    width: int,
    page_size: int,
    impl: str = "auto",
) -> torch.Tensor:
    """Pool slots of the positions start, start + 1, ... of every request.

    Args:
        page_table: [B, P] int32 page ids, negative where no page is held.
        start: [B] int64, first position.
        counts: [B] int32, positions wanted per request.
        width: columns of the result; columns from `counts[b]` on are -1.
        page_size: tokens per page, >= 1.
        impl: see the module.

    Returns:
        [B, width] int64, -1 also where a position is negative, beyond the table or on a page that is not held.
    """
    _check_table(page_table, page_size, start=start)
    expect_shape("counts", counts, (page_table.shape[0],))
    expect_dtype("counts", counts, torch.int32)
    expect_contiguous(counts=counts)
    expect_same_device(page_table=page_table, counts=counts)
    expect_at_least("width", width, 0)
    return dispatch("token_slots", __package__, impl, page_table)(page_table, start, counts, width, page_size)


def level_slots(
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    active: torch.Tensor,
    levels: int,
    width: int,
    page_size: int,
    *,
    first: int = 0,
    impl: str = "auto",
) -> LevelSlots:
    """Positions and pool slots of all levels of a draft of `width` tokens a level.

    The tokens of level l stand at position L + `first` + l, and are stored where the positions L + `first` + l * width
    and following are.

    Args:
        page_table: [B, P] int32 page ids, negative where no page is held.
        lengths: [B] int64, committed tokens L.
        active: [B] int32: 1, or 0 for a padding row.
        levels: at least 0.
        width: at least 1.
        page_size: tokens per page, >= 1.
        first: at least 0.
        impl: see the module.

    Returns:
        LevelSlots. Slots are -1 also beyond the table and on a page that is not held.
    """
    _check_table(page_table, page_size, lengths=lengths)
    expect_tensors({"page_table": page_table}, active=(active, (page_table.shape[0],), torch.int32))
    expect_at_least("levels", levels, 0)
    expect_at_least("width", width, 1)
    expect_at_least("first", first, 0)
    build = dispatch("level_slots", __package__, impl, page_table)
    return build(page_table, lengths, active, levels, width, page_size, first)


def flashinfer_indices(
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    capacity: int | None = None,
    impl: str = "auto",
) -> FlashInferIndices:
    """Page ids of all requests one behind the other, as FlashInfer's paged wrappers take them.

    Args:
        page_table: [B, P] int32 page ids.
        lengths: [B] int64 tokens held; counted as P * page_size where larger.
        page_size: tokens per page, >= 1.
        capacity: entries of `indices`, B * P by default. A smaller one fits a pool that has no more pages than that:
            pages beyond it are left out and `indptr` ends there, so that no entry outside is ever read.
        impl: see the module.

    Returns:
        FlashInferIndices: indptr [B+1] int32, indices [capacity] int32 (0 behind the last row), last_page_len
            [B] int32.
    """
    _check_table(page_table, page_size, lengths=lengths)
    expect_at_least("capacity", 0 if capacity is None else capacity, 0)
    return dispatch("flashinfer_indices", __package__, impl, page_table)(page_table, lengths, page_size, capacity)


def flash_attention_table(
    page_table: torch.Tensor, lengths: torch.Tensor, page_size: int, impl: str = "auto"
) -> FlashAttentionIndices:
    """Page table and lengths as FlashAttention's paged calls take them: entries past the length are page 0.

    Args:
        page_table: [B, P] int32 page ids.
        lengths: [B] int64 tokens held; counted as P * page_size where larger.
        page_size: tokens per page, >= 1.
        impl: see the module.

    Returns:
        FlashAttentionIndices: page_table [B, P] int32 (a new tensor), seqused_k [B] int32.
    """
    _check_table(page_table, page_size, lengths=lengths)
    return dispatch("flash_attention_table", __package__, impl, page_table)(page_table, lengths, page_size)


def move_accepted(
    kv: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor, nodes: torch.Tensor, impl: str = "auto"
) -> None:
    """Move keys and values of each accepted path to the front, in place: position L + nodes[j] -> L + j.

    The key and value of tree node i were written at position L + i, whatever the tree's shape. Once the path
    n_0 = 0 < n_1 < ... < n_k is accepted, node n_j belongs at L + j. Overlapping moves are safe: the old values of a
    whole path are read before any is written. Requests must not share the pages of positions from L on.

    Args:
        kv: [layers, 2, pages, page_size, H_kv, D], contiguous, changed in place.
        page_table: [B, P] int32 page ids.
        lengths: [B] int64, L: committed tokens before this step.
        nodes: [B, D + 1] int32, accepted path from the root on, rising, -1 behind (`Accepted.nodes`).
        impl: see the module.
    """
    expect_shape("kv", kv, (None, 2, None, None, None, None))
    _check_table(page_table, kv.shape[3], lengths=lengths)
    expect_shape("nodes", nodes, (page_table.shape[0], None))
    expect_dtype("nodes", nodes, torch.int32)
    expect_contiguous(kv=kv, nodes=nodes)
    expect_same_device(kv=kv, page_table=page_table, nodes=nodes)
    dispatch("move_accepted", __package__, impl, kv)(kv, page_table, lengths, nodes)


def _check_table(page_table: torch.Tensor, page_size: int, **per_request: torch.Tensor) -> None:
    """A page table with one row per request, and [B] int64 tensors."""
    expect_shape("page_table", page_table, (None, None))
    expect_dtype("page_table", page_table, torch.int32)
    expect_contiguous(page_table=page_table)
    for name, tensor in per_request.items():
        expect_shape(name, tensor, (page_table.shape[0],))
        expect_dtype(name, tensor, torch.int64)
        expect_contiguous(**{name: tensor})
    expect_same_device(page_table=page_table, **per_request)
    expect_at_least("page_size", page_size, 1)
