"""The loop over the keys of a float8 pool in swap-AB form, for chips whose matrix unit takes its first operand from
registers (sm90): codes are converted on the way from shared memory to the product, not written back to it.

    scores = k . q^T [keys, rows]        acc = v^T . p^T [D, rows]

Two codes of dimensions 2 d and 2 d + 1 are loaded as one 16-bit number, for which there are instructions that lay out
and transpose operands. The even and the odd dimensions are then an operand each: the scores are a sum of two products,
the output is two products.
"""

# mypy: ignore-errors
# ruff: noqa: SIM108
from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.attention import device as d

# Subtracted where a row has seen nothing: 2^-inf is zero with it, and -inf - -inf would be NaN.
_LOWEST = tl.constexpr(-1.0e30)
# Rows of a product that one warp holds, and the rows of them that one thread holds.
_WARP_ROWS = tl.constexpr(16)
_THREAD_ROWS = tl.constexpr(2)


@triton.jit
def _even_and_odd(pairs, like, FP8: tl.constexpr):
    """Numbers of the low and of the high code of each 16-bit number, in the type of `like`; as `device.widen` does."""
    if FP8 == d.FP8_NATIVE:
        even, odd = tl.inline_asm_elementwise(
            "{ .reg .b32 sorted; .reg .b16 low, high; prmt.b32 sorted, $2, $2, 0x3120; mov.b32 {low, high}, sorted; "
            "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
        # Products of float32 queries take float32 keys, of all others float16, see `device.half_queries`.
        return even.to(like.dtype), odd.to(like.dtype)
    else:
        bits = pairs.to(tl.uint16, bitcast=True)
        even = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        odd = (bits & 0x8000) | ((bits & 0x7F00) >> 1)
        return even.to(tl.float16, bitcast=True).to(like.dtype), odd.to(tl.float16, bitcast=True).to(like.dtype)


@triton.jit
def attend_keys_swap_ab(q, pool, view, score_scale, soft_cap, begin, stop, free_end, STATIC: tl.constexpr):
    """As `kernel.attend_keys`, but `top` is -1e30 for rows that saw nothing."""
    BLOCK_M: tl.constexpr = STATIC.BLOCK_M
    BLOCK_N: tl.constexpr = STATIC.BLOCK_N
    PAGE: tl.constexpr = STATIC.PAGE
    FP8: tl.constexpr = STATIC.FP8
    D_PAIRS: tl.constexpr = STATIC.D // 2
    PAIRS: tl.constexpr = STATIC.BLOCK_D // 2
    key_ptr = pool.key_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    value_ptr = pool.value_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    if view.window is not None:
        begin, free_begin = d.window_begin(view.row_position, begin, free_end, view.window, BLOCK_N)

    q_even, q_odd = tl.split(tl.reshape(q, [BLOCK_M, PAIRS, 2]))
    q_even, q_odd = tl.trans(q_even), tl.trans(q_odd)
    pairs = tl.arange(0, PAIRS)
    columns = tl.arange(0, BLOCK_N)
    top = tl.full([BLOCK_M], _LOWEST, tl.float32)
    # A sum for each thread that holds weights of a row; they are added at the end.
    total = tl.full([BLOCK_N // _WARP_ROWS, _WARP_ROWS // _THREAD_ROWS, BLOCK_M], 0.0, tl.float32)
    acc_even = tl.full([PAIRS, BLOCK_M], 0.0, tl.float32)
    acc_odd = tl.full([PAIRS, BLOCK_M], 0.0, tl.float32)
    pages = d.page_ids(pool.table_row, begin + columns, stop, PAGE)
    for start in tl.range(begin, stop, BLOCK_N):
        positions = start + columns
        places = (pages.to(tl.int64) * PAGE + positions % PAGE) * (STATIC.H_KV * D_PAIRS)
        pages = d.page_ids(pool.table_row, positions + BLOCK_N, stop, PAGE)
        stored = d.rows_and_dims(positions < stop, pairs, D_PAIRS, PAIRS)
        even, odd = _even_and_odd(tl.load(key_ptr + places[:, None] + pairs[None, :], mask=stored, other=0), q, FP8)
        scores = tl.dot(even, q_even, input_precision="ieee")
        scores = tl.dot(odd, q_odd, scores, input_precision="ieee")
        factor = score_scale
        if soft_cap is not None:
            scores = d.tanh(scores * score_scale[None, :])
            factor = score_scale * 0.0 + soft_cap
        masked = start + BLOCK_N > free_end
        if view.window is not None:
            masked = masked | (start < free_begin)
        if masked:
            seen = d.visible_in_window(view, positions, stop, STATIC.MODE, STATIC.WORDS)
            scores = tl.where(tl.trans(seen), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0) * factor)
        decay = tl.exp2(top - new_top)
        top = new_top
        weights = tl.exp2(tl.fma(scores, factor[None, :], -new_top[None, :]))
        own = tl.reshape(weights, [BLOCK_N // _WARP_ROWS, _THREAD_ROWS, _WARP_ROWS // _THREAD_ROWS, BLOCK_M])
        total = total * decay[None, None, :] + tl.sum(own, 1)
        # Loaded as the operand lies: transposed afterwards, codes would take the way through registers twice.
        stored = tl.trans(d.rows_and_dims(positions < stop, pairs, D_PAIRS, PAIRS))
        even, odd = _even_and_odd(tl.load(value_ptr + places[None, :] + pairs[:, None], mask=stored, other=0), q, FP8)
        acc_even = tl.dot(even, weights.to(q.dtype), acc_even * decay[None, :], input_precision="ieee")
        acc_odd = tl.dot(odd, weights.to(q.dtype), acc_odd * decay[None, :], input_precision="ieee")
    acc = tl.reshape(tl.join(tl.trans(acc_even), tl.trans(acc_odd)), [BLOCK_M, 2 * PAIRS])
    return top, tl.sum(tl.sum(total, 0), 0), acc
