"""What token selection takes and returns, and the random streams that it and its callers share."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specdec_kernels.checks import Expected

# Third counter word of the Philox generator: one number per use of randomness, so that no two uses share words.
TARGET_STREAM = 0  # the target's own token at a position
DRAFT_STREAM = 1  # a drafter's token
ACCEPT_STREAM = 2  # the uniforms that the rejection rules compare with
RECOVER_STREAM = 3  # the token in place of a rejected draft
BONUS_STREAM = 4  # the token behind a wholly accepted block
MASK_BITS = 32  # tokens of a word of the mask of `mask_tokens`


class SamplingTensors(NamedTuple):
    """How tokens are drawn: one entry per request, or per row in `pick_tokens`. Without a temperature all is greedy.

    The filters act in the order of the fields. They do not move an argmax, so greedy entries ignore them.
    """

    temperature: torch.Tensor | None = None  # [B] float32; above 0 draws, else the argmax; None is 0 for all
    top_k: torch.Tensor | None = None  # [B] int32; <= 0 or >= V is off
    top_p: torch.Tensor | None = None  # [B] float32; >= 1 or NaN is off, <= 0 keeps the largest only
    min_p: torch.Tensor | None = None  # [B] float32; <= 0 or NaN is off, above 1 counts as 1
    seeds: torch.Tensor | None = None  # [B] int64, any value; needed to draw unless uniforms are given

    @property
    def filters(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        return self.top_k, self.top_p, self.min_p

    @property
    def filtered(self) -> bool:
        return any(tensor is not None for tensor in self.filters)

    def expected(self, requests: int) -> dict[str, Expected]:
        """What `expect_tensors` is to check of tensors of `requests` entries."""
        dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64)
        return {
            name: (tensor, (requests,), dtype) for name, tensor, dtype in zip(self._fields, self, dtypes, strict=True)
        }

    def repeated(self, times: int) -> SamplingTensors:
        """Each request's entries for `times` rows."""
        return SamplingTensors(*(None if tensor is None else tensor.repeat_interleave(times) for tensor in self))


class Picked(NamedTuple):
    """One chosen token per row."""

    tokens: torch.Tensor  # [R] int64
    valid: torch.Tensor  # [R] bool, False where the row had no usable logit (the token is then 0)
    logprobs: torch.Tensor | None = None  # [R] float32 where asked for: log softmax(logits)[token], unfiltered
