"""Bugs in the exchange of sums between devices."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import bugs_in, parity

_kernel = bugs_in("specdec_kernels/all_reduce/kernel.py")
_case = partial(parity, "all_reduce")

MUTANTS = (
    _kernel("own_sum_of_the_exchange_added_twice", "    total = {{tl.zeros([BLOCK_D], tl.float32) -> own}}\n",
            _case("exchange_one_row", "exchange_second_rank"),
            "the total begins with the sum of this rank, which is added once more in its turn"),
    _kernel("sums_of_the_other_slot", "tl.load(offsets_ptr + other), {{first_word -> 0}})", _case("exchange_slot_1"),
            "words are sent to the first slot in every call, which the other ranks may not have read yet"),
    _kernel("sent_to_the_place_of_another_rank", "place = {{(RANK * capacity + row) -> row}} * D + dims",
            _case("exchange_second_rank", "exchange_four_ranks"), "every rank sends to the place of rank 0"),
    _kernel("own_sum_with_a_bit_that_no_other_rank_has", "own.to(tl.int32, bitcast=True){{ & -2 -> }}",
            _case("exchange_full"), "the last bit of what is sent is not that of the call"),
    _kernel("last_part_of_a_row_left_out", "for part in tl.range(1, num_parts{{ ->  - 1}}):", _case("exchange_parts"),
            "the last partial sum of this rank is left out"),
)  # fmt: skip
