"""What the index builders return."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LevelSlots(NamedTuple):
    """Where the tokens of all levels of a draft stand and are stored."""

    slots: torch.Tensor  # [levels, B, width] int64, -1 of padding rows and where no page is held
    positions: torch.Tensor  # [levels, B, width] int64
    counts: torch.Tensor  # [B] int32: tokens of a level, 0 of a padding row


class FlashInferIndices(NamedTuple):
    """Paged-KV arrays in FlashInfer's layout."""

    indptr: torch.Tensor  # [B + 1] int32: row b owns indices[indptr[b] : indptr[b + 1]]
    indices: torch.Tensor  # [capacity] int32 page ids, 0 behind the last row
    last_page_len: torch.Tensor  # [B] int32: tokens on the last page, 0 for an empty row


class FlashAttentionIndices(NamedTuple):
    """Paged-KV arrays in FlashAttention's layout."""

    page_table: torch.Tensor  # [B, P] int32, 0 past the row's length
    seqused_k: torch.Tensor  # [B] int32
