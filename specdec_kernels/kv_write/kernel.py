"""Head norm, rotary embedding and paged store as one Triton kernel for all heads of all tokens.

A row is one head of one token: its query, key or value heads side by side for `write_kv`, the key and value
heads of every layer for `materialize_kv`. A program takes a tile of rows, each as two halves [ROWS, D/2],
because the rotation pairs element d with d + D/2 and so needs no shuffle:

    y = w * (x / sqrt(mean(x^2) + eps));   out = [y1 c - y2 s, y2 c + y1 s]

with the roundings of the definition in `reference`. Bound by memory: every element is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, launch

_INTERPRETER_MAX_ROWS = 2048
_GPU_ROWS = 16
_GPU_WARPS = 4


@triton.jit
def _load_halves(row_ptr, mask, HALF: tl.constexpr):
    """First and second half [ROWS, HALF] of each row, in float32."""
    dims = tl.arange(0, HALF)
    pointers = row_ptr[:, None] + dims[None, :]
    first = tl.load(pointers, mask=mask[:, None], other=0.0)
    second = tl.load(pointers + HALF, mask=mask[:, None], other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_halves(row_ptr, mask, first, second, HALF: tl.constexpr):
    dims = tl.arange(0, HALF)
    pointers = row_ptr[:, None] + dims[None, :]
    dtype = row_ptr.dtype.element_ty
    tl.store(pointers, first.to(dtype), mask=mask[:, None])
    tl.store(pointers + HALF, second.to(dtype), mask=mask[:, None])


@triton.jit
def _norm(first, second, weight_first, weight_second, eps, DTYPE: tl.constexpr, HALF: tl.constexpr):
    """RMS norm over both halves, rounded to the model's dtype after the scaling and after the weight."""
    mean_square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
    scale = (1.0 / tl.sqrt(mean_square + eps))[:, None]
    first = ((first * scale).to(DTYPE).to(tl.float32) * weight_first).to(DTYPE).to(tl.float32)
    second = ((second * scale).to(DTYPE).to(tl.float32) * weight_second).to(DTYPE).to(tl.float32)
    return first, second


@triton.jit
def _rotate(first, second, rope_ptr, position, max_pos, mask, HALF: tl.constexpr):
    """Neox rotation by the table row of each position, to zeros outside the table."""
    known = mask & (position >= 0) & (position < max_pos)
    cos, sin = _load_halves(rope_ptr + position * (2 * HALF), known, HALF)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["tokens", "num_slots", "max_pos", "q_stride", "k_stride", "v_stride"])
def _write_kv_kernel(
    q_ptr,  # [T, H, D], tokens q_stride heads apart
    k_ptr,  # [T, H_KV, D], tokens k_stride heads apart
    v_ptr,  # [T, H_KV, D], tokens v_stride heads apart
    kv_ptr,  # [2, num_slots, H_KV, D]
    out_ptr,  # [T, H, D]
    slots_ptr,  # [T] int64
    positions_ptr,  # [T] int64
    rope_ptr,  # [max_pos, D] float32
    q_norm_ptr,  # [D] or None
    k_norm_ptr,  # [D] or None
    tokens,
    num_slots,
    max_pos,
    q_stride,
    k_stride,
    v_stride,
    eps,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    D: tl.constexpr = 2 * HALF
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // (H + 2 * H_KV)
    head = row % (H + 2 * H_KV)
    valid = token < tokens
    is_q = valid & (head < H)
    is_k = valid & (head >= H) & (head < H + H_KV)
    is_v = valid & (head >= H + H_KV)
    q_head = tl.where(is_q, head, 0)
    kv_head = tl.where(is_q, 0, (head - H) % H_KV)

    q_first, q_second = _load_halves(q_ptr + (token * q_stride + q_head) * D, is_q, HALF)
    k_first, k_second = _load_halves(k_ptr + (token * k_stride + kv_head) * D, is_k, HALF)
    v_first, v_second = _load_halves(v_ptr + (token * v_stride + kv_head) * D, is_v, HALF)
    first = q_first + k_first
    second = q_second + k_second
    if q_norm_ptr is not None:
        no_stride = tl.zeros_like(row)
        q_weight_first, q_weight_second = _load_halves(q_norm_ptr + no_stride, is_q, HALF)
        k_weight_first, k_weight_second = _load_halves(k_norm_ptr + no_stride, is_k, HALF)
        first, second = _norm(
            first,
            second,
            q_weight_first + k_weight_first,
            q_weight_second + k_weight_second,
            eps,
            q_ptr.dtype.element_ty,
            HALF,
        )
    position = tl.load(positions_ptr + token, mask=valid, other=0)
    first, second = _rotate(first, second, rope_ptr, position, max_pos, is_q | is_k, HALF)

    _store_halves(out_ptr + (token * H + q_head) * D, is_q, first, second, HALF)
    slot = tl.load(slots_ptr + token, mask=valid, other=-1)
    stored = (is_k | is_v) & (slot >= 0) & (slot < num_slots)
    plane = tl.where(is_v, num_slots.to(tl.int64), 0)
    kv_row = kv_ptr + ((plane + slot) * H_KV + kv_head) * D
    _store_halves(
        kv_row,
        stored,
        tl.where(is_v[:, None], v_first, first),
        tl.where(is_v[:, None], v_second, second),
        HALF,
    )


@triton.jit(
    do_not_specialize=[
        "tokens",
        "num_slots",
        "max_pos",
        "k_stride",
        "k_layer_stride",
        "v_stride",
        "v_layer_stride",
    ]
)
def _materialize_kv_kernel(
    k_ptr,  # [T, LAYERS, H_KV, D], tokens k_stride and layers k_layer_stride heads apart
    v_ptr,  # [T, LAYERS, H_KV, D], tokens v_stride and layers v_layer_stride heads apart
    kv_ptr,  # [LAYERS, 2, num_slots, H_KV, D]
    slots_ptr,  # [T] int64
    positions_ptr,  # [T] int64
    rope_ptr,  # [max_pos, D] float32
    k_norm_ptr,  # [LAYERS, D] or None
    tokens,
    num_slots,
    max_pos,
    k_stride,
    k_layer_stride,
    v_stride,
    v_layer_stride,
    eps,
    LAYERS: tl.constexpr,
    H_KV: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    D: tl.constexpr = 2 * HALF
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = row % H_KV
    is_v = row // H_KV % 2 == 1
    layer = row // (2 * H_KV) % LAYERS
    token = row // (2 * H_KV * LAYERS)
    valid = token < tokens
    slot = tl.load(slots_ptr + token, mask=valid, other=-1)
    stored = valid & (slot >= 0) & (slot < num_slots)
    is_k = stored & (row // H_KV % 2 == 0)

    k_row = k_ptr + (token * k_stride + layer * k_layer_stride + head) * D
    first, second = _load_halves(k_row, is_k, HALF)
    v_row = v_ptr + (token * v_stride + layer * v_layer_stride + head) * D
    v_first, v_second = _load_halves(v_row, stored & is_v, HALF)
    if k_norm_ptr is not None:
        weight_first, weight_second = _load_halves(k_norm_ptr + layer * D, is_k, HALF)
        first, second = _norm(first, second, weight_first, weight_second, eps, k_ptr.dtype.element_ty, HALF)
    position = tl.load(positions_ptr + token, mask=valid, other=0)
    first, second = _rotate(first, second, rope_ptr, position, max_pos, is_k, HALF)

    plane = (layer * 2 + tl.where(is_v, 1, 0)) * num_slots
    kv_row = kv_ptr + ((plane + slot) * H_KV + head) * D
    _store_halves(
        kv_row,
        stored,
        tl.where(is_v[:, None], v_first, first),
        tl.where(is_v[:, None], v_second, second),
        HALF,
    )


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
) -> torch.Tensor:
    """See `specdec_kernels.kv_write.write_kv`, which has checked the arguments."""
    _refuse_float64(kv)
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    out = q.new_empty(q.shape)
    rows = tokens * (heads + 2 * kv_heads)
    tile = _tile_rows(q, rows)
    launch(
        _write_kv_kernel,
        (-(-rows // tile),),
        *(q, k, v, kv, out, slots, positions, rope, q_norm, k_norm),
        *(tokens, kv.shape[1] * kv.shape[2], rope.shape[0], *_head_strides(q, k, v), eps),
        num_warps=_GPU_WARPS,
        num_stages=1,
        H=heads,
        H_KV=kv_heads,
        HALF=head_dim // 2,
        ROWS=tile,
    )
    return out


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
) -> None:
    """See `specdec_kernels.kv_write.materialize_kv`, which has checked the arguments."""
    _refuse_float64(kv)
    tokens, layers, kv_heads, head_dim = k.shape
    rows = tokens * layers * 2 * kv_heads
    tile = _tile_rows(k, rows)
    launch(
        _materialize_kv_kernel,
        (-(-rows // tile),),
        *(k, v, kv, slots, positions, rope, k_norm),
        *(tokens, kv.shape[2] * kv.shape[3], rope.shape[0]),
        *(*_head_strides(k, v), eps),
        num_warps=_GPU_WARPS,
        num_stages=1,
        LAYERS=layers,
        H_KV=kv_heads,
        HALF=head_dim // 2,
        ROWS=tile,
    )


def _tile_rows(tensor: torch.Tensor, rows: int) -> int:
    """Rows of a program: all there are in the interpreter, where only the number of programs costs."""
    if current_chip(tensor) != "interpreter":
        return _GPU_ROWS
    return min(_INTERPRETER_MAX_ROWS, 1 << max(0, rows - 1).bit_length())


def _head_strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Strides before the head axis in heads: the compiler then sees that every head begins aligned."""
    return tuple(stride // tensor.shape[-1] for tensor in tensors for stride in tensor.stride()[:-2])


def _refuse_float64(kv: torch.Tensor) -> None:
    if kv.dtype == torch.float64:
        raise ValueError(
            "kv: the kernel takes float32, float16 and bfloat16, got float64; use impl='reference'"
        )
