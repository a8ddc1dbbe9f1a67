"""Results of the index functions."""

from typing import NamedTuple

from torch import Tensor


class LevelSlots(NamedTuple):
    """Positions and KV slots of all levels of a draft."""

    slots: Tensor  # [levels, B, width] int64, -1 of padding slots and where no page is held
    positions: Tensor  # [levels, B, width] int64
    counts: Tensor  # [B] int32: tokens of a level, 0 of a padding slot


class FlashInferIndices(NamedTuple):
    """Paged-KV arrays in FlashInfer's layout."""

    indptr: Tensor  # [B + 1] int32: request b owns indices[indptr[b] : indptr[b + 1]]
    indices: Tensor  # [B * columns] int32 page ids, 0 after the last request and where no page is held
    last_page_len: Tensor  # [B] int32: tokens on the last page, 0 for an empty request


class FlashAttentionIndices(NamedTuple):
    """Paged-KV arrays in FlashAttention's layout."""

    page_table: Tensor  # [B, P] int32, 0 past the request's length
    seqused_k: Tensor  # [B] int32
