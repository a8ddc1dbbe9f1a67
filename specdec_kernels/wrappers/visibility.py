"""Who sees whom as one dense boolean array, for attention that takes nothing finer.

Row i of a request stands at position L + i, in a tree at L + its depth; a key in the prefix stands at its own
position, draft slot j at L + j, in a tree at L + the slot's depth. A window W lets a row see the keys with
row position - key position < W.
"""

from __future__ import annotations

import torch

_WORD_BITS = 64


def visible_keys(
    lengths: torch.Tensor,
    used: torch.Tensor,
    num_queries: int,
    num_keys: int,
    mode: str,
    *,
    mask: torch.Tensor | None = None,
    tree_width: int | None = None,
    window: int | None = None,
    depths: torch.Tensor | None = None,
    row_depths: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, num_queries, num_keys] bool: whether query row i sees the key at position t.

    Arguments as in `specdec_kernels.paged_attention`; `used` [B] int32 rows in use, others see nothing.
    """
    row = torch.arange(num_queries, device=lengths.device)[None, :, None]
    slot = torch.arange(num_keys, device=lengths.device) - lengths[:, None, None]
    drafted = used[:, None, None] if tree_width is None else tree_width
    if mode == "tree":
        assert mask is not None
        inside = slot.clamp(0, mask.shape[2] * _WORD_BITS - 1).expand(-1, num_queries, -1)
        among_draft = (mask.gather(2, inside // _WORD_BITS) >> (inside % _WORD_BITS)) & 1 != 0
    else:
        among_draft = slot <= row if mode == "chain" else torch.ones_like(slot, dtype=torch.bool)
    seen = (slot < 0) | (among_draft & (slot < drafted))
    if window is not None:
        seen = seen & (_row_places(row, mode, depths, row_depths) - _key_places(slot, mode, depths) < window)
    return seen & (row < used[:, None, None])


def _row_places(
    row: torch.Tensor, mode: str, depths: torch.Tensor | None, row_depths: torch.Tensor | None
) -> torch.Tensor:
    """Positions of the query rows behind the prefix."""
    if mode != "tree":
        return row
    own = depths if row_depths is None else row_depths
    if own is None:
        raise ValueError("depths: expected with a window over a tree, got None")
    return own[:, : row.shape[1], None]


def _key_places(slot: torch.Tensor, mode: str, depths: torch.Tensor | None) -> torch.Tensor:
    """Positions of the keys behind the prefix, negative inside it."""
    if mode != "tree":
        return slot
    assert depths is not None
    depth = depths.long()[:, None].gather(2, slot.clamp(0, depths.shape[1] - 1))
    return torch.where((slot >= 0) & (slot < depths.shape[1]), depth, slot)
