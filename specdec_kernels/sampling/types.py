"""What token selection returns, and the random stream that it and its callers share."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Third counter word of the Philox generator: one number a use of randomness, so that no two share words.
TARGET_STREAM = 0


class Picked(NamedTuple):
    """One chosen token a row."""

    tokens: torch.Tensor  # [R] int64
    valid: torch.Tensor  # [R] bool, False where the row had no usable logit (the token is then 0)
