"""Arguments and results of verification, and the names of its rules."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from specdec_kernels.sampling.types import SamplingTensors
from specdec_kernels.tree.types import TreeLinks

CHAIN_RULES = ("rejection", "block")  # for sampled chains
TREE_RULES = ("multi_round", "without_replacement", "k_seq", "greedy_paths", "traversal")  # for sampled trees
WITHOUT_REPLACEMENT_RULES = ("without_replacement", "traversal")  # a rejected token cannot be sampled again
BOTTOM_UP_RULES = ("greedy_paths", "traversal")  # a node is judged after its children
# Of `greedy_paths`: from which p / q on a token belongs to the next class. Products with them are compared, so kernels
# and reference must take the same numbers, all of which are exact in float32.
CLASS_EDGES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
SAMPLED_RULES = CHAIN_RULES + TREE_RULES  # need the draft's own probabilities
RULES = ("greedy", "target_only", *SAMPLED_RULES)


class Verification(NamedTuple):
    """The checked arguments of `accept`, which describes them."""

    rule: str
    tokens: Annotated[Tensor, "B N int64"]
    tree: TreeLinks
    values: Tensor  # logits, or with `probabilities` target probabilities
    lengths: Annotated[Tensor, "B int64"]
    max_depth: int
    sampling: SamplingTensors
    uniforms: Annotated[Tensor | None, "B U float64"] = None
    draft_probs: Annotated[Tensor | None, "B R V float32"] = None
    draft_rows: Annotated[Tensor | None, "B N int32"] = None
    probabilities: bool = False
    return_logprobs: bool = True

    @property
    def samples_drafts(self) -> bool:
        """Whether the rule compares the target's distribution with the draft's; without a temperature all is greedy."""
        return self.rule in SAMPLED_RULES and self.sampling.temperature is not None


class Accepted(NamedTuple):
    """Outcome of verifying one draft tree per request; D is the most drafts that can be accepted."""

    tokens: Tensor  # [B, D + 1] int64: accepted drafts, then the bonus token, then -1
    num_accepted: Tensor  # [B] int32: accepted drafts, the bonus excluded
    nodes: Tensor  # [B, D + 1] int32: accepted path from the root on, then -1
    bonus: Tensor  # [B] int64: the target's own token after the path
    new_lengths: Tensor  # [B] int64: committed length + num_accepted + 1
    valid: Tensor  # [B] bool: False where a row on the path had no usable logit (the path ends there)
    logprobs: Tensor | None = None  # [B, D + 1] float32: log softmax(logits) of `tokens`, 0 where they are -1
