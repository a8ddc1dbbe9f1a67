"""Paged attention over a committed prefix plus a draft block: decode, chain, block and tree verification, and
prefill.

The keys of a request are its committed tokens at positions [0, L) followed by its N draft nodes at positions
L + j, whatever the shape of the draft: who sees whom inside the draft is a mode or a bit mask, never a
layout. So any page size works for any tree, and the mask is only as large as the draft.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from specdec_kernels.attention import reference
from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import use_triton

__all__ = ["MODES", "paged_attention"]

MODES = ("chain", "block", "tree")
_WORD_BITS = 64


@overload
def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    mode: str,
    mask: torch.Tensor | None = None,
    q_lens: torch.Tensor | None = None,
    scale: float | None = None,
    max_length: int | None = None,
    split_tokens: int | None = None,
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
    q_lens: torch.Tensor | None = None,
    scale: float | None = None,
    max_length: int | None = None,
    split_tokens: int | None = None,
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
    q_lens: torch.Tensor | None = None,
    scale: float | None = None,
    max_length: int | None = None,
    split_tokens: int | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of N query rows a request over its paged keys and values.

    Query row i stands at position L + i and sees the prefix [0, L) and, of the draft, slot L + j when
    `mode="chain"`: j <= i; `mode="block"`: j < q_lens; `mode="tree"`: bit j of the row's mask words is set.
    Decoding is N = 1; prefill is `chain` with L tokens already stored (0 for a new request).

    Args:
        q: [B, N, H, D], D a power of two >= 16, H a multiple of H_kv. Contiguous.
        kv: [2, pages, page_size, H_kv, D] keys then values of one layer, dtype of q; the draft is already
            stored in it.
        page_table: [B, P] int32; entries past the last used page are never read as page numbers.
        lengths: [B] int64 committed lengths L, without the draft.
        mask: [B, N, ceil(N / 64)] int64 words, only with `mode="tree"`; bit j of row i: node i sees node j.
        q_lens: [B] int32 rows in use, default N for all. Rows past it are zeros with lse -inf.
        scale: multiplies q . k, default D ** -0.5.
        max_length: host-side bound on lengths + N, default P * page_size. Sizes the launch; a longer request
            is cut.
        split_tokens: keys a program works on before partial results are merged, default from the static
            table.
        return_lse: also return the log-sum-exp (natural logarithm) of each row's scaled scores.

    Returns:
        out [B, N, H, D] in q's dtype, and with `return_lse` also lse [B, N, H] float32 (float64 for float64
        input).

    Raises:
        ValueError: a shape, dtype, device, layout or option does not fit; the message names expected and
            actual.
    """
    _check(q, kv, page_table, lengths, mode, mask, q_lens)
    batch, num_nodes = q.shape[:2]
    capacity = page_table.shape[1] * kv.shape[2]
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length: expected at least 1, got {max_length}")
    if split_tokens is not None and split_tokens < 1:
        raise ValueError(f"split_tokens: expected at least 1, got {split_tokens}")
    options: dict[str, Any] = dict(
        mode=mode,
        mask=mask,
        q_lens=q_lens,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        max_length=capacity if max_length is None else min(max_length, capacity),
        split_tokens=split_tokens,
        return_lse=return_lse,
    )
    if use_triton(impl, q):
        from specdec_kernels.attention import kernel

        return kernel.paged_attention(q, kv, page_table, lengths, **options)
    return reference.paged_attention(q, kv, page_table, lengths, **options)


def _check(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    mode: str,
    mask: torch.Tensor | None,
    q_lens: torch.Tensor | None,
) -> None:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    expect_shape("q", q, (None, None, None, None))
    batch, num_nodes, heads, head_dim = q.shape
    expect_shape("kv", kv, (2, None, None, None, head_dim))
    expect_shape("page_table", page_table, (batch, None))
    expect_shape("lengths", lengths, (batch,))
    expect_dtype("q", q, torch.float32, torch.float16, torch.bfloat16, torch.float64)
    expect_dtype("kv", kv, q.dtype)
    expect_dtype("page_table", page_table, torch.int32)
    expect_dtype("lengths", lengths, torch.int64)
    if kv.shape[3] == 0 or heads % kv.shape[3]:
        raise ValueError(f"q: expected heads in a multiple of kv's {kv.shape[3]}, got {heads}")
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"q: expected a head dimension that is a power of two >= 16, got {head_dim}")
    if q_lens is not None:
        expect_shape("q_lens", q_lens, (batch,))
        expect_dtype("q_lens", q_lens, torch.int32)
    if (mask is not None) != (mode == "tree"):
        raise ValueError(f"mask: expected with mode 'tree' only, got mode {mode!r} and {type(mask).__name__}")
    if mask is not None:
        expect_shape("mask", mask, (batch, num_nodes, -(-num_nodes // _WORD_BITS)))
        expect_dtype("mask", mask, torch.int64)
    expect_same_device(q=q, kv=kv, page_table=page_table, lengths=lengths, mask=mask, q_lens=q_lens)
    expect_contiguous(q=q, kv=kv, lengths=lengths, mask=mask, q_lens=q_lens)
    if page_table.shape[1] > 1 and page_table.stride(1) != 1:
        raise ValueError(f"page_table: expected rows of adjacent entries, got strides {page_table.stride()}")
