"""Arguments and results of a commit. P = D + 1 columns for the path of a tree of depth D."""

from typing import Annotated, NamedTuple

from torch import Tensor

STEP_FIGURES = ("num_accepted", "valid", "num_drafted", "ran_out")
"""The last columns of `Committed.table`. `num_drafted` counts the linked nodes after the root. `ran_out` is 1 where the
accepted path ends at a node without a child: nothing was drafted there that could have been rejected."""


class CommitInputs(NamedTuple):
    """The arguments of `commit_step` for B requests with trees of N nodes."""

    draft_tokens: Annotated[Tensor, "B N int64"]
    first_child: Annotated[Tensor, "B N int32"]
    next_sibling: Annotated[Tensor, "B N int32"]
    tokens: Annotated[Tensor, "B P int64"]
    num_accepted: Annotated[Tensor, "B int32"]
    nodes: Annotated[Tensor, "B P int32"]
    valid: Annotated[Tensor, "B bool"]
    logprobs: Annotated[Tensor | None, "B P float32"]
    active: Annotated[Tensor, "B int32"]
    lengths: Annotated[Tensor, "B int64"]  # written
    last_tokens: Annotated[Tensor, "B int64"]  # written
    history: Annotated[Tensor, "B C int64"]  # written


class Committed(NamedTuple):
    """The committed path of each request in position order; the first `counts[b]` columns are real."""

    start: Tensor  # [B] int64: committed length before the step
    counts: Tensor  # [B] int32: committed tokens, 0 for a padding slot
    positions: Tensor  # [B, P] int64: start + column
    nodes: Tensor  # [B, P] int32: nodes of the path, -1 after it and in padding slots
    tokens: Tensor  # [B, P] int64: tokens at these positions, from the former last token on
    next_tokens: Tensor  # [B, P] int64: the token that follows each
    table: Tensor  # [B, 2 P + 4] int64: emitted tokens, log-probabilities as float32 bits, then `STEP_FIGURES`
