"""Public functions of latent attention: what their arguments must be, and which implementation runs.

ValueError where a shape, dtype, device, layout or option does not fit; the message names expected and actual.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels.attention.api import bounded_length, check_draft, check_lengths
from specdec_kernels.attention.types import AttentionMetadata
from specdec_kernels.checks import (
    expect_at_least_one,
    expect_dtype,
    expect_same_device,
    expect_shape,
    expect_strided,
    expect_tensors,
)
from specdec_kernels.launch import dispatch
from specdec_kernels.mla.types import LatentStore, MlaCall

_DIM_STEP = 16
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_UNKNOWN = ("window", "soft_cap", "depths", "row_depths")


def mla_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    *,
    split_tokens: int | None = None,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Attention of N query rows per request over its paged latent cache: [B, N, H, latent] in the queries' dtype.

    Args:
        q_latent: [B, N, H, latent] queries with the key up-projection absorbed; latent a multiple of 16. Contiguous.
        q_rope: [B, N, H, rope] rotated queries, rope a multiple of 16. Contiguous.
        cache: [pages, page_size, latent + rope], dtype of the queries; the draft is already stored in it.
        metadata: as in `paged_attention`, without a window or a soft cap. `scale` has no default: it belongs to the
            head dimension before absorption (DeepSeek: (128 + 64) ** -0.5 and a factor of its YaRN table).
        split_tokens: fewest keys a program works on before partial results are merged, default from the static table.
        batch_invariant: splits at fixed positions and one tile for any number of rows, so that the bits of a row depend
            on its own keys alone. For chains and blocks: a node of a tree is a chain of its path.
    """
    call = _checked(MlaCall(q_latent, q_rope, cache, metadata, split_tokens, batch_invariant))
    return dispatch("mla_attention", __package__, impl, q_latent)(call)


def mla_attention_with_lse(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, metadata: AttentionMetadata, *, impl: str = "auto", **options: Any
) -> tuple[Tensor, Tensor]:
    """`mla_attention`, whose `options` it takes, and the log-sum-exp (natural logarithm) of each row's scaled scores:
    (out, lse [B, N, H] float32, float64 for float64 input)."""
    call = _checked(MlaCall(q_latent, q_rope, cache, metadata, **options))
    return dispatch("mla_attention_with_lse", __package__, impl, q_latent)(call)


def write_latent(
    q: Tensor,
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope: Tensor,
    *,
    norm: Tensor,
    eps: float,
    interleaved: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Normalise the latents of T tokens, rotate the keys that their heads share, and store both; rotate the queries.

    The norm rounds as Hugging Face's layers do; the rotation is computed in float32 and rounded once. What is rotated
    comes out as halves, whichever way it was paired.

    Args:
        q: [T, H, rope], the part of the queries that turns; tokens and heads may be strided.
        kv: [T, latent + rope], as the projection gave them; tokens may be strided.
        cache: [pages, page_size, latent + rope], contiguous, dtype of q; written in place.
        slots: [T] int64, page * page_size + offset, different where they are inside the cache; others, such as -1,
            store nothing.
        positions: [T] int64 rows of `rope`; a position outside the table rotates to zeros.
        rope: [max_pos, rope] float32 (float64 with a float64 cache), see `rope_table`.
        norm: [latent] weights of the RMS norm.
        interleaved: pairs are elements (2 i, 2 i + 1) of q and kv; otherwise (i, i + rope / 2).

    Returns:
        [T, H, rope], contiguous, dtype of q.
    """
    expect_strided(q=(q, (None, None, None), _FLOATS))
    tokens, _, width = q.shape
    if width % 2 or not width:
        raise ValueError(f"q: expected an even last dimension, got {width}")
    expect_tensors({"q": q}, norm=(norm, (None,), q.dtype))
    row = norm.shape[0] + width
    expect_strided(kv=(kv, (tokens, row), q.dtype))
    expect_tensors(
        {"q": q, "kv": kv, "norm": norm},
        cache=(cache, (None, None, row), q.dtype),
        slots=(slots, (tokens,), torch.int64),
        positions=(positions, (tokens,), torch.int64),
        rope=(rope, (None, width), torch.float64 if q.dtype == torch.float64 else torch.float32),
    )
    store = LatentStore(kv, cache, slots, positions, rope, norm)
    out: Tensor = dispatch("write_latent", __package__, impl, q, "kernel_write")(q, store, eps, interleaved)
    return out


def head_product(x: Tensor, weight: Tensor, *, impl: str = "auto") -> Tensor:
    """x [T, H, K] by the matrix of each head, weight [H, K, N] of any strides: [T, H, N] in the dtype of x. By the
    kernel a token has the same bits for any T.
    """
    expect_strided(x=(x, (None, None, None), _FLOATS))
    expect_shape("weight", weight, (*x.shape[1:], None))
    expect_dtype("weight", weight, x.dtype)
    expect_same_device(x=x, weight=weight)
    out: Tensor = dispatch("head_product", __package__, impl, x, "kernel_heads")(x, weight)
    return out


def _checked(call: MlaCall) -> MlaCall:
    """The call with the host-side bound of its metadata filled in."""
    q_latent, q_rope, cache, metadata, split_tokens = call[:5]
    expect_shape("q_latent", q_latent, (None, None, None, None))
    batch, num_nodes, heads, latent = q_latent.shape
    expect_shape("q_rope", q_rope, (batch, num_nodes, heads, None))
    rope = q_rope.shape[3]
    for name, size in (("q_latent", latent), ("q_rope", rope)):
        if size < _DIM_STEP or size % _DIM_STEP:
            raise ValueError(f"{name}: expected a last dimension that is a multiple of {_DIM_STEP}, got {size}")
    expect_shape("cache", cache, (None, None, latent + rope))
    expect_tensors(
        {"lengths": metadata.lengths},
        q_latent=(q_latent, q_latent.shape, _FLOATS),
        q_rope=(q_rope, q_rope.shape, q_latent.dtype),
        cache=(cache, cache.shape, q_latent.dtype),
    )
    expect_shape("lengths", metadata.lengths, (batch,))
    check_lengths(metadata)
    check_draft(q_latent, metadata)
    given = [name for name in _UNKNOWN if getattr(metadata, name) is not None]
    if given:
        raise ValueError(f"metadata: expected no {' or '.join(_UNKNOWN)} with latent attention, got {', '.join(given)}")
    if metadata.scale is None or metadata.scale <= 0:
        raise ValueError(f"scale: expected a positive number, got {metadata.scale}")
    if call.batch_invariant and metadata.mode == "tree":
        raise ValueError("batch_invariant: expected mode 'chain' or 'block', got 'tree'")
    max_length = bounded_length(metadata, cache.shape[1])
    expect_at_least_one(split_tokens=split_tokens)
    return call._replace(metadata=metadata._replace(max_length=max_length))
