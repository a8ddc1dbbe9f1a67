"""Bugs in pair scores, chains and trees over a lattice."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_KERNEL = "specdec_kernels/lattice/kernel.py"
_RECURRENT = "specdec_kernels/lattice/kernel_recurrent.py"
_case = partial(parity, "lattice")

MUTANTS = (
    Mutant("lattice_counts_above_the_depth", _KERNEL,
           "count = tl.minimum(tl.load(counts_ptr + request, mask=in_batch, other=0), DEPTH)",
           "count = tl.load(counts_ptr + request, mask=in_batch, other=0)", _case("tree_ragged"),
           "a path goes on behind the last position, in another request's candidates"),
    Mutant("lattice_anchor_is_no_predecessor", _KERNEL,
           "before = tl.where((place == 0) & (lane == 0), tl.load(lattice.last_tokens + request), before)",
           "before = tl.where((place == 0) & (lane == 0), tl.load(lattice.tokens + cell * CANDIDATES), before)",
           _case("pair_odd"), "historical: the first draft is scored without the last committed token (ik_llama#2296)"),
    Mutant("lattice_gate_by_the_successor", _KERNEL, "table_rows(factors.token_gates, before, factor, vocab, RANK)",
           "table_rows(factors.token_gates, tokens, factor, vocab, RANK)", _case("pair_token_gated"),
           "the gate sees the candidate in place of its predecessor"),
    Mutant("lattice_gated_factor_rounded", _KERNEL,
           'scores = tl.dot(rest, tl.trans(successor), scores, input_precision="ieee")', "scores = scores",
           ("tests/kernels/test_lattice.py::test_half_precision_factors",),
           "gated factors have no more bits than the weights"),
    Mutant("lattice_predecessor_by_draft_id", _KERNEL, "before = _target_ids(before, lattice.vocabulary, follows)",
           "before = _target_ids(before, None, follows)", _case("pair_mapped"),
           "a reduced vocabulary's ids read the rows of other tokens"),
    Mutant("lattice_chain_follows_the_first_candidate", _KERNEL,
           'value = tl.max(tl.where(lane[None, :, None] == chosen[:, None, None], values, float("-inf")), 1)',
           'value = tl.max(tl.where(lane[None, :, None] == 0, values, float("-inf")), 1)', _case("greedy_odd"),
           "scores are those after the most likely candidate, not after the chosen one"),
    Mutant("lattice_ties_by_place", _KERNEL, "lowest = tl.min(tl.where(largest, ids, _NO_ID), 1)",
           "lowest = tl.sum(tl.where(lane[None, :] == tl.argmax(value, 1)[:, None], ids, 0), 1)", _case("greedy_ties"),
           "among equal values the first candidate is taken, not the lowest id"),
    Mutant("lattice_probs_of_the_first_temperature", _KERNEL, "scale = d.exponent_scale(temperature)[:, None]",
           "scale = d.exponent_scale(temperature * 0 + 1)[:, None]", _case("sample_odd"),
           "drafts are sampled at temperature 1, whatever the request's is"),
    Mutant("lattice_uniform_of_another_node", _KERNEL,
           "uniform = d.keyed_uniform(draws, at, request, request, in_batch, _DRAFT, place + 1)",
           "uniform = d.keyed_uniform(draws, at, request, request, in_batch, _DRAFT, place)", _case("sample_odd"),
           "the key of a node's uniform differs from that of the other samplers"),
    Mutant("lattice_chain_continues_after_its_end", _KERNEL, 'alive = alive & (top > float("-inf"))',
           'alive = in_batch & (top > float("-inf"))', _case("greedy_hostile", "sample_hostile"),
           "a chain goes on after a position without a usable candidate"),
    Mutant("lattice_tree_not_normalised", _KERNEL, "(top - value) + tl.log(tl.maximum(total, 1.0))",
           "(top - value) + tl.log(tl.maximum(total * 0, 1.0))", _case("tree_odd"),
           "the best child of every node has probability 1"),
    Mutant("lattice_tree_forgets_the_parent", _KERNEL, "place, predecessor = choice // BLOCK_C, choice % BLOCK_C",
           "place, predecessor = choice // BLOCK_C, choice % BLOCK_C * 0", _case("tree_odd"),
           "children are scored after the first candidate"),
    Mutant("lattice_rnn_inputs_swapped", _RECURRENT, "of_token = weight_ptr + SIZE", "of_token = weight_ptr",
           _case("rnn_odd"), "the embedding is multiplied by the columns of the state"),
    Mutant("lattice_rnn_gate_turned_round", _RECURRENT, "following = kept * state + (1.0 - kept) * _tanh(candidate)",
           "following = (1.0 - kept) * state + kept * _tanh(candidate)", _case("rnn_odd"),
           "the gate keeps what it should replace"),
    Mutant("lattice_gru_reset_of_the_sum", _RECURRENT, "_tanh(new + tl.sigmoid(reset) * recurrent)",
           "_tanh(tl.sigmoid(reset) * (new + recurrent))", _case("gru_odd"),
           "the reset gate acts on the input as well as on the state"),
)  # fmt: skip
