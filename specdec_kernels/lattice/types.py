"""Arguments and results of the lattice functions."""

from typing import Annotated, NamedTuple

from torch import Tensor


class Lattice(NamedTuple):
    """D positions of a block with C candidates each, for B requests. The candidates of a position are distinct. With a
    vocabulary every id of `tokens` is in [0, V')."""

    tokens: Annotated[Tensor, "B D C int64"]  # below 2^31: ids of the drafter
    logits: Annotated[Tensor, "B D C float32|float16|bfloat16"]
    last_tokens: Annotated[Tensor, "B int64"]  # the target's id of the token before position 0
    counts: Annotated[Tensor | None, "B int32"] = None  # drafted positions, D if it is larger; None for all
    vocabulary: Annotated[Tensor | None, "* int64"] = None  # what is added to a drafter's id for the target's


class PairFactors(NamedTuple):
    """Pair scores of rank r: a candidate c of position i that follows token p scores f(i, p) . successors[c].

    f(i, p) = predecessors[p]                                              vanilla
            | predecessors[p] * gates[i]                                   with gates alone
            | predecessors[p] * sigmoid(gates[i] + token_gates[p])         with both
    """

    predecessors: Annotated[Tensor, "V r float32|float16|bfloat16"]
    """By the target's ids: W1 of DSpark, the predecessor codebook of DFlash 2."""
    successors: Annotated[Tensor, "* r predecessors"]
    """By the drafter's ids: W2 of DSpark, the successor codebook of DFlash 2."""
    gates: Annotated[Tensor | None, "B D r predecessors"] = None
    """P h of DFlash 2; G_h h + b of a gated DSpark head."""
    token_gates: Annotated[Tensor | None, "V r predecessors"] = None
    """W1 G_e^T of a gated DSpark head, made once on loading."""


class Draws(NamedTuple):
    """How `sample_chain`, which describes them, draws."""

    temperature: Annotated[Tensor, "B float32"]
    seeds: Annotated[Tensor | None, "B int64"]
    positions: Annotated[Tensor | None, "B int64"]
    uniforms: Annotated[Tensor | None, "B D float64"]


class SampledChain(NamedTuple):
    """A chain of D + 1 nodes as a `Selection`, and what it was sampled from."""

    tokens: Tensor  # [B, D + 1] int64, column 0 is the last token, 0 in unused nodes
    parents: Tensor  # [B, D + 1] int32: n - 1, -2 in unused nodes
    candidates: Tensor  # [B, D + 1] int32: position * C + candidate, -1 for the root and unused nodes
    scores: Tensor  # [B, D + 1] float32: probability of the path, 1 for the root and 0 for unused nodes
    probs: Tensor  # [B, D, C] float32: the distribution of each position given its predecessor, 0 where unused


class RnnStep(NamedTuple):
    """One step of a recurrent Markov head."""

    state: Tensor  # [R, r]
    output: Tensor  # [R, r]: W2 makes the bias of the logits from it
