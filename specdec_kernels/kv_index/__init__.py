"""From a page table to the arrays that stores and attention backends read, and the move of an accepted path.

A request's position p lies on page `page_table[b, p // page_size]`, at offset p % page_size; its slot in the
pool is page * page_size + offset (PagedAttention, arXiv 2309.06180). The key and value of tree node i were
written at position L + i, whatever the tree's shape; once the path n_0 = 0 < n_1 < ... < n_k is accepted,
node n_j belongs at L + j, so the path moves to the front. All sizes are fixed by the arguments' shapes,
nothing is read back.
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.kv_index import reference
from specdec_kernels.kv_index.types import FlashAttentionIndices, FlashInferIndices
from specdec_kernels.launch import use_triton

__all__ = [
    "FlashAttentionIndices",
    "FlashInferIndices",
    "flash_attention_table",
    "flashinfer_indices",
    "move_accepted",
    "token_slots",
]


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
        counts: [B] int32, positions wanted of each request.
        width: columns of the result; columns from `counts[b]` on are -1.
        page_size: tokens a page, >= 1.
        impl: `auto`, `triton` or `reference`.

    Returns:
        [B, width] int64, -1 also where a position is negative, beyond the table or on a page that is not
        held.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, `width` below 0, `page_size` below 1.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    _check_table(page_table, page_size, start=start)
    expect_shape("counts", counts, (page_table.shape[0],))
    expect_dtype("counts", counts, torch.int32)
    expect_contiguous(counts=counts)
    expect_same_device(page_table=page_table, counts=counts)
    if width < 0:
        raise ValueError(f"width: expected at least 0, got {width}")
    if use_triton(impl, page_table):
        import specdec_kernels.kv_index.kernel as kernel

        return kernel.token_slots(page_table, start, counts, width, page_size)
    return reference.token_slots(page_table, start, counts, width, page_size)


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
        page_size: tokens a page, >= 1.
        capacity: entries of `indices`, B * P by default. A smaller one is for a pool that has no more pages
            than that; pages behind it are left out and `indptr` ends there, so that nothing is ever read
            outside.
        impl: `auto`, `triton` or `reference`.

    Returns:
        FlashInferIndices: indptr [B+1] int32, indices [capacity] int32 (0 behind the last row), last_page_len
            [B] int32.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, `capacity` below 0, `page_size` below 1.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    _check_table(page_table, page_size, lengths=lengths)
    if capacity is not None and capacity < 0:
        raise ValueError(f"capacity: expected at least 0, got {capacity}")
    if use_triton(impl, page_table):
        import specdec_kernels.kv_index.kernel as kernel

        return kernel.flashinfer_indices(page_table, lengths, page_size, capacity)
    return reference.flashinfer_indices(page_table, lengths, page_size, capacity)


def flash_attention_table(
    page_table: torch.Tensor, lengths: torch.Tensor, page_size: int, impl: str = "auto"
) -> FlashAttentionIndices:
    """Page table and lengths as FlashAttention's paged calls take them: entries past the length are page 0.

    Args:
        page_table: [B, P] int32 page ids.
        lengths: [B] int64 tokens held; counted as P * page_size where larger.
        page_size: tokens a page, >= 1.
        impl: `auto`, `triton` or `reference`.

    Returns:
        FlashAttentionIndices: page_table [B, P] int32 (a new tensor), seqused_k [B] int32.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, `page_size` below 1.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    _check_table(page_table, page_size, lengths=lengths)
    if use_triton(impl, page_table):
        import specdec_kernels.kv_index.kernel as kernel

        return kernel.flash_attention_table(page_table, lengths, page_size)
    return reference.flash_attention_table(page_table, lengths, page_size)


def move_accepted(
    kv: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor, nodes: torch.Tensor, impl: str = "auto"
) -> None:
    """Move keys and values of each accepted path to the front, in place: position L + nodes[j] -> L + j.

    Overlapping moves are safe: the old values of a whole path are read before any is written. Requests must
    not share
    the pages of positions from L on.

    Args:
        kv: [layers, 2, pages, page_size, H_kv, D], contiguous, changed in place.
        page_table: [B, P] int32 page ids.
        lengths: [B] int64, L: committed tokens before this step.
        nodes: [B, D + 1] int32, accepted path from the root on, rising, -1 behind (`Accepted.nodes`).
        impl: `auto`, `triton` or `reference`.

    Raises:
        ValueError: wrong shape, dtype, strides or devices.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("kv", kv, (None, 2, None, None, None, None))
    _check_table(page_table, kv.shape[3], lengths=lengths)
    expect_shape("nodes", nodes, (page_table.shape[0], None))
    expect_dtype("nodes", nodes, torch.int32)
    expect_contiguous(kv=kv, nodes=nodes)
    expect_same_device(kv=kv, page_table=page_table, nodes=nodes)
    if use_triton(impl, kv):
        import specdec_kernels.kv_index.kernel as kernel

        return kernel.move_accepted(kv, page_table, lengths, nodes)
    return reference.move_accepted(kv, page_table, lengths, nodes)


def _check_table(page_table: torch.Tensor, page_size: int, **per_request: torch.Tensor) -> None:
    expect_shape("page_table", page_table, (None, None))
    expect_dtype("page_table", page_table, torch.int32)
    expect_contiguous(page_table=page_table)
    for name, tensor in per_request.items():
        expect_shape(name, tensor, (page_table.shape[0],))
        expect_dtype(name, tensor, torch.int64)
        expect_contiguous(**{name: tensor})
    expect_same_device(page_table=page_table, **per_request)
    if page_size < 1:
        raise ValueError(f"page_size: expected at least 1, got {page_size}")
