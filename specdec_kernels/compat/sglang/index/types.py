"""What the index functions return."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ExportedMask(NamedTuple):
    """A tree mask in another system's layout."""

    cells: torch.Tensor  # shape and dtype by form, see `export_mask`
    offsets: torch.Tensor | None  # [B + 1] int64 start of each request in the flat forms, else None
