"""What the index functions return."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
    source: torch.Tensor  # [B, T - 1, P - 1] int64 slots of the prefix tail, -1 where there is nothing to copy
    target: torch.Tensor  # [B, T - 1, P - 1] int64 slots of the same tail in branches 1 to T - 1, or -1


class SequenceIndices(NamedTuple):
    """KV indices of independent sequences, of draft branches with a leading axis for the K draft steps."""

    indptr: torch.Tensor  # [..., sequences + 1] int32: sequence z owns indices[indptr[z] : indptr[z + 1]]
    indices: torch.Tensor  # [..., capacity] int32 slots, 0 behind the last sequence


class ExportedMask(NamedTuple):
    """A tree mask in another system's layout."""

    cells: torch.Tensor  # shape and dtype by form, see `export_mask`
    offsets: torch.Tensor | None  # [B + 1] int64 start of each request in the flat forms, else None
