"""Bugs in page-table arithmetic, in running sums, and in moving accepted paths."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_KERNEL = "specdec_kernels/kv_index/kernel.py"
_case = partial(parity, "kv_index")

MUTANTS = (
    Mutant(
        "page_edge_off_by_one",
        _KERNEL,
        "size = (count * SCALE + ADD + step + GROWTH * (entry % REPEAT) + UNIT - 1) // UNIT",
        "size = (count * SCALE + ADD + step + GROWTH * (entry % REPEAT)) // UNIT + 1",
        _case("flashinfer_edges"),
        "one page too many where a request ends on a page edge",
    ),
    Mutant(
        "last_page_len_zero",
        _KERNEL,
        "last_page_len = tl.where(held > 0, (tl.maximum(held, 1) - 1) % PAGE_SIZE + 1, 0)",
        "last_page_len = held % PAGE_SIZE",
        _case("flashinfer_edges"),
        "a full last page counts as empty",
    ),
    Mutant(
        "slot_in_32_bits",
        _KERNEL,
        "page.to(tl.int64) * PAGE_SIZE + place % PAGE_SIZE",
        "(page * PAGE_SIZE).to(tl.int64) + place % PAGE_SIZE",
        ("tests/kernels/test_large_offsets.py::test_slots_beyond_32_bits",),
        "the slot of a page in a large pool wraps around 2^31",
    ),
    Mutant(
        "entries_past_the_length",
        _KERNEL,
        "used = in_out & (column * PAGE_SIZE < held)",
        "used = in_out & (column * PAGE_SIZE <= held)",
        _case("table_edges"),
        "a page that the request does not hold yet is handed to the backend",
    ),
    Mutant(
        "move_offset_in_32_bits",
        _KERNEL,
        "values = tl.load(kv_ptr + source[:, None] * ROW + within, mask=live, other=0.0)",
        "at = (source.to(tl.int32)[:, None] * ROW).to(tl.int64)\n"
        "    values = tl.load(kv_ptr + at + within, mask=live, other=0.0)",
        ("tests/kernels/test_large_offsets.py::test_a_path_moves_beyond_32_bit_offsets",),
        "an element offset in a large pool wraps around 2^31",
    ),
    Mutant(
        "move_in_the_wrong_order",
        _KERNEL,
        "    move_rows(kv_ptr, source, target, moves, tl.program_id(1) * BLOCK_F,",
        "    for last_first in range(PATH):\n"
        "        now = moves & (step == PATH - 1 - last_first)\n"
        "        move_rows(kv_ptr, source, target, now, tl.program_id(1) * BLOCK_F,",
        _case("move_overlap", "move_page_16"),
        "an accepted path is moved entry by entry from its end, over entries that are still to be read",
    ),
    Mutant(
        "commit_to_the_next_slot",
        _KERNEL,
        "target = _page_slot(table_ptr, request, length + step, moves, ROW_PAGES, PAGE_SIZE)",
        "target = _page_slot(table_ptr, request, length + step + 1, moves, ROW_PAGES, PAGE_SIZE)",
        _case("move_overlap"),
        "accepted keys are stored one position late",
    ),
    Mutant(
        "running_sum_restarts",
        _KERNEL,
        "        before += tl.sum(size, 0)",
        "        before = tl.sum(size, 0)",
        ("tests/kernels/test_small_tiles.py::test_running_sums_carry_over_many_blocks",),
        "sums of the third block of requests forget the first",
    ),
    Mutant(
        "row_of_the_previous_end",
        _KERNEL,
        "past = open_ & (tl.load(sums_ptr + middle + 1, mask=open_, other=0) <= place)",
        "past = open_ & (tl.load(sums_ptr + middle + 1, mask=open_, other=0) < place)",
        _case("flashinfer_edges"),
        "the first entry of a request goes to the request before it",
    ),
)
