"""What a commit returns."""

from __future__ import annotations

from typing import NamedTuple

import torch

STEP_FIGURES = ("num_accepted", "valid", "num_drafted", "ran_out")
"""The last columns of `Committed.table`. `num_drafted` counts the linked nodes behind the root. `ran_out` is 1 where
the accepted path ends at a node without a child: nothing was drafted there that could have been rejected."""


class Committed(NamedTuple):
    """The committed path of each request in text order; P = D + 1 columns, of which the first `counts[b]` are real."""

    start: torch.Tensor  # [B] int64: committed length before the step
    counts: torch.Tensor  # [B] int32: committed tokens, 0 for a padding row
    positions: torch.Tensor  # [B, P] int64: start + column
    nodes: torch.Tensor  # [B, P] int32: nodes of the path, -1 behind it and in padding rows
    tokens: torch.Tensor  # [B, P] int64: tokens at these positions, from the former last token on
    next_tokens: torch.Tensor  # [B, P] int64: the token that follows each
    table: torch.Tensor  # [B, 2 P + 4] int64: emitted tokens, log-probabilities as float32 bits, then `STEP_FIGURES`
