"""Head norm, rotary embedding and paged store in one pass, for new tokens of the target and for a drafter's
context.

Between the projections and attention, every key is normalised, rotated and stored, and every query normalised
and rotated. Done one by one these are a dozen small memory-bound kernels a layer; here they are one.
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.kv_write import reference
from specdec_kernels.launch import use_triton

__all__ = ["materialize_kv", "write_kv"]


def write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    impl: str = "auto",
) -> torch.Tensor:
    """Norm and rotate T tokens' queries and keys, and store keys and values of one layer at their slots.

    Args:
        q: [T, H, D]; k, v: [T, H_kv, D]. The heads of a token must be adjacent, the tokens may be strided by
            whole heads (slices of one fused projection). D is a power of two >= 16.
        kv: [2, pages, page_size, H_kv, D], dtype of q; written in place. Contiguous.
        slots: [T] int64, page * page_size + offset; a slot outside [0, pages * page_size), such as -1, stores
            nothing. Slots that are stored must differ from each other.
        positions: [T] int64 rows of `rope`; a position outside the table rotates to zeros.
        rope: [max_pos, D] float32 (or float64 with a float64 pool), cosines in the first half of a row and
            sines in the second (neox pairing d, d + D/2).
        q_norm, k_norm: [D] weights of the RMS norm over a head, or None for no norm. Both or neither.
        eps: added to the mean square.

    Returns:
        q_out [T, H, D], contiguous, dtype of q: every token's queries, also those whose slot is -1.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit; the message names expected and actual.
    """
    expect_shape("q", q, (None, None, None))
    tokens, _, head_dim = q.shape
    expect_shape("k", k, (tokens, None, head_dim))
    expect_shape("v", v, k.shape)
    expect_shape("kv", kv, (2, None, None, k.shape[1], head_dim))
    _check_common(k, v, kv, slots, positions, rope, tokens)
    expect_dtype("q", q, kv.dtype)
    _expect_adjacent_heads(q=q, k=k, v=v)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: expected both or neither, got one")
    if q_norm is not None and k_norm is not None:
        expect_shape("q_norm", q_norm, (head_dim,))
        expect_shape("k_norm", k_norm, (head_dim,))
    expect_same_device(q=q, kv=kv, q_norm=q_norm, k_norm=k_norm)
    expect_contiguous(q_norm=q_norm, k_norm=k_norm)
    if use_triton(impl, q):
        from specdec_kernels.kv_write import kernel

        return kernel.write_kv(q, k, v, kv, slots, positions, rope, q_norm=q_norm, k_norm=k_norm, eps=eps)
    return reference.write_kv(q, k, v, kv, slots, positions, rope, q_norm=q_norm, k_norm=k_norm, eps=eps)


def materialize_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    *,
    k_norm: torch.Tensor | None,
    eps: float,
    impl: str = "auto",
) -> None:
    """Norm, rotate and store the keys and values of T context tokens for all layers of a drafter at once.

    Args:
        k, v: [T, layers, H_kv, D]; the heads of a layer must be adjacent, tokens and layers may be strided by
            whole heads (slices of one stacked projection).
        kv: [layers, 2, pages, page_size, H_kv, D], dtype of k; written in place. Contiguous.
        slots, positions, rope, eps: as in `write_kv`; a token has the same slot in every layer.
        k_norm: [layers, D] weights of the RMS norm, or None for no norm.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit; the message names expected and actual.
    """
    expect_shape("k", k, (None, None, None, None))
    tokens, layers, kv_heads, head_dim = k.shape
    expect_shape("v", v, k.shape)
    expect_shape("kv", kv, (layers, 2, None, None, kv_heads, head_dim))
    _check_common(k, v, kv, slots, positions, rope, tokens)
    _expect_adjacent_heads(k=k, v=v)
    if k_norm is not None:
        expect_shape("k_norm", k_norm, (layers, head_dim))
        expect_same_device(k=k, k_norm=k_norm)
        expect_contiguous(k_norm=k_norm)
    if use_triton(impl, k):
        from specdec_kernels.kv_write import kernel

        kernel.materialize_kv(k, v, kv, slots, positions, rope, k_norm=k_norm, eps=eps)
        return
    reference.materialize_kv(k, v, kv, slots, positions, rope, k_norm=k_norm, eps=eps)


def _check_common(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    tokens: int,
) -> None:
    head_dim = kv.shape[-1]
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"kv: expected a head dimension that is a power of two >= 16, got {head_dim}")
    expect_dtype("kv", kv, torch.float32, torch.float16, torch.bfloat16, torch.float64)
    expect_dtype("k", k, kv.dtype)
    expect_dtype("v", v, kv.dtype)
    expect_shape("slots", slots, (tokens,))
    expect_shape("positions", positions, (tokens,))
    expect_dtype("slots", slots, torch.int64)
    expect_dtype("positions", positions, torch.int64)
    expect_shape("rope", rope, (None, head_dim))
    exact = (torch.float64,) if kv.dtype == torch.float64 else ()
    expect_dtype("rope", rope, torch.float32, *exact)
    expect_same_device(k=k, v=v, kv=kv, slots=slots, positions=positions, rope=rope)
    expect_contiguous(kv=kv, slots=slots, positions=positions, rope=rope)


def _expect_adjacent_heads(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        head_dim = tensor.shape[-1]
        steps = list(zip(tensor.shape, tensor.stride(), strict=True))
        adjacent = tensor.stride(-1) == 1 and (tensor.shape[-2] == 1 or tensor.stride(-2) == head_dim)
        whole_heads = all(size == 1 or stride % head_dim == 0 for size, stride in steps[:-1])
        if tensor.numel() and not (adjacent and whole_heads):
            raise ValueError(
                f"{name}: expected adjacent heads and tokens a whole number of heads ({head_dim}) apart, "
                f"got strides {tensor.stride()}"
            )
