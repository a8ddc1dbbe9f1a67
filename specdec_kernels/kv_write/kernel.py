"""Head norm, rotary embedding and paged store as one Triton kernel for all heads of all tokens.

A program takes a tile [TOKENS, HEADS] of one kind, queries, keys or values, so that every load is full, the
table row of a token is read once for all its heads, and values are a plain copy. The rotation pairs two
elements of a head, so a head is held as three parts: the two members of its R / 2 pairs and the D - R
elements that do not turn,

    y = w * (x / sqrt(mean(x^2) + eps));   out = [y1 c - y2 s, y2 c + y1 s, y3]

with the roundings of the definition in `reference`. The bytes of an e4m3 pool are computed here, so that chips without
the conversion, and the interpreter, store the same codes. Both public functions launch the same kernel: `write_kv` is
one layer with queries, `materialize_kv` several without.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.kv_write.types import KVStore, StoreOptions
from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.pdl import begin

_STRIDES = ["q_stride", "k_stride", "k_layer_stride", "v_stride", "v_layer_stride"]
_VARYING = ["tokens", "num_slots", "max_pos", *_STRIDES]
_INTERPRETER_ROWS = 2048
_ROWS = 16
_MAX_HEADS = 8


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
def _load_part(head_ptr, mask, START: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Elements START to START + WIDTH of each head as float32 [TOKENS, HEADS, BLOCK]."""
    dims = tl.arange(0, BLOCK)[None, None, :]
    inside = mask[:, :, None] & (dims < WIDTH)
    return tl.load(head_ptr[:, :, None] + START + dims, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_part(head_ptr, mask, part, scale, START: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store float32 elements as the pool holds them: divided by the scale if there is one, then rounded."""
    dims = tl.arange(0, BLOCK)[None, None, :]
    inside = mask[:, :, None] & (dims < WIDTH)
    if scale is not None:
        part = tl.div_rn(part, scale)
    if head_ptr.dtype.element_ty == tl.uint8:
        part = to_e4m3(part)
    tl.store(head_ptr[:, :, None] + START + dims, part, mask=inside)


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
def _head_scale(scale, head, BY_HEAD: tl.constexpr, HEADS: tl.constexpr):
    """`scale` for each head [1, HEADS, 1] where it points to [HEADS] float32, else the number or None that it is."""
    if BY_HEAD:
        found = tl.load(scale + head, mask=head < HEADS, other=1.0).to(tl.float32)[None, :, None]
    else:
        found = scale
    return found


@triton.jit
def _turn_heads(
    in_ptr,  # [*, D] heads
    out_ptr,  # [*, D] heads
    in_row,  # [TOKENS] first head of each token at in_ptr
    out_row,  # [TOKENS] first head of each token at out_ptr
    here,  # [TOKENS] tokens that are read, before their slots are known
    kept,  # [TOKENS] tokens that are written
    head,  # [HEADS]
    norm_ptr,  # [D] weights, or None
    rope_ptr,  # [max_pos, 2 * HALF] float32
    position,  # [TOKENS] int64
    max_pos,
    eps,
    scale,
    BY_HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Move the queries or keys of a tile to their place, normalised and rotated; `scale` as in `_head_scale`."""
    exists = (head < NUM_HEADS)[None, :]
    from_ptr = in_ptr + (in_row[:, None] + head[None, :]) * D
    to_ptr = out_ptr + (out_row[:, None] + head[None, :]) * D
    seen = here[:, None] & exists
    mine = kept[:, None] & exists
    REST: tl.constexpr = D - 2 * HALF
    first, second = _load_pairs(from_ptr, seen, HALF, HALF_BLOCK, INTERLEAVED)
    if REST > 0:
        rest = _load_part(from_ptr, seen, 2 * HALF, REST, REST_BLOCK)
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
    turned, other = first * cos - second * sin, second * cos + first * sin
    head_scale = _head_scale(scale, head, BY_HEAD, NUM_HEADS)
    _store_pairs(to_ptr, mine, turned, other, head_scale, HALF, HALF_BLOCK, INTERLEAVED)
    if REST > 0:
        _store_part(to_ptr, mine, rest, head_scale, 2 * HALF, REST, REST_BLOCK)


@triton.jit
def _copy_heads(
    in_ptr, out_ptr, in_row, out_row, here, kept, head, scale,
    BY_HEAD: tl.constexpr, NUM_HEADS: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    """Move the values of a tile to their place; arguments as in `_turn_heads`."""
    exists = (head < NUM_HEADS)[None, :]
    from_ptr = in_ptr + (in_row[:, None] + head[None, :]) * D
    to_ptr = out_ptr + (out_row[:, None] + head[None, :]) * D
    values = _load_part(from_ptr, here[:, None] & exists, 0, D, D_BLOCK)
    _store_part(to_ptr, kept[:, None] & exists, values, _head_scale(scale, head, BY_HEAD, NUM_HEADS), 0, D, D_BLOCK)


@triton.jit(do_not_specialize=_VARYING)
def _kv_write_kernel(
    q_ptr,  # [T, H, D], tokens q_stride heads apart; None where H is 0
    out_ptr,  # [T, H, D], or None
    store,  # KVStore: tokens of k and v lie k_stride and v_stride heads apart, layers k_layer_stride and v_layer_stride
    q_norm_ptr,  # [D], or None
    k_norm_ptr,  # [LAYERS, D], or None
    k_scale,  # of the pool: [H_KV] float32, a number for all heads, or None
    v_scale,
    tokens,
    num_slots,
    max_pos,
    q_stride,
    k_stride,
    k_layer_stride,
    v_stride,
    v_layer_stride,
    eps,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    K_BY_HEAD: tl.constexpr,
    V_BY_HEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (H_KV + HEADS - 1) // HEADS
    block = tl.program_id(1)
    lane = tl.arange(0, HEADS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    position = tl.load(store.positions + token, mask=here, other=0)
    if block < Q_BLOCKS:
        if H > 0:
            _turn_heads(
                q_ptr, out_ptr, token * q_stride, token * H, here, here, block * HEADS + lane, q_norm_ptr, store.rope,
                position, max_pos, eps, None, False, H, D, HALF, HALF_BLOCK, REST_BLOCK, INTERLEAVED,
            )  # fmt: skip
    else:
        kv_block = block - Q_BLOCKS
        head = kv_block % KV_BLOCKS * HEADS + lane
        is_v = kv_block // KV_BLOCKS % 2
        layer = (kv_block // (2 * KV_BLOCKS)).to(tl.int64)
        slot = tl.load(store.slots + token, mask=here, other=-1)
        placed = here & (slot >= 0) & (slot < num_slots)
        kv_row = ((layer * 2 + is_v) * num_slots + tl.where(placed, slot, 0)) * H_KV
        if is_v == 0:
            _turn_heads(
                store.k, store.kv, token * k_stride + layer * k_layer_stride, kv_row, here, placed, head,
                None if k_norm_ptr is None else k_norm_ptr + layer * D, store.rope, position, max_pos, eps, k_scale,
                K_BY_HEAD, H_KV, D, HALF, HALF_BLOCK, REST_BLOCK, INTERLEAVED,
            )  # fmt: skip
        else:
            _copy_heads(
                store.v, store.kv, token * v_stride + layer * v_layer_stride, kv_row, here, placed, head, v_scale,
                V_BY_HEAD, H_KV, D, D_BLOCK,
            )  # fmt: skip


def write_kv(q: Tensor, store: KVStore, q_norm: Tensor | None, k_norm: Tensor | None, options: StoreOptions) -> Tensor:
    out = q.new_empty(q.shape)
    _launch(q, out, q_norm, store.with_layer_axis(), None if k_norm is None else k_norm[None], options)
    return out


def materialize_kv(store: KVStore, k_norm: Tensor | None, options: StoreOptions) -> None:
    _launch(None, None, None, store, k_norm, options)


def _launch(
    q: Tensor | None,
    out: Tensor | None,
    q_norm: Tensor | None,
    store: KVStore,
    k_norm: Tensor | None,
    options: StoreOptions,
) -> None:
    """q, out: [T, H, D] or None."""
    k, v, kv, rope = store.k, store.v, store.kv, store.rope
    eps, interleaved, k_scale, v_scale = options
    tokens, layers, kv_heads, head_dim = k.shape
    heads = 0 if q is None else q.shape[1]
    half = rope.shape[1] // 2
    block = _tile(current_chip(k), tokens, heads, kv_heads)
    blocks = triton.cdiv(heads, block["HEADS"]) + layers * 2 * triton.cdiv(kv_heads, block["HEADS"])
    q_stride = 0 if q is None else q.stride(0) // head_dim
    launch(
        _kv_write_kernel,
        (triton.cdiv(tokens, block["TOKENS"]), blocks),
        *(q, out, store._replace(kv=kv.view(torch.uint8) if kv.dtype == torch.float8_e4m3fn else kv)),
        *(q_norm, k_norm, k_scale, v_scale),
        *(tokens, kv.shape[2] * kv.shape[3], rope.shape[0]),
        # Strides in heads: the compiler then sees that every head begins aligned.
        *(q_stride, *(stride // head_dim for side in (k, v) for stride in side.stride()[:2])),
        eps,
        num_stages=1,
        H=heads,
        H_KV=kv_heads,
        D=head_dim,
        HALF=half,
        HALF_BLOCK=lanes(half),
        REST_BLOCK=lanes(head_dim - 2 * half),
        D_BLOCK=lanes(head_dim),
        INTERLEAVED=interleaved,
        K_BY_HEAD=isinstance(k_scale, Tensor),
        V_BY_HEAD=isinstance(v_scale, Tensor),
        **block,
    )


def _tile(chip: str, tokens: int, heads: int, kv_heads: int) -> dict[str, int]:
    """TOKENS and HEADS of a program. On a GPU the number of tokens does not matter: how a tile lies in the registers
    decides the order in which the squares of a head are added, and a token has the same bits among any others. The
    interpreter takes all heads, because only the number of programs costs."""
    if chip == "interpreter":
        block = lanes(max(heads, kv_heads))
        return dict(TOKENS=lanes(min(tokens, max(2, _INTERPRETER_ROWS // block))), HEADS=block)
    block = min(lanes(kv_heads), _MAX_HEADS)
    return dict(TOKENS=max(2, _ROWS // block), HEADS=block)
