"""What the index builders return."""

from __future__ import annotations

from typing import NamedTuple

import torch


class FlashInferIndices(NamedTuple):
    """Paged-KV arrays in FlashInfer's layout."""

    indptr: torch.Tensor  # [B + 1] int32: row b owns indices[indptr[b] : indptr[b + 1]]
    indices: torch.Tensor  # [capacity] int32 page ids, 0 behind the last row
    last_page_len: torch.Tensor  # [B] int32: tokens on the last page, 0 for an empty row


class FlashAttentionIndices(NamedTuple):
    """Paged-KV arrays in FlashAttention's layout."""

    page_table: torch.Tensor  # [B, P] int32, 0 past the row's length
    seqused_k: torch.Tensor  # [B] int32


class RaggedValues(NamedTuple):
    """Rows of different lengths one behind the other."""

    offsets: torch.Tensor  # [B + 1] int32: row b owns values[offsets[b] : offsets[b + 1]]
    values: torch.Tensor  # [capacity]


class Compacted(NamedTuple):
    """The kept entries in their old order."""

    values: torch.Tensor  # [M] int64
    num_kept: torch.Tensor  # [1] int32


class DraftSlots(NamedTuple):
    """Where the drafts of every branch and step lie, and the prefix tails that branches need a copy of."""

    slots: torch.Tensor  # [K, B * T] int64: row s is what draft step s writes
    source: torch.Tensor  # [B, T - 1, P - 1] int64 slots of the prefix tail, -1 where nothing is to copy
    target: torch.Tensor  # [B, T - 1, P - 1] int64 slots of the same tail in branches 1 to T - 1, or -1


class StepIndices(NamedTuple):
    """KV indices of every draft step, each branch a sequence of its own."""

    indptr: torch.Tensor  # [K, B * T + 1] int32: branch z of step s owns indices[s, indptr[s, z] : indptr[s, z + 1]]
    indices: torch.Tensor  # [K, capacity] int32 slots, 0 behind the last branch


class SequenceIndices(NamedTuple):
    """KV indices of independent sequences."""

    indptr: torch.Tensor  # [sequences + 1] int32
    indices: torch.Tensor  # [capacity] int32 slots, 0 behind the last sequence


class PathLocations(NamedTuple):
    """Slots of an accepted path: where it lies, where it belongs, and what it leaves over. -1 pads."""

    source: torch.Tensor  # [B, S] int64
    target: torch.Tensor  # [B, S] int64
    freed: torch.Tensor  # [B, N] int64: slots of pages that hold no kept token, first entries of a row
    num_freed: torch.Tensor  # [B] int32
