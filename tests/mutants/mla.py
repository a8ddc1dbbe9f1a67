"""Bugs in latent attention."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_KERNEL = "specdec_kernels/mla/kernel.py"
_case = partial(parity, "mla")

MUTANTS = (
    Mutant(
        "mla_rope_left_out",
        _KERNEL,
        'scores = tl.dot(q_r, tl.trans(rope), input_precision="ieee")',
        'scores = 0.0 * tl.dot(q_r, tl.trans(rope), input_precision="ieee")',
        _case("chain_odd"),
        "scores without the rotary part of the key",
    ),
    Mutant(
        "mla_dropped_split",
        _KERNEL,
        "live = (last_key + split_length - 1) // split_length",
        "live = last_key // split_length",
        _case("splits"),
        "the last, partial split never reaches the merge",
    ),
    Mutant(
        "mla_splits_end_at_the_bound",
        _KERNEL,
        "return split_tokens << tl.maximum(",
        "return split_tokens << tl.minimum(",
        ("tests/kernels/test_mla.py::test_splits_at_the_bound_of_memory",),
        "keys past the last of a bounded number of splits are left out",
    ),
    Mutant(
        "mla_row_of_the_other_head",
        _KERNEL,
        "    nodes = rows // HEADS\n",
        "    nodes = rows % HEADS\n",
        _case("chain_odd"),
        "rows are unpacked head first",
    ),
    Mutant(
        "mla_rest_of_the_latent_unscaled",
        _KERNEL,
        'acc_b = tl.dot(weights, latent_b, acc_b * decay[:, None], input_precision="ieee")',
        'acc_b = tl.dot(weights, latent_b, acc_b, input_precision="ieee")',
        ("tests/kernels/test_small_tiles.py::test_a_latent_in_two_blocks_over_several_tiles",),
        "the second accumulator is not rescaled when the maximum rises",
    ),
)
