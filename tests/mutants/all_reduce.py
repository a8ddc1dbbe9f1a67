"""Bugs in the exchange of sums between devices."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_KERNEL = "specdec_kernels/all_reduce/kernel.py"
_case = partial(parity, "all_reduce")

MUTANTS = (
    Mutant(
        "own_sum_of_the_exchange_added_twice",
        _KERNEL,
        "    total = tl.zeros([BLOCK_D], tl.float32)\n",
        "    total = own\n",
        _case("exchange_one_row", "exchange_second_rank"),
        "the total begins with the sum of this rank, which is added once more in its turn",
    ),
    Mutant(
        "sums_of_the_other_slot",
        _KERNEL,
        "parts.shape[0], rows, slot * exchange.rows * width, first_flag",
        "parts.shape[0], rows, (1 - slot) * exchange.rows * width, first_flag",
        _case("exchange_slot_1"),
        "sums are written to the slot of the next call and read from there, before the other ranks have read it",
    ),
    Mutant(
        "last_part_of_a_row_left_out",
        _KERNEL,
        "for part in tl.range(1, num_parts):",
        "for part in tl.range(1, num_parts - 1):",
        _case("exchange_parts"),
        "the last partial sum of this rank is left out",
    ),
)
