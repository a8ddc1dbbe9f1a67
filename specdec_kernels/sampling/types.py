"""Arguments and results of token selection, and the random streams that it and its callers share."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

# Third counter word of the Philox generator: one number per use of randomness, so that no two uses share words.
TARGET_STREAM = 0  # the target's own token at a position
DRAFT_STREAM = 1  # a drafter's token
ACCEPT_STREAM = 2  # the uniforms that judge drafts
RECOVER_STREAM = 3  # the token in place of a rejected draft
BONUS_STREAM = 4  # the token after a wholly accepted block
MASK_BITS = 32  # tokens of a word of the mask of `mask_tokens`


class SamplingTensors(NamedTuple):
    """How tokens are sampled: one entry per request, or per row in `pick_tokens`. Without a temperature all is greedy.
    The filters act in the order of the fields. They do not move an argmax, so greedy entries ignore them."""

    temperature: Annotated[Tensor | None, "B float32"] = None  # above 0 samples, else the argmax; None is 0 for all
    top_k: Annotated[Tensor | None, "B int32"] = None  # <= 0 or >= V is off
    top_p: Annotated[Tensor | None, "B float32"] = None  # >= 1 or NaN is off, <= 0 keeps the largest only
    min_p: Annotated[Tensor | None, "B float32"] = None  # <= 0 or NaN is off, above 1 counts as 1
    seeds: Annotated[Tensor | None, "B int64"] = None  # any value; needed to sample unless uniforms are given

    @property
    def filters(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.top_k, self.top_p, self.min_p

    @property
    def filtered(self) -> bool:
        return any(tensor is not None for tensor in self.filters)

    def repeated(self, times: int) -> SamplingTensors:
        """Each request's entries for `times` rows."""
        return SamplingTensors(*(None if tensor is None else tensor.repeat_interleave(times) for tensor in self))


class Picked(NamedTuple):
    """One chosen token per row."""

    tokens: Tensor  # [R] int64
    valid: Tensor  # [R] bool, False where the row had no usable logit (the token is then 0)
    logprobs: Tensor | None = None  # [R] float32 with `return_logprobs`: log softmax(logits)[token], unfiltered


class Penalties(NamedTuple):
    """The checked arguments of `apply_penalties`, which describes them."""

    logits: Tensor
    tokens: Annotated[Tensor, "B N int64"]
    mask: Annotated[Tensor, "B N N/64 int64"]
    output_counts: Annotated[Tensor, "B V int32"]
    prompt_seen: Annotated[Tensor | None, "B V bool"]
    repetition: Annotated[Tensor, "B float32"]
    presence: Annotated[Tensor, "B float32"]
    frequency: Annotated[Tensor, "B float32"]
    bias: Annotated[Tensor | None, "B V float32"]


class Forbidden(NamedTuple):
    """The checked arguments of `forbid_tokens`, which describes them."""

    logits: Tensor
    tokens: Annotated[Tensor, "B N int64"]
    mask: Annotated[Tensor, "B N N/64 int64"]
    positions: Annotated[Tensor, "B N int64"]
    history: Annotated[Tensor, "B C int64"]
    lengths: Annotated[Tensor, "B int64"]
    words: Annotated[Tensor, "B W K int64"]
    until: Annotated[Tensor, "B W int64"]
