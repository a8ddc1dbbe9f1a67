"""What acceptance returns, and the names of its rules."""

from __future__ import annotations

from typing import NamedTuple

import torch

CHAIN_RULES = ("rejection", "block")  # for drawn chains
TREE_RULES = ("multi_round", "without_replacement", "k_seq", "greedy_paths", "traversal")  # for drawn trees
WITHOUT_REPLACEMENT_RULES = ("without_replacement", "traversal")  # a rejected token is no draw again
BOTTOM_UP_RULES = ("greedy_paths", "traversal")  # a node is judged behind its children
# Of `greedy_paths`: from which p / q on a token stands in the next class. Products with them are compared, so kernels
# and reference must take the same numbers, all of which are exact in float32.
CLASS_EDGES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
DRAWN_RULES = CHAIN_RULES + TREE_RULES  # need the draft's own probabilities
RULES = ("greedy", "target_only", *DRAWN_RULES)


class Accepted(NamedTuple):
    """Outcome of verifying one draft tree per request; D is the most drafts that can be accepted."""

    tokens: torch.Tensor  # [B, D + 1] int64: accepted drafts, then the bonus token, -1 behind
    num_accepted: torch.Tensor  # [B] int32: accepted drafts, the bonus excluded
    nodes: torch.Tensor  # [B, D + 1] int32: accepted path from the root on, -1 behind
    bonus: torch.Tensor  # [B] int64: the target's own token after the path
    new_lengths: torch.Tensor  # [B] int64: committed length + num_accepted + 1
    valid: torch.Tensor  # [B] bool: False where a row on the path had no usable logit (the walk stops there)
    logprobs: torch.Tensor | None = None  # [B, D + 1] float32: log softmax(logits) of `tokens`, 0 where they are -1
