"""Head norm, rotary embedding and paged store as one Triton kernel for all heads of all tokens.

A program takes a tile [TOKENS, HEADS] of one kind, queries, keys or values, so that every load is full, the
table row of a token is read once for all its heads, and values are a plain copy. The rotation pairs two
elements of a head, so a head is held as three parts: the two members of its R / 2 pairs and the D - R
elements that do not turn,

    y = w * (x / sqrt(mean(x^2) + eps));   out = [y1 c - y2 s, y2 c + y1 s, y3]

with the roundings of the definition in `reference`. An e4m3 pool is written as bytes that are made here, so
that chips without the conversion, and the interpreter, store the same codes. Bound by memory: every element
is read and written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, launch

_INTERPRETER_ROWS = 2048
_GPU_ROWS = 32
_GPU_FEW_ROWS = 16  # more programs where a decode step has few tokens
_FEW_TOKENS = 256
_GPU_MAX_HEADS = 8
_GPU_WARPS = 4


@triton.jit
def to_e4m3(x):
    """Codes of float32 x in float8 e4m3 without infinities: nearest even, 448 at most, NaN stays NaN."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # Normal numbers: round the mantissa to three bits, then move the bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, which is the spacing of float32 from 2^14 on.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return (tl.where(x == x, code, 0x7F) | sign).to(tl.uint8)


@triton.jit
def _as_stored(x, scale, DTYPE: tl.constexpr):
    """Float32 x as the pool holds it: divided by the scale if there is one, then rounded."""
    if scale is not None:
        x = tl.div_rn(x, scale)
    if tl.uint8 == DTYPE:
        stored = to_e4m3(x)
    else:
        stored = x.to(DTYPE)
    return stored


@triton.jit
def _load_part(head_ptr, mask, START: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Elements START to START + WIDTH of each head as float32 [TOKENS, HEADS, BLOCK]."""
    dims = tl.arange(0, BLOCK)[None, None, :]
    inside = mask[:, :, None] & (dims < WIDTH)
    return tl.load(head_ptr[:, :, None] + START + dims, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_part(head_ptr, mask, part, scale, START: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    dims = tl.arange(0, BLOCK)[None, None, :]
    inside = mask[:, :, None] & (dims < WIDTH)
    stored = _as_stored(part, scale, head_ptr.dtype.element_ty)
    tl.store(head_ptr[:, :, None] + START + dims, stored, mask=inside)


@triton.jit
def _load_pairs(head_ptr, mask, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """First and second members of each head's pairs, [TOKENS, HEADS, HALF_BLOCK] float32."""
    if INTERLEAVED:
        both = _load_part(head_ptr, mask, 0, 2 * HALF, 2 * HALF_BLOCK)
        paired = tl.reshape(both, (both.shape[0], both.shape[1], HALF_BLOCK, 2))
        first, second = tl.split(paired)
    else:
        first = _load_part(head_ptr, mask, 0, HALF, HALF_BLOCK)
        second = _load_part(head_ptr, mask, HALF, HALF, HALF_BLOCK)
    return first, second


@triton.jit
def _store_pairs(
    head_ptr, mask, first, second, scale, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):
    if INTERLEAVED:
        both = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * HALF_BLOCK))
        _store_part(head_ptr, mask, both, scale, 0, 2 * HALF, 2 * HALF_BLOCK)
    else:
        _store_part(head_ptr, mask, first, scale, 0, HALF, HALF_BLOCK)
        _store_part(head_ptr, mask, second, scale, HALF, HALF, HALF_BLOCK)


@triton.jit
def _load_weight(norm_ptr, START: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Every STEP-th weight from START on, as [1, 1, BLOCK] float32."""
    dims = tl.arange(0, BLOCK)
    weight = tl.load(norm_ptr + START + STEP * dims, mask=dims < WIDTH, other=0.0)
    return weight.to(tl.float32)[None, None, :]


@triton.jit
def _weighted(part, scale, weight, DTYPE: tl.constexpr):
    """The two roundings of the norm: to the model's dtype after the scaling and after the weight."""
    return ((part * scale).to(DTYPE).to(tl.float32) * weight).to(DTYPE).to(tl.float32)


@triton.jit
def _turn_and_store(
    in_ptr,  # [TOKENS, HEADS] pointers to heads
    out_ptr,  # [TOKENS, HEADS] pointers to where they go
    seen,  # [TOKENS, HEADS] heads that are read
    mine,  # [TOKENS, HEADS] heads that are written
    norm_ptr,  # pointer to [D] weights or None
    rope_ptr,  # [max_pos, 2 * HALF] float32
    position,  # [TOKENS] int64
    max_pos,
    eps,
    scale,  # of the pool, or None
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Norm and rotate a tile of queries or keys."""
    REST: tl.constexpr = D - 2 * HALF
    first, second = _load_pairs(in_ptr, seen, HALF, HALF_BLOCK, INTERLEAVED)
    if REST > 0:
        rest = _load_part(in_ptr, seen, 2 * HALF, REST, REST_BLOCK)
    if norm_ptr is not None:
        total = tl.sum(first * first, 2) + tl.sum(second * second, 2)
        if REST > 0:
            total += tl.sum(rest * rest, 2)
        unit = (1.0 / tl.sqrt(total / D + eps))[:, :, None]
        STEP: tl.constexpr = 2 if INTERLEAVED else 1
        SECOND: tl.constexpr = 1 if INTERLEAVED else HALF
        dtype: tl.constexpr = in_ptr.dtype.element_ty
        first = _weighted(first, unit, _load_weight(norm_ptr, 0, STEP, HALF, HALF_BLOCK), dtype)
        second = _weighted(second, unit, _load_weight(norm_ptr, SECOND, STEP, HALF, HALF_BLOCK), dtype)
        if REST > 0:
            rest = _weighted(rest, unit, _load_weight(norm_ptr, 2 * HALF, 1, REST, REST_BLOCK), dtype)
    known = (position >= 0) & (position < max_pos)
    row = rope_ptr + tl.where(known, position, 0)[:, None] * (2 * HALF)
    cos = _load_part(row, known[:, None], 0, HALF, HALF_BLOCK)
    sin = _load_part(row, known[:, None], HALF, HALF, HALF_BLOCK)
    _store_pairs(
        out_ptr, mine, first * cos - second * sin, second * cos + first * sin, scale, HALF, HALF_BLOCK,
        INTERLEAVED,
    )  # fmt: skip
    if REST > 0:
        _store_part(out_ptr, mine, rest, scale, 2 * HALF, REST, REST_BLOCK)


@triton.jit
def _head_scale(scale, scale_ptr, head, HEADS: tl.constexpr):
    """Scale of each head [1, HEADS, 1], one for all heads, or None."""
    if scale_ptr is not None:
        found = tl.load(scale_ptr + head, mask=head < HEADS, other=1.0).to(tl.float32)[None, :, None]
    else:
        found = scale
    return found


@triton.jit
def _turn_heads(
    in_ptr,
    out_ptr,
    in_row,  # [TOKENS] first head of each token at in_ptr
    out_row,  # [TOKENS] first head of each token at out_ptr
    here,  # [TOKENS] tokens that are read; not those that are written, whose slots would have to come first
    kept,  # [TOKENS] tokens that are written
    head,  # [HEADS]
    norm_ptr,
    rope_ptr,
    position,
    max_pos,
    eps,
    scale,
    scale_ptr,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Queries or keys of a tile from where they lie to where they go."""
    exists = (head < NUM_HEADS)[None, :]
    from_ptr = in_ptr + (in_row[:, None] + head[None, :]) * D
    to_ptr = out_ptr + (out_row[:, None] + head[None, :]) * D
    pool_scale = _head_scale(scale, scale_ptr, head, NUM_HEADS)
    _turn_and_store(
        from_ptr, to_ptr, here[:, None] & exists, kept[:, None] & exists, norm_ptr, rope_ptr, position, max_pos,
        eps, pool_scale, D, HALF, HALF_BLOCK, REST_BLOCK, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _copy_heads(
    in_ptr,
    out_ptr,
    in_row,
    out_row,
    here,
    kept,
    head,
    scale,
    scale_ptr,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
):
    """Values of a tile, with the arguments of `_turn_heads`."""
    exists = (head < NUM_HEADS)[None, :]
    from_ptr = in_ptr + (in_row[:, None] + head[None, :]) * D
    to_ptr = out_ptr + (out_row[:, None] + head[None, :]) * D
    pool_scale = _head_scale(scale, scale_ptr, head, NUM_HEADS)
    values = _load_part(from_ptr, here[:, None] & exists, 0, D, D_BLOCK)
    _store_part(to_ptr, kept[:, None] & exists, values, pool_scale, 0, D, D_BLOCK)


@triton.jit(do_not_specialize=["tokens", "num_slots", "max_pos", "q_stride", "k_stride", "v_stride"])
def _write_kv_kernel(
    q_ptr,  # [T, H, D], tokens q_stride heads apart
    k_ptr,  # [T, H_KV, D], tokens k_stride heads apart
    v_ptr,  # [T, H_KV, D], tokens v_stride heads apart
    kv_ptr,  # [2, num_slots, H_KV, D]
    out_ptr,  # [T, H, D]
    slots_ptr,  # [T] int64
    positions_ptr,  # [T] int64
    rope_ptr,  # [max_pos, 2 * HALF] float32
    q_norm_ptr,  # [D] or None
    k_norm_ptr,  # [D] or None
    k_scale_ptr,  # [H_KV] float32 or None
    v_scale_ptr,  # [H_KV] float32 or None
    tokens,
    num_slots,
    max_pos,
    q_stride,
    k_stride,
    v_stride,
    eps,
    k_scale,  # for all heads, or None
    v_scale,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (H_KV + HEADS - 1) // HEADS
    block = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    position = tl.load(positions_ptr + token, mask=here, other=0)
    slot = tl.load(slots_ptr + token, mask=here, other=-1)
    placed = here & (slot >= 0) & (slot < num_slots)
    kv_row = tl.where(placed, slot, 0) * H_KV
    lane = tl.arange(0, HEADS)
    if block < Q_BLOCKS:
        _turn_heads(
            q_ptr, out_ptr, token * q_stride, token * H, here, here, block * HEADS + lane, q_norm_ptr, rope_ptr,
            position, max_pos, eps, None, None, H, D, HALF, HALF_BLOCK, REST_BLOCK, INTERLEAVED,
        )  # fmt: skip
    elif block < Q_BLOCKS + KV_BLOCKS:
        _turn_heads(
            k_ptr, kv_ptr, token * k_stride, kv_row, here, placed, (block - Q_BLOCKS) * HEADS + lane, k_norm_ptr,
            rope_ptr, position, max_pos, eps, k_scale, k_scale_ptr, H_KV, D, HALF, HALF_BLOCK, REST_BLOCK,
            INTERLEAVED,
        )  # fmt: skip
    else:
        _copy_heads(
            v_ptr, kv_ptr, token * v_stride, num_slots.to(tl.int64) * H_KV + kv_row, here, placed,
            (block - Q_BLOCKS - KV_BLOCKS) * HEADS + lane, v_scale, v_scale_ptr, H_KV, D, D_BLOCK,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "tokens",
        "width",
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
    counts_ptr,  # [T / width] int32 or None
    rope_ptr,  # [max_pos, 2 * HALF] float32
    k_norm_ptr,  # [LAYERS, D] or None
    k_scale_ptr,  # [H_KV] float32 or None
    v_scale_ptr,  # [H_KV] float32 or None
    tokens,
    width,
    num_slots,
    max_pos,
    k_stride,
    k_layer_stride,
    v_stride,
    v_layer_stride,
    eps,
    k_scale,  # for all heads, or None
    v_scale,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    KV_BLOCKS: tl.constexpr = (H_KV + HEADS - 1) // HEADS
    block = tl.program_id(1) % KV_BLOCKS
    is_v = tl.program_id(1) // KV_BLOCKS % 2
    layer = (tl.program_id(1) // (2 * KV_BLOCKS)).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    if counts_ptr is not None:
        request = token.to(tl.int32) // width
        here = here & (token - request * width < tl.load(counts_ptr + request, mask=here, other=0))
    slot = tl.load(slots_ptr + token, mask=here, other=-1)
    placed = here & (slot >= 0) & (slot < num_slots)
    head = block * HEADS + tl.arange(0, HEADS)
    kv_row = ((layer * 2 + is_v) * num_slots + tl.where(placed, slot, 0)) * H_KV
    if is_v == 0:
        position = tl.load(positions_ptr + token, mask=here, other=0)
        _turn_heads(
            k_ptr, kv_ptr, token * k_stride + layer * k_layer_stride, kv_row, here, placed, head,
            None if k_norm_ptr is None else k_norm_ptr + layer * D, rope_ptr, position, max_pos, eps, k_scale,
            k_scale_ptr, H_KV, D, HALF, HALF_BLOCK, REST_BLOCK, INTERLEAVED,
        )  # fmt: skip
    else:
        _copy_heads(
            v_ptr, kv_ptr, token * v_stride + layer * v_layer_stride, kv_row, here, placed, head, v_scale,
            v_scale_ptr, H_KV, D, D_BLOCK,
        )  # fmt: skip


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
    interleaved: bool = False,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """See `specdec_kernels.kv_write.write_kv`, which has checked the arguments."""
    _refuse_float64(kv)
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    out = q.new_empty(q.shape)
    tile = _tile(q, tokens, heads, kv_heads)
    blocks = -(-heads // tile["HEADS"]) + 2 * -(-kv_heads // tile["HEADS"])
    (k_tensor, k_number), (v_tensor, v_number) = _split_scale(k_scale), _split_scale(v_scale)
    launch(
        _write_kv_kernel,
        (-(-tokens // tile["TOKENS"]), blocks),
        *(q, k, v, _as_bytes(kv), out, slots, positions, rope, q_norm, k_norm, k_tensor, v_tensor),
        *(tokens, kv.shape[1] * kv.shape[2], rope.shape[0], *_head_strides(q, k, v), eps, k_number, v_number),
        num_warps=_GPU_WARPS,
        num_stages=1,
        H=heads,
        H_KV=kv_heads,
        INTERLEAVED=interleaved,
        **_head_parts(head_dim, rope.shape[1]),
        **tile,
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
    counts: torch.Tensor | None = None,
    interleaved: bool = False,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
) -> None:
    """See `specdec_kernels.kv_write.materialize_kv`, which has checked the arguments."""
    _refuse_float64(kv)
    tokens, layers, kv_heads, head_dim = k.shape
    tile = _tile(k, tokens, kv_heads, kv_heads)
    width = 1 if counts is None else tokens // max(counts.shape[0], 1)
    (k_tensor, k_number), (v_tensor, v_number) = _split_scale(k_scale), _split_scale(v_scale)
    launch(
        _materialize_kv_kernel,
        (-(-tokens // tile["TOKENS"]), layers * 2 * -(-kv_heads // tile["HEADS"])),
        *(k, v, _as_bytes(kv), slots, positions, counts, rope, k_norm, k_tensor, v_tensor),
        *(tokens, width, kv.shape[2] * kv.shape[3], rope.shape[0]),
        *(*_head_strides(k, v), eps, k_number, v_number),
        num_warps=_GPU_WARPS,
        num_stages=1,
        H_KV=kv_heads,
        INTERLEAVED=interleaved,
        **_head_parts(head_dim, rope.shape[1]),
        **tile,
    )


def _tile(tensor: torch.Tensor, tokens: int, heads: int, kv_heads: int) -> dict[str, int]:
    """Tokens and heads of a program: all there are in the interpreter, where only the number of programs
    costs."""
    if current_chip(tensor) == "interpreter":
        block = _lanes(max(heads, kv_heads))
        return dict(TOKENS=_lanes(min(tokens, max(2, _INTERPRETER_ROWS // block))), HEADS=block)
    block = min(_lanes(kv_heads), _GPU_MAX_HEADS)
    rows = _GPU_FEW_ROWS if tokens <= _FEW_TOKENS else _GPU_ROWS
    return dict(TOKENS=max(2, rows // block), HEADS=block)


def _head_parts(head_dim: int, rotary_dim: int) -> dict[str, int]:
    """Widths of the parts of a head and the powers of two that cover them."""
    return dict(
        D=head_dim,
        HALF=rotary_dim // 2,
        HALF_BLOCK=_lanes(rotary_dim // 2),
        REST_BLOCK=_lanes(head_dim - rotary_dim),
        D_BLOCK=_lanes(head_dim),
    )


def _lanes(count: int) -> int:
    """Power of two that covers `count`; two at least, which every Triton compiler takes."""
    return max(2, triton.next_power_of_2(max(count, 1)))


def _split_scale(scale: float | torch.Tensor | None) -> tuple[torch.Tensor | None, Any]:
    """A scale as (per head, for all heads)."""
    return (scale, None) if isinstance(scale, torch.Tensor) else (None, scale)


def _as_bytes(kv: torch.Tensor) -> torch.Tensor:
    return kv.view(torch.uint8) if kv.dtype == torch.float8_e4m3fn else kv


def _head_strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Strides before the head axis in heads: the compiler then sees that every head begins aligned."""
    return tuple(stride // tensor.shape[-1] for tensor in tensors for stride in tensor.stride()[:-2])


def _refuse_float64(kv: torch.Tensor) -> None:
    if kv.dtype == torch.float64:
        raise ValueError(
            "kv: the kernel takes float32, float16, bfloat16 and float8_e4m3fn, got float64; use impl='reference'"
        )
