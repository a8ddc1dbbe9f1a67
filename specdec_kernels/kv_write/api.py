"""Public functions of the family: checks, then the kernel or the definition."""

import torch
from torch import Tensor

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_shape, expect_tensors
from specdec_kernels.kv_write.types import KVStore, StoreOptions, head_dim_problem
from specdec_kernels.launch import dispatch

_MODEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope: Tensor,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    interleaved: bool = False,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Normalise and rotate the queries and keys of T tokens, and store keys and values of one layer at their slots.

    The norm rounds as the Qwen3 layer of Hugging Face transformers does. The rotation is computed in float32 and
    rounded once, where that layer rounds each product.

    Args:
        q: [T, H, D]; k, v: [T, H_kv, D]. The heads of a token are adjacent, the tokens may be strided by whole heads
            (slices of one fused projection). D is a multiple of 8 from 16 to 512.
        kv: [2, pages, page_size, H_kv, D], contiguous, dtype of q or float8_e4m3fn; written in place.
        slots: [T] int64, page * page_size + offset, different where they are inside [0, pages * page_size); others,
            such as -1, store nothing.
        positions: [T] int64 rows of `rope`; a position outside the table rotates to zeros.
        rope: [max_pos, R] float32 (or float64 with a float64 pool), cosines in the first half of a row and
            sines in the second, see `rope_table`. R is even and at most D; elements from R on do not turn.
        q_norm, k_norm: [D] weights of the RMS norm over a head, or None for no norm. Both or neither.
        interleaved: pairs are elements (2 i, 2 i + 1); otherwise (i, i + R / 2), as in neox.
        k_scale, v_scale: the pool holds keys (values) divided by this, a number or [H_kv] float32. An e4m3
            pool rounds to the nearest even code and clamps magnitudes to 448.

    Returns:
        q_out [T, H, D], contiguous, dtype of q: every token's queries, also those whose slot is -1.
    """
    expect_shape("q", q, (None, None, None))
    tokens, _, head_dim = q.shape
    expect_shape("k", k, (tokens, None, head_dim))
    expect_shape("kv", kv, (2, None, None, k.shape[1], head_dim))
    store = KVStore(k, v, kv, slots, positions, rope)
    options = StoreOptions(eps, interleaved, k_scale, v_scale)
    _check_store(store, options)
    expect_dtype("q", q, k.dtype)
    _expect_adjacent_heads(q=q, k=k, v=v)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: expected both or neither, got one")
    weight = (head_dim,), _MODEL_DTYPES
    expect_tensors({"q": q, "kv": kv}, q_norm=(q_norm, *weight), k_norm=(k_norm, *weight))
    return dispatch("write_kv", __package__, impl, q)(q, store, q_norm, k_norm, options)


def materialize_kv(
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope: Tensor,
    *,
    k_norm: Tensor | None,
    eps: float,
    interleaved: bool = False,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Normalise, rotate and store the keys and values of T context tokens for all layers of a drafter at once.

    Args:
        k, v: [T, layers, H_kv, D]; the heads of a layer must be adjacent, tokens and layers may be strided by
            whole heads (slices of one stacked projection).
        kv: [layers, 2, pages, page_size, H_kv, D], dtype of k or float8_e4m3fn; written in place. Contiguous.
        slots: [T] int64; a token has the same slot in every layer. Other arguments are as in `write_kv`.
        k_norm: [layers, D] weights of the RMS norm, or None for no norm.
    """
    expect_shape("k", k, (None, None, None, None))
    _, layers, kv_heads, head_dim = k.shape
    expect_shape("kv", kv, (layers, 2, None, None, kv_heads, head_dim))
    store = KVStore(k, v, kv, slots, positions, rope)
    options = StoreOptions(eps, interleaved, k_scale, v_scale)
    _check_store(store, options)
    _expect_adjacent_heads(k=k, v=v)
    expect_tensors({"k": k}, k_norm=(k_norm, (layers, head_dim), _MODEL_DTYPES))
    dispatch("materialize_kv", __package__, impl, k)(store, k_norm, options)


def _check_store(store: KVStore, options: StoreOptions) -> None:
    k, v, kv, slots, positions, rope = store
    expect_shape("v", v, k.shape)
    head_dim = kv.shape[-1]
    if (problem := head_dim_problem(head_dim)) is not None:
        raise ValueError(f"kv: {problem}")
    expect_dtype("kv", kv, *_MODEL_DTYPES, torch.float8_e4m3fn)
    expect_dtype("k", k, *(_MODEL_DTYPES if kv.dtype == torch.float8_e4m3fn else (kv.dtype,)))
    expect_dtype("v", v, k.dtype)
    wide = (torch.float32, torch.float64) if kv.dtype == torch.float64 else (torch.float32,)
    scales = dict(k_scale=options.k_scale, v_scale=options.v_scale)
    expect_tensors(
        {"k": k, "v": v, "kv": kv},
        slots=(slots, k.shape[:1], torch.int64),
        positions=(positions, k.shape[:1], torch.int64),
        rope=(rope, (None, None), wide),
        **{name: (scale, kv.shape[-2:-1], wide) for name, scale in scales.items() if isinstance(scale, Tensor)},
    )
    expect_contiguous(kv=kv)
    if rope.shape[1] % 2 or not 2 <= rope.shape[1] <= head_dim:
        raise ValueError(f"rope: expected an even number of columns from 2 to {head_dim}, got {rope.shape[1]}")


def _expect_adjacent_heads(**tensors: Tensor) -> None:
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
