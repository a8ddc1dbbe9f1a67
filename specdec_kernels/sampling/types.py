"""What token selection returns, and the random streams that it and its callers share."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Third counter word of the Philox generator: one number a use of randomness, so that no two share words.
TARGET_STREAM = 0  # the target's own token at a position
DRAFT_STREAM = 1  # a drafter's token
ACCEPT_STREAM = 2  # coins of the rejection rules
RECOVER_STREAM = 3  # the token in place of a rejected draft
BONUS_STREAM = 4  # the token behind a wholly accepted block


class Picked(NamedTuple):
    """One chosen token a row."""

    tokens: torch.Tensor  # [R] int64
    valid: torch.Tensor  # [R] bool, False where the row had no usable logit (the token is then 0)
    logprobs: torch.Tensor | None = None  # [R] float32 where asked for: log softmax(logits)[token], unfiltered


class Filters(NamedTuple):
    """Which tokens of a row may be drawn, in the order top-k, top-p of what is left, min-p; None is off."""

    top_k: torch.Tensor | None = None  # [requests] int32, <= 0 is off
    top_p: torch.Tensor | None = None  # [requests] float32, >= 1 is off
    min_p: torch.Tensor | None = None  # [requests] float32, <= 0 is off

    @property
    def off(self) -> bool:
        return self.top_k is None and self.top_p is None and self.min_p is None

    def repeated(self, times: int) -> Filters:
        """Each request's filters for `times` rows."""
        return Filters(*(None if f is None else f.repeat_interleave(times) for f in self))
