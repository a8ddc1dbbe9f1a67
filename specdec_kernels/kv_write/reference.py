"""Definition of the fused norm, rotation and paged store, in plain torch.

For a head x of D elements with weight w, of which the first R turn by cosines c and sines s of the token's
position (R / 2 each):

    y = w * (x / sqrt(mean(x^2) + eps))         rounded to the model's dtype after the norm and after the weight
    out = [y1 c - y2 s, y2 c + y1 s, y3]        in float32, rounded once

y1 and y2 are the halves of the first R elements (neox), or their even and odd ones (interleaved); y3 are the
D - R others. A scaled pool holds out / scale. In an e4m3 pool that is rounded to the nearest even code, after
magnitudes above 448 were cut to 448. The two roundings before the rotation are those of the Qwen3 layer in
Hugging Face transformers.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0


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
    """See `specdec_kernels.write_kv`: `materialize_kv` of one layer, and the queries."""
    layer_norm = None if k_norm is None else k_norm[None]
    materialize_kv(
        k[:, None], v[:, None], kv[None], slots, positions, rope, k_norm=layer_norm, eps=eps,
        interleaved=interleaved, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    return _rotate(_norm(q, q_norm, eps), _rope_rows(rope, positions)[:, None], interleaved).to(q.dtype)


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
    """See `specdec_kernels.materialize_kv`."""
    if counts is not None:
        width = slots.shape[0] // max(counts.shape[0], 1)
        column = torch.arange(width, device=slots.device)
        slots = torch.where((column < counts[:, None]).reshape(-1), slots, -1)
    rows = _rope_rows(rope, positions)[:, None, None]
    keys = _rotate(_norm(k, None if k_norm is None else k_norm[:, None], eps), rows, interleaved)
    _store(kv, slots, _stored(keys, k_scale, kv), _stored(v, v_scale, kv))


def _rope_rows(rope: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T, R] table rows, zeros where a position is outside the table."""
    known = (positions >= 0) & (positions < rope.shape[0])
    return rope[positions.clamp(0, rope.shape[0] - 1)] * known[:, None]


def _maths(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x
    wide = x.to(_maths(x))
    unit = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (unit.to(wide.dtype) * weight.to(wide.dtype)).to(x.dtype)


def _rotate(x: torch.Tensor, rows: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotation of x [..., D] by table rows [..., R] that broadcast to it, in float32 (float64)."""
    rotary_dim = rows.shape[-1]
    wide = x.to(_maths(x))
    turning, rest = wide[..., :rotary_dim], wide[..., rotary_dim:]
    cos, sin = rows.to(wide.dtype).chunk(2, dim=-1)
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([joined, rest], dim=-1)


def _stored(x: torch.Tensor, scale: float | torch.Tensor | None, kv: torch.Tensor) -> torch.Tensor:
    """x [..., H_kv, D] as the pool holds it."""
    wide = x.to(_maths(x))
    if scale is not None:
        wide = wide / (scale[:, None].to(wide.dtype) if isinstance(scale, torch.Tensor) else scale)
    if kv.dtype == torch.float8_e4m3fn:
        wide = wide.clamp(-E4M3_MAX, E4M3_MAX)
    return wide.to(kv.dtype)


def _store(kv: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Put keys, values [T, layers, H_kv, D] at `slots` of kv [layers, 2, pages, page_size, H_kv, D].

    A token without a slot must write nothing, and the number of such tokens must not be read back. So it
    writes what the pool held before at the slot of an arbitrary stored token, or at slot 0 when none is
    stored, after that token.
    """
    layers, _, pages, page_size, kv_heads, head_dim = kv.shape
    new = torch.stack([keys, values], dim=2).permute(1, 2, 0, 3, 4)
    if not slots.numel() or not kv.numel():
        return
    if kv.dtype == torch.float8_e4m3fn:  # indexing moves bits, and is not defined for this type everywhere
        kv, new = kv.view(torch.uint8), new.contiguous().view(torch.uint8)
    flat = kv.view(layers, 2, pages * page_size, kv_heads, head_dim)
    stored = (slots >= 0) & (slots < pages * page_size)
    anchor = stored.to(torch.int8).argmax(0, keepdim=True)
    anchor_slot = torch.where(stored, slots, 0)[anchor]
    anchor_rows = torch.where(stored[anchor][:, None, None], new[:, :, anchor], flat[:, :, anchor_slot])
    target = torch.where(stored, slots, anchor_slot)
    flat[:, :, target] = torch.where(stored[:, None, None], new, anchor_rows)
