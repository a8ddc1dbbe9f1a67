"""Penalties, logit bias and forbidden tokens on the logits of drafts.

The target's logits are changed before a token is chosen, so a drafter that ignores the change drafts tokens that are
rejected. A draft counts the tokens of the output so far, and not those of its own path. Of forbidden sequences only
single tokens are excluded. The target decides in any case, so this changes acceptance and no output.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.step.batch import ForbiddenState, PenaltyState
from specdec_kernels import apply_penalties


@dataclass(frozen=True)
class DraftAdjustment:
    """The changes of the requests in the batch slots `slots`, whose last tokens have the positions `lengths` [B]."""

    penalties: PenaltyState | None
    forbidden: ForbiddenState | None
    slots: slice | Tensor
    lengths: Tensor
    vocab_size: int
    impl: str

    def __call__(self, logits: Tensor, depth: int, vocabulary: Tensor | None = None) -> None:
        """Change the logits [B, T, V_d] of drafts in place. The tokens before them are `depth` tokens after the last
        one, or more. `vocabulary` [V_d] int64 is added to an id of the drafter to give the target's; None adds
        nothing."""
        known = None
        if vocabulary is not None:
            known = vocabulary + torch.arange(len(vocabulary), device=vocabulary.device)
        if self.penalties is not None:
            self._penalise(logits, self.penalties, known)
        if self.forbidden is not None:
            self._forbid(logits, self.forbidden, depth, known)

    def _penalise(self, logits: Tensor, state: PenaltyState, known: Tensor | None) -> None:
        rows, width, _ = logits.shape
        by_token = [each[self.slots] for each in (state.output_counts, state.prompt_seen, state.bias)]
        counts, seen, bias = by_token if known is None else [each.index_select(1, known) for each in by_token]
        # Tokens outside of the vocabulary are not counted, so no column has a path.
        tokens = self.lengths.new_full((rows, width), -1)
        mask = tokens.new_zeros(rows, width, -(-width // 64))
        apply_penalties(
            logits, tokens, mask, counts, seen, state.repetition[self.slots], state.presence[self.slots],
            state.frequency[self.slots], bias, impl=self.impl,
        )  # fmt: skip

    def _forbid(self, logits: Tensor, state: ForbiddenState, depth: int, known: Tensor | None) -> None:
        words, until = state.words[self.slots], state.until[self.slots]
        last, is_single = words[..., -1], words[..., -2] < 0
        applies = is_single & (last >= 0) & (last < self.vocab_size) & (self.lengths[:, None] + depth + 1 < until)
        # The last column takes what does not apply.
        hidden = torch.zeros(len(words), self.vocab_size + 1, dtype=torch.bool, device=logits.device)
        hidden.scatter_(1, torch.where(applies, last, self.vocab_size), True)
        hidden = hidden[:, :-1] if known is None else hidden.index_select(1, known)
        logits.masked_fill_(hidden[:, None], -torch.inf)
