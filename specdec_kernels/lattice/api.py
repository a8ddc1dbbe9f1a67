"""Chains and trees over the candidates of a block drafter, given a score of each pair of neighbouring candidates.

A candidate c of position i that follows candidate p of position i - 1 has the value

    s_i(p, c) = logits[i, c] + pairs[i, p, c]      in float32; NaN counts as -inf and +inf as the largest float32,

and at temperature T the probability q_i(c | p) = softmax over c of s_i(p, c) / T. At position 0 the predecessor is the
last token, and row 0 of `pairs` holds its scores; the other rows are not used. A chain or a path ends at a position
that the request does not draft (`Lattice.counts`), or whose every candidate has the value -inf. Results are as
`build_tree` takes them: tokens are the target's ids, unused nodes have token 0, parent -2, candidate -1 and score 0.
The depth of a node is `candidates // C + 1`.

`pairs` are [B, D, C, C] float32, as `pair_scores` gives them. All tensors but the weight of `rnn_step` are contiguous.
"""

import torch
from torch import Tensor

from specdec_kernels.checks import (
    expect_at_least_one,
    expect_between,
    expect_fields,
    expect_shape,
    expect_strided,
    expect_tensors,
)
from specdec_kernels.lattice.types import Draws, Lattice, PairFactors, RnnStep, SampledChain
from specdec_kernels.launch import dispatch
from specdec_kernels.sampling.api import expect_randomness
from specdec_kernels.tree.api import expect_nodes
from specdec_kernels.tree.types import Selection

MAX_POSITIONS = 32
MAX_CANDIDATES = 32
MAX_RANK = 1024
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def pair_scores(lattice: Lattice, factors: PairFactors, *, impl: str = "auto") -> Tensor:
    """[B, D, C, C] float32: the score of candidate c after candidate p at [b, i, p, c], see `PairFactors`.

    Computed in float32; the published heads round f to their own dtype. Scores are 0 at unused positions, in the rows
    of position 0 other than row 0, and of tokens outside of a table.

    Args:
        lattice: the logits are not read.
        factors: float32, float16 or bfloat16, all of one dtype; rank 1 to 1024.
    """
    _check_lattice(lattice)
    batch, depth, _ = lattice.tokens.shape
    expect_fields(factors, others=dict(tokens=lattice.tokens), B=batch, D=depth)
    expect_between("r of predecessors", factors.predecessors.shape[1], 1, MAX_RANK)
    if factors.token_gates is not None and factors.gates is None:
        raise ValueError("token_gates: expected gates with them, got None")
    return dispatch("pair_scores", __package__, impl, factors.predecessors)(lattice, factors)


def greedy_chain(lattice: Lattice, pairs: Tensor, *, impl: str = "auto") -> Selection:
    """The chain of the largest value of each position given the chosen predecessor; among equals the lowest id of
    `Lattice.tokens`. A score is the product of the probabilities at temperature 1. Node n is at position n - 1.
    """
    _check_lattice(lattice, pairs)
    return dispatch("greedy_chain", __package__, impl, lattice.logits)(lattice, pairs)


def sample_chain(
    lattice: Lattice,
    pairs: Tensor,
    temperature: Tensor,
    seeds: Tensor | None,
    positions: Tensor | None,
    *,
    uniforms: Tensor | None = None,
    impl: str = "auto",
) -> SampledChain:
    """Sample each position from q_i(c | p) at the request's temperature, p being the candidate sampled before.

    A sample is the inverse of the cumulative distribution at one uniform, in the order of the candidates. The uniform
    of node n is keyed by (seed, position, DRAFT_STREAM, slot n), as in `sample_children`. At temperature 0 the chain is
    `greedy_chain`'s, and the probabilities are one at its candidates. Filters of the request do not apply: they act on
    the target's distribution. `dense_probs` of the result is what verification takes as `draft_probs`.

    Args:
        temperature: [B] float32.
        seeds: [B] int64, or None with `uniforms`.
        positions: [B] int64, the root's, or None with `uniforms`.
        uniforms: [B, D] float64 in [0, 1), replaces the generator.
    """
    _check_lattice(lattice, pairs)
    draws, (batch, depth, _) = Draws(temperature, seeds, positions, uniforms), lattice.tokens.shape
    expect_fields(draws, others=dict(tokens=lattice.tokens), B=batch, D=depth)
    expect_randomness(seeds, positions, uniforms)
    return dispatch("sample_chain", __package__, impl, lattice.logits)(lattice, pairs, draws)


def lattice_tree(lattice: Lattice, pairs: Tensor, num_nodes: int, *, impl: str = "auto") -> Selection:
    """The tree of the most likely paths, grown best first.

    A path's log-probability is the float32 sum of log q_i(c | p) at temperature 1 from the root on; the largest of all
    that continue a node becomes the next node. Among equals the earliest parent wins, then the lowest id of
    `Lattice.tokens`. A score is the probability of the path.

    Args:
        num_nodes: N, nodes with the root, 1 to 256.
    """
    _check_lattice(lattice, pairs)
    expect_nodes("num_nodes", num_nodes)
    return dispatch("lattice_tree", __package__, impl, lattice.logits)(lattice, pairs, num_nodes)


def dense_probs(lattice: Lattice, probs: Tensor, vocab: int) -> Tensor:
    """[B, D, V] float32: `SampledChain.probs` over the V ids of the target, 0 for all that are no candidates."""
    tokens, added = lattice.tokens, lattice.vocabulary
    ids = tokens if added is None else tokens + added[tokens]
    return probs.new_zeros(*probs.shape[:2], vocab).scatter_(2, ids, probs)


def rnn_step(
    tokens: Tensor, state: Tensor, embedding: Tensor, weight: Tensor, hidden: Tensor, *, impl: str = "auto"
) -> RnnStep:
    """One step of DSpark's recurrent head for R rows. With e = embedding[token], zeros for a token outside of it,

        [g; c; o] = weight [s; e] + hidden,   s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c),   output tanh(o),

    in float32, rounded once. The output is of the old state, as the published head takes it.

    Args:
        tokens: [R] int64, the target's ids of the tokens before the drafts.
        state: [R, r] float32, float16 or bfloat16, zeros before the first draft; all other tensors have
            its dtype, except `tokens`.
        embedding: [V, r]: W1.
        weight: [3 r, 2 r], rows may be strided: the first 2 r columns of the joint projection [3 r, 2 r + H].
        hidden: [R, 3 r]: the rest of the joint projection and its bias, of the hidden state of the slot.
    """
    _check_state(tokens, state, embedding)
    (rows, size), kind = state.shape, state.dtype
    expect_strided(weight=(weight, (3 * size, 2 * size), kind))
    expect_tensors(
        {"state": state, "weight": weight},
        embedding=(embedding, (None, size), kind),
        hidden=(hidden, (rows, 3 * size), kind),
    )
    step = dispatch("rnn_step", __package__, impl, state, kernel="kernel_recurrent")
    return step(tokens, state, embedding, weight, hidden)


def gru_step(
    tokens: Tensor, state: Tensor, embedding: Tensor, weight_ih: Tensor, weight_hh: Tensor, *, impl: str = "auto"
) -> Tensor:
    """[R, S]: the next state of Domino's GRU over token embeddings, without biases, in float32 and rounded once. With
    x = embedding[token], zeros for a token outside of it, and the gates r, z, n in the order of torch,

        r, z = sigmoid(W_ih x + W_hh s),   n = tanh(W_ih x + r (W_hh s)),   s' = (1 - z) n + z s.

    Args:
        tokens: [R] int64.
        state: [R, S] float32, float16 or bfloat16, zeros before the first token; all other tensors have its dtype.
        embedding: [V, H], the target's.
        weight_ih: [3 S, H].
        weight_hh: [3 S, S].
    """
    _check_state(tokens, state, embedding)
    size, kind = state.shape[1], state.dtype
    expect_tensors(
        {"state": state},
        embedding=(embedding, (None, None), kind),
        weight_ih=(weight_ih, (3 * size, embedding.shape[1]), kind),
        weight_hh=(weight_hh, (3 * size, size), kind),
    )
    step = dispatch("gru_step", __package__, impl, state, kernel="kernel_recurrent")
    return step(tokens, state, embedding, weight_ih, weight_hh)


def _check_state(tokens: Tensor, state: Tensor, embedding: Tensor) -> None:
    expect_tensors(state=(state, (None, None), _FLOATS), tokens=(tokens, state.shape[:1], torch.int64))
    expect_shape("embedding", embedding, (None, None))
    expect_at_least_one(**{"size of the state": state.shape[1], "width of the embedding": embedding.shape[1]})


def _check_lattice(lattice: Lattice, pairs: Tensor | None = None) -> None:
    expect_fields(lattice)
    shape = lattice.tokens.shape
    expect_between("D of tokens", shape[1], 1, MAX_POSITIONS)
    expect_between("C of tokens", shape[2], 1, MAX_CANDIDATES)
    expect_tensors({"tokens": lattice.tokens}, pairs=(pairs, (*shape, shape[2]), torch.float32))
