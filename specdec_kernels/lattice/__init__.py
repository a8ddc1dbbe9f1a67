"""Drafts from a lattice: a few candidates of each position of a block, and a score of each pair of neighbours.

Block drafters with a Markov head (DSpark) or a candidate selector (DFlash 2) score a candidate given its predecessor.
From these scores come the most likely chain, a sampled chain with its exact distribution, or a draft tree. Heads with a
state (DSpark's rnn, Domino's GRU) have no scores of pairs: their state goes on by one token at a time.
"""

from specdec_kernels.lattice.api import (
    dense_probs,
    greedy_chain,
    gru_step,
    lattice_tree,
    pair_scores,
    rnn_step,
    sample_chain,
)
from specdec_kernels.lattice.types import Lattice, PairFactors, RnnStep, SampledChain

__all__ = [
    "Lattice", "PairFactors", "RnnStep", "SampledChain", "dense_probs", "greedy_chain", "gru_step", "lattice_tree",
    "pair_scores", "rnn_step", "sample_chain",
]  # fmt: skip
