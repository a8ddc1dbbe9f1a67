# mypy: ignore-errors
"""Norm of the latent, rotary embedding and paged store as one Triton kernel.

The first program of a token tile normalises the latents, rotates the shared keys and stores both; the others rotate the
queries, a block of heads each. Rotated members are written as halves, whichever way they are paired in the input:
scores are sums over pairs, so the order does not matter where queries and keys share it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.mla.configs import write_tile
from specdec_kernels.mla.types import LatentStore
from specdec_kernels.pdl import begin

_VARYING = ["tokens", "num_slots", "max_pos", "q_stride", "q_head_stride", "kv_stride"]


@triton.jit
def _rotate(x_ptr, here, cos, sin, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both members of the pairs at `x_ptr` [TOKENS, HEADS], rotated: [TOKENS, HEADS, HALF_BLOCK] float32 each."""
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    SECOND: tl.constexpr = 1 if INTERLEAVED else HALF
    pair = tl.arange(0, HALF_BLOCK)[None, None, :]
    inside = here[:, :, None] & (pair < HALF)
    first = tl.load(x_ptr[:, :, None] + STEP * pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr[:, :, None] + SECOND + STEP * pair, mask=inside, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store_halves(out_ptr, kept, first, second, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr):
    pair = tl.arange(0, HALF_BLOCK)[None, None, :]
    inside = kept[:, :, None] & (pair < HALF)
    tl.store(out_ptr[:, :, None] + pair, first.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr[:, :, None] + HALF + pair, second.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def _write_latent_kernel(
    q_ptr,  # [T, H, 2 * HALF], tokens q_stride and heads q_head_stride elements apart
    out_ptr,  # [T, H, 2 * HALF]
    kv_ptr,  # [T, L + 2 * HALF], tokens kv_stride elements apart
    cache_ptr,  # [num_slots, L + 2 * HALF]
    slots_ptr,  # [T] int64
    positions_ptr,  # [T] int64
    rope_ptr,  # [max_pos, 2 * HALF] float32
    norm_ptr,  # [L]
    tokens,
    num_slots,
    max_pos,
    q_stride,
    q_head_stride,
    kv_stride,
    eps,
    H: tl.constexpr,
    L: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    L_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    position = tl.load(positions_ptr + token, mask=here, other=0)
    known = here & (position >= 0) & (position < max_pos)
    pair = tl.arange(0, HALF_BLOCK)[None, None, :]
    row = rope_ptr + tl.where(known, position, 0)[:, None, None] * (2 * HALF) + pair
    turned = known[:, None, None] & (pair < HALF)
    cos = tl.load(row, mask=turned, other=0.0)
    sin = tl.load(row + HALF, mask=turned, other=0.0)
    block = tl.program_id(1)
    if block == 0:
        slot = tl.load(slots_ptr + token, mask=here, other=-1)
        kept = here & (slot >= 0) & (slot < num_slots)
        place = cache_ptr + tl.where(kept, slot, 0) * (L + 2 * HALF)
        from_ptr = kv_ptr + token * kv_stride
        column = tl.arange(0, L_BLOCK)[None, :]
        inside = here[:, None] & (column < L)
        latent = tl.load(from_ptr[:, None] + column, mask=inside, other=0.0).to(tl.float32)
        unit = 1.0 / tl.sqrt(tl.sum(latent * latent, 1) / L + eps)
        # The two roundings of Hugging Face's norm: after the scaling and after the weight.
        scaled = (latent * unit[:, None]).to(kv_ptr.dtype.element_ty).to(tl.float32)
        weight = tl.load(norm_ptr + column, mask=column < L, other=0.0).to(tl.float32)
        stored = (scaled * weight).to(cache_ptr.dtype.element_ty)
        tl.store(place[:, None] + column, stored, mask=kept[:, None] & (column < L))
        k_first, k_second = _rotate((from_ptr + L)[:, None], here[:, None], cos, sin, HALF, HALF_BLOCK, INTERLEAVED)
        _store_halves((place + L)[:, None], kept[:, None], k_first, k_second, HALF, HALF_BLOCK)
    else:
        head = (block - 1) * HEADS + tl.arange(0, HEADS)
        mine = here[:, None] & (head < H)[None, :]
        from_heads = q_ptr + token[:, None] * q_stride + head[None, :] * q_head_stride
        q_first, q_second = _rotate(from_heads, mine, cos, sin, HALF, HALF_BLOCK, INTERLEAVED)
        to_heads = out_ptr + (token[:, None] * H + head[None, :]) * (2 * HALF)
        _store_halves(to_heads, mine, q_first, q_second, HALF, HALF_BLOCK)


def write_latent(q: torch.Tensor, store: LatentStore, eps: float, interleaved: bool) -> torch.Tensor:
    """See `specdec_kernels.write_latent`, which has checked the arguments."""
    kv, cache, slots, positions, rope, norm = store
    if cache.dtype == torch.float64:
        raise ValueError("cache: the kernel takes float32, float16 and bfloat16, got float64; use impl='reference'")
    tokens, heads, width = q.shape
    out = q.new_empty(q.shape)
    latent, tile = kv.shape[1] - width, write_tile(current_chip(q), tokens, heads)
    launch(
        _write_latent_kernel,
        (triton.cdiv(tokens, tile["TOKENS"]), 1 + triton.cdiv(heads, tile["HEADS"])),
        *(q, out, kv, cache, slots, positions, rope, norm),
        *(tokens, cache.shape[0] * cache.shape[1], rope.shape[0], q.stride(0), q.stride(1), kv.stride(0), eps),
        num_warps=4,
        num_stages=1,
        H=heads,
        L=latent,
        HALF=width // 2,
        INTERLEAVED=interleaved,
        L_BLOCK=lanes(latent),
        HALF_BLOCK=lanes(width // 2),
        **tile,
    )
    return out
