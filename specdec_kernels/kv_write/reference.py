"""Definition of the fused norm, rotation and paged store, in plain torch.

For a head x of D elements with weight w, cosines c and sines s of the token's position (D/2 each):

    y = w * (x / sqrt(mean(x^2) + eps))         rounded to the model's dtype after the norm and after the
    weight out = [y1 c - y2 s, y2 c + y1 s]            y = [y1, y2] halves; in float32, rounded once

The two roundings before the rotation are those of the Qwen3 layer in Hugging Face transformers.
"""

from __future__ import annotations

import torch


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
    """See `specdec_kernels.kv_write.write_kv`."""
    rows = _rope_rows(rope, positions)
    keys = _rotate(_norm(k, k_norm, eps), rows[:, None])
    _store(kv[None], slots, keys[:, None], v[:, None])
    return _rotate(_norm(q, q_norm, eps), rows[:, None])


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
    """See `specdec_kernels.kv_write.materialize_kv`."""
    rows = _rope_rows(rope, positions)
    weights = None if k_norm is None else k_norm[:, None]
    _store(kv, slots, _rotate(_norm(k, weights, eps), rows[:, None, None]), v)


def _rope_rows(rope: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[T, D] table rows, zeros where a position is outside the table."""
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


def _rotate(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Neox rotation of x [..., D] by table rows that broadcast to it."""
    first, second = x.to(_maths(x)).chunk(2, dim=-1)
    cos, sin = rows.to(first.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _store(kv: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Put keys, values [T, layers, H_kv, D] at `slots` of kv [layers, 2, pages, page_size, H_kv, D].

    A token without a slot must write nothing, and the number of such tokens must not be read back. So it
    writes what the pool held before at the slot of an arbitrary stored token, or at slot 0 when none is
    stored, after that token.
    """
    layers, _, pages, page_size, kv_heads, head_dim = kv.shape
    flat = kv.view(layers, 2, pages * page_size, kv_heads, head_dim)
    stored = (slots >= 0) & (slots < pages * page_size)
    new = torch.stack([keys, values], dim=2).permute(1, 2, 0, 3, 4)
    if not slots.numel():
        return
    anchor = stored.to(torch.int8).argmax(0, keepdim=True)
    anchor_slot = torch.where(stored, slots, 0)[anchor]
    anchor_rows = torch.where(stored[anchor][:, None, None], new[:, :, anchor], flat[:, :, anchor_slot])
    target = torch.where(stored, slots, anchor_slot)
    flat[:, :, target] = torch.where(stored[:, None, None], new, anchor_rows)
