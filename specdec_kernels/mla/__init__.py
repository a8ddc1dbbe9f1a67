"""Absorbed multi-head latent attention (MLA) over a paged latent cache: decode, chain, block and tree verification.

MLA (DeepSeek-V2, arXiv 2405.04434) caches one latent row and one small rotary key a token for all heads. With the
up-projections absorbed into the query and the output, attention is multi-query attention whose value is the latent
part of the key: H query heads share one head of width latent + rope. The result stays in latent space; the caller
multiplies it by the absorbed value up-projection.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import use_triton
from specdec_kernels.mla import reference

__all__ = ["mla_attention"]

MODES = ("chain", "block", "tree")
_WORD_BITS = 64
_DIM_STEP = 16


@overload
def mla_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    mode: str,
    scale: float,
    mask: torch.Tensor | None = None,
    q_lens: torch.Tensor | None = None,
    max_length: int | None = None,
    split_tokens: int | None = None,
    tree_width: int | None = None,
    return_lse: Literal[False] = False,
    impl: str = "auto",
) -> torch.Tensor: ...


@overload
def mla_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    mode: str,
    scale: float,
    mask: torch.Tensor | None = None,
    q_lens: torch.Tensor | None = None,
    max_length: int | None = None,
    split_tokens: int | None = None,
    tree_width: int | None = None,
    return_lse: Literal[True],
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...


def mla_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    mode: str,
    scale: float,
    mask: torch.Tensor | None = None,
    q_lens: torch.Tensor | None = None,
    max_length: int | None = None,
    split_tokens: int | None = None,
    tree_width: int | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of N query rows a request over its paged latent cache.

    Who sees whom is as in `paged_attention`: query row i sees the prefix [0, L) and, of the draft, slot L + j when
    `mode="chain"`: j <= i; `mode="block"`: j < q_lens; `mode="tree"`: bit j of the row's mask words is set.

    Args:
        q_latent: [B, N, H, latent] queries with the key up-projection absorbed; latent a multiple of 16, for example
            512. Contiguous.
        q_rope: [B, N, H, rope] rotated queries, rope a multiple of 16, for example 64. Contiguous.
        cache: [pages, page_size, latent + rope], dtype of the queries; the draft is already stored in it.
        page_table: [B, P] int32; entries past the last used page are never read as page numbers.
        lengths: [B] int64 committed lengths L, without the draft.
        scale: multiplies the scores; there is no default, because it belongs to the head dimension before absorption
            (DeepSeek: (128 + 64) ** -0.5 and a factor of its YaRN table).
        mask: [B, N, ceil(M / 64)] int64 words, only with `mode="tree"`, M = `tree_width`.
        q_lens: [B] int32 rows in use, default N for all. Rows past it are zeros with lse -inf.
        max_length: host-side bound on lengths + draft slots, default P * page_size. A longer request is cut.
        split_tokens: keys a program works on before partial results are merged, default from the static table.
        tree_width: draft slots behind L that the mask describes, with `mode="tree"` only; default the rows in use.
        return_lse: also return the log-sum-exp (natural logarithm) of each row's scaled scores.

    Returns:
        out [B, N, H, latent] in the queries' dtype, and with `return_lse` also lse [B, N, H] float32 (float64 for
        float64 input).

    Raises:
        ValueError: a shape, dtype, device, layout or option does not fit; the message names expected and actual.
    """
    _check(q_latent, q_rope, cache, page_table, lengths, q_lens)
    _check_mask(q_latent, mode, mask, tree_width)
    capacity = page_table.shape[1] * cache.shape[1]
    for name, bound in (("max_length", max_length), ("split_tokens", split_tokens)):
        if bound is not None and bound < 1:
            raise ValueError(f"{name}: expected at least 1, got {bound}")
    options: dict[str, Any] = dict(
        mode=mode,
        mask=mask,
        q_lens=q_lens,
        scale=scale,
        max_length=capacity if max_length is None else min(max_length, capacity),
        split_tokens=split_tokens,
        tree_width=tree_width,
        return_lse=return_lse,
    )
    if use_triton(impl, q_latent):
        from specdec_kernels.mla import kernel

        return kernel.mla_attention(q_latent, q_rope, cache, page_table, lengths, **options)
    return reference.mla_attention(q_latent, q_rope, cache, page_table, lengths, **options)


def _check(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    q_lens: torch.Tensor | None,
) -> None:
    expect_shape("q_latent", q_latent, (None, None, None, None))
    batch, num_nodes, heads, latent = q_latent.shape
    expect_shape("q_rope", q_rope, (batch, num_nodes, heads, None))
    rope = q_rope.shape[3]
    for name, size in (("q_latent", latent), ("q_rope", rope)):
        if size < _DIM_STEP or size % _DIM_STEP:
            raise ValueError(f"{name}: expected a last dimension that is a multiple of {_DIM_STEP}, got {size}")
    expect_shape("cache", cache, (None, None, latent + rope))
    expect_shape("page_table", page_table, (batch, None))
    expect_shape("lengths", lengths, (batch,))
    expect_dtype("q_latent", q_latent, torch.float32, torch.float16, torch.bfloat16, torch.float64)
    expect_dtype("q_rope", q_rope, q_latent.dtype)
    expect_dtype("cache", cache, q_latent.dtype)
    expect_dtype("page_table", page_table, torch.int32)
    expect_dtype("lengths", lengths, torch.int64)
    if q_lens is not None:
        expect_shape("q_lens", q_lens, (batch,))
        expect_dtype("q_lens", q_lens, torch.int32)
    expect_same_device(
        q_latent=q_latent, q_rope=q_rope, cache=cache, page_table=page_table, lengths=lengths, q_lens=q_lens
    )
    expect_contiguous(q_latent=q_latent, q_rope=q_rope, cache=cache, lengths=lengths, q_lens=q_lens)
    if page_table.shape[1] > 1 and page_table.stride(1) != 1:
        raise ValueError(f"page_table: expected rows of adjacent entries, got strides {page_table.stride()}")


def _check_mask(q_latent: torch.Tensor, mode: str, mask: torch.Tensor | None, tree_width: int | None) -> None:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if (mask is not None) != (mode == "tree"):
        raise ValueError(f"mask: expected with mode 'tree' only, got mode {mode!r} and {type(mask).__name__}")
    if tree_width is not None and (mode != "tree" or tree_width < 1):
        raise ValueError(f"tree_width: expected at least 1 with mode 'tree' only, got {tree_width} with {mode!r}")
    if mask is None:
        return
    batch, num_nodes = q_latent.shape[:2]
    width = num_nodes if tree_width is None else tree_width
    expect_shape("mask", mask, (batch, num_nodes, -(-width // _WORD_BITS)))
    expect_dtype("mask", mask, torch.int64)
    expect_same_device(q_latent=q_latent, mask=mask)
    expect_contiguous(mask=mask)
