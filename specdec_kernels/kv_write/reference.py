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
    turns = _turns(store, options.interleaved, q)
    _keep(store.with_layer_axis(), None if k_norm is None else k_norm[None], options, turns)
    return _rotate(_norm(q, q_norm, options.eps), turns[:, :, None], options.interleaved).to(q.dtype)


def materialize_kv(store: KVStore, k_norm: Tensor | None, options: StoreOptions) -> None:
    _keep(store, k_norm, options, _turns(store, options.interleaved, store.k))


def _keep(store: KVStore, k_norm: Tensor | None, options: StoreOptions, turns: Tensor) -> None:
    k, v, kv, slots = store[:4]
    weight = None if k_norm is None else k_norm[:, None]
    keys = _rotate(_norm(k, weight, options.eps), turns[:, :, None, None], options.interleaved)
    _store(kv, slots, _stored(keys, options.k_scale, kv), _stored(v, options.v_scale, kv))


def _turns(store: KVStore, interleaved: bool, x: Tensor) -> Tensor:
    """[2, T, R] cosine and sine of each turning element of x, zeros where a position is outside the table."""
    rope, positions = store.rope, store.positions
    rows = rope[positions.clamp(0, rope.shape[0] - 1)]
    rows = rows.masked_fill(((positions < 0) | (positions >= rope.shape[0]))[:, None], 0.0).to(_maths(x))
    halves = rows.unflatten(-1, (2, -1)).movedim(-2, 0)
    return halves.repeat_interleave(2, -1) if interleaved else halves.repeat(1, 1, 2)


def _maths(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    wide = x.to(_maths(x))
    unit = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (unit.to(wide.dtype) * weight.to(wide.dtype)).to(x.dtype)


def _rotate(x: Tensor, turns: Tensor, interleaved: bool) -> Tensor:
    """Rotation of x [..., D] by `turns` [2, ..., R] that broadcast to it, in float32 (float64)."""
    wide, rotary_dim = x.to(_maths(x)), turns.shape[-1]
    turning = wide if rotary_dim == wide.shape[-1] else wide[..., :rotary_dim]
    if interleaved:
        across = torch.stack([-turning[..., 1::2], turning[..., 0::2]], dim=-1).flatten(-2)
    else:
        first, second = turning.chunk(2, dim=-1)
        across = torch.cat([-second, first], dim=-1)
    turned = turning * turns[0] + across * turns[1]
    return turned if turning is wide else torch.cat([turned, wide[..., rotary_dim:]], dim=-1)


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
    anchor = stored.byte().argmax(0)
    source = torch.where(stored, torch.arange(len(slots), device=slots.device), anchor)
    target = slots[source].clamp(0, pages * page_size - 1)
    flat[:, :, target] = torch.where(stored.any(), new[:, :, source], flat[:, :, target])
