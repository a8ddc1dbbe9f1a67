"""Definition of the fused norm, rotation and paged store, in plain torch.

For a head x of D elements with weight w, of which the first R turn by cosines c and sines s of the token's
position (R / 2 each):

    y = w * (x / sqrt(mean(x^2) + eps))         rounded to the model's dtype after the norm and after the weight
    out = [y1 c - y2 s, y2 c + y1 s, y3]        in float32, rounded once

y1 and y2 are the halves of the first R elements (neox), or their even and odd ones (interleaved); y3 are the
D - R others. A scaled pool holds out / scale. In an e4m3 pool that is rounded to the nearest even code, after
magnitudes were clamped to 448. The two roundings before the rotation are those of the Qwen3 layer in
Hugging Face transformers.
"""

import torch
from torch import Tensor

from specdec_kernels.kv_write.types import KVStore, StoreOptions

E4M3_MAX = 448.0


def write_kv(q: Tensor, store: KVStore, q_norm: Tensor | None, k_norm: Tensor | None, options: StoreOptions) -> Tensor:
    """See `specdec_kernels.write_kv`: `materialize_kv` of one layer, and the queries."""
    materialize_kv(store.with_layer_axis(), None if k_norm is None else k_norm[None], options)
    rows = _rope_rows(store.rope, store.positions)[:, None]
    return _rotate(_norm(q, q_norm, options.eps), rows, options.interleaved).to(q.dtype)


def materialize_kv(store: KVStore, k_norm: Tensor | None, options: StoreOptions) -> None:
    k, v, kv, slots, positions, rope = store
    rows = _rope_rows(rope, positions)[:, None, None]
    weight = None if k_norm is None else k_norm[:, None]
    keys = _rotate(_norm(k, weight, options.eps), rows, options.interleaved)
    _store(kv, slots, _stored(keys, options.k_scale, kv), _stored(v, options.v_scale, kv))


def _rope_rows(rope: Tensor, positions: Tensor) -> Tensor:
    """[T, R] table rows, zeros where a position is outside the table."""
    known = (positions >= 0) & (positions < rope.shape[0])
    return rope[positions.clamp(0, rope.shape[0] - 1)] * known[:, None]


def _maths(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    wide = x.to(_maths(x))
    unit = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (unit.to(wide.dtype) * weight.to(wide.dtype)).to(x.dtype)


def _rotate(x: Tensor, rows: Tensor, interleaved: bool) -> Tensor:
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


def _stored(x: Tensor, scale: float | Tensor | None, kv: Tensor) -> Tensor:
    """x [..., H_kv, D] as the pool holds it."""
    wide = x.to(_maths(x))
    if scale is not None:
        wide = wide / (scale[:, None].to(wide.dtype) if isinstance(scale, Tensor) else scale)
    if kv.dtype == torch.float8_e4m3fn:
        wide = wide.clamp(-E4M3_MAX, E4M3_MAX)
    return wide.to(kv.dtype)


def _store(kv: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Put keys, values [T, layers, H_kv, D] at `slots` of kv [layers, 2, pages, page_size, H_kv, D]. A token without a
    slot must write nothing, and the number of such tokens must not be read back. So it repeats the write of an
    arbitrary stored token, or writes what slot 0 holds where none is stored."""
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
