"""From a page table to the arrays that stores and attention backends read.

A request's position p lies on page `page_table[b, p // page_size]`, at offset p % page_size; its slot in the
pool is page * page_size + offset (PagedAttention, arXiv 2309.06180).
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.kv_index import page_reference as reference
from specdec_kernels.kv_index.arguments import check_at_least, check_table
from specdec_kernels.kv_index.types import FlashAttentionIndices, FlashInferIndices
from specdec_kernels.launch import use_triton


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
    check_table(page_table, page_size, start=start)
    expect_shape("counts", counts, (page_table.shape[0],))
    expect_dtype("counts", counts, torch.int32)
    expect_contiguous(counts=counts)
    expect_same_device(page_table=page_table, counts=counts)
    check_at_least("width", width, 0)
    if use_triton(impl, page_table):
        import specdec_kernels.kv_index.page_kernel as kernel

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
    check_table(page_table, page_size, lengths=lengths)
    check_at_least("capacity", 0 if capacity is None else capacity, 0)
    if use_triton(impl, page_table):
        import specdec_kernels.kv_index.page_kernel as kernel

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
    check_table(page_table, page_size, lengths=lengths)
    if use_triton(impl, page_table):
        import specdec_kernels.kv_index.page_kernel as kernel

        return kernel.flash_attention_table(page_table, lengths, page_size)
    return reference.flash_attention_table(page_table, lengths, page_size)
