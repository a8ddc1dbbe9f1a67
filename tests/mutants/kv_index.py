"""Bugs in page-table arithmetic, in the indices of other backends, and in moving accepted paths."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_PAGES = "specdec_kernels/kv_index/page_kernel.py"
_PATHS = "specdec_kernels/kv_index/path_kernel.py"
_RAGGED = "specdec_kernels/kv_index/ragged_kernel.py"
_DRAFT = "specdec_kernels/kv_index/draft_kernel.py"
_case = partial(parity, "kv_index")

MUTANTS = (
    Mutant(
        "page_edge_off_by_one",
        _PAGES,
        "pages = (held + PAGE_SIZE - 1) // PAGE_SIZE",
        "pages = held // PAGE_SIZE + 1",
        _case("flashinfer_edges"),
        "one page too many where a request ends on a page edge",
    ),
    Mutant(
        "last_page_len_zero",
        _PAGES,
        "last_page_len = tl.where(held > 0, (tl.maximum(held, 1) - 1) % PAGE_SIZE + 1, 0)",
        "last_page_len = held % PAGE_SIZE",
        _case("flashinfer_edges"),
        "a full last page counts as empty",
    ),
    Mutant(
        "slot_in_32_bits",
        _PAGES,
        "page.to(tl.int64) * PAGE_SIZE + place % PAGE_SIZE",
        "(page * PAGE_SIZE).to(tl.int64) + place % PAGE_SIZE",
        ("tests/kernels/test_large_offsets.py::test_slots_beyond_32_bits",),
        "the slot of a page in a large pool wraps around 2^31",
    ),
    Mutant(
        "entries_past_the_length",
        _PAGES,
        "used = in_out & (column * PAGE_SIZE < held)",
        "used = in_out & (column * PAGE_SIZE <= held)",
        _case("table_edges"),
        "a page that the request does not hold yet is handed to the backend",
    ),
    Mutant(
        "move_offset_in_32_bits",
        _PATHS,
        "values = tl.load(kv_ptr + source[:, None] * ROW + within, mask=live, other=0.0)\n"
        "    tl.debug_barrier()\n"
        "    tl.store(kv_ptr + target[:, None] * ROW + within, values, mask=live)\n\n\n@triton.jit\ndef _slot_pair",
        "at = (source.to(tl.int32)[:, None] * ROW).to(tl.int64)\n"
        "    values = tl.load(kv_ptr + at + within, mask=live, other=0.0)\n"
        "    tl.store(kv_ptr + target[:, None] * ROW + within, values, mask=live)\n\n\n@triton.jit\ndef _slot_pair",
        ("tests/kernels/test_large_offsets.py::test_a_path_moves_beyond_32_bit_offsets",),
        "an element offset in a large pool wraps around 2^31",
    ),
    Mutant(
        "move_in_the_wrong_order",
        _PATHS,
        "    values = tl.load(kv_ptr + source[:, None] * ROW + within, mask=live, other=0.0)\n"
        "    tl.debug_barrier()\n"
        "    tl.store(kv_ptr + target[:, None] * ROW + within, values, mask=live)\n\n\n@triton.jit\ndef _slot_pair",
        "    for last_first in range(PATH):\n"
        "        now = live & (step == PATH - 1 - last_first)[:, None]\n"
        "        values = tl.load(kv_ptr + source[:, None] * ROW + within, mask=now, other=0.0)\n"
        "        tl.store(kv_ptr + target[:, None] * ROW + within, values, mask=now)\n\n\n@triton.jit\ndef _slot_pair",
        _case("move_overlap", "move_page_16"),
        "an accepted path is moved entry by entry from its end, over entries that are still to be read",
    ),
    Mutant(
        "commit_to_the_next_slot",
        _PATHS,
        "target = page_slot(table_ptr, request, length + step, moves, ROW_PAGES, PAGE_SIZE)",
        "target = page_slot(table_ptr, request, length + step + 1, moves, ROW_PAGES, PAGE_SIZE)",
        _case("move_overlap"),
        "accepted keys are stored one position late",
    ),
    Mutant(
        "running_sum_restarts",
        _RAGGED,
        "        before += tl.sum(count, 0)",
        "        before = tl.sum(count, 0)",
        ("tests/kernels/test_small_tiles.py::test_running_sums_carry_over_many_blocks",),
        "sums of the third block of requests forget the first",
    ),
    Mutant(
        "row_of_the_previous_end",
        _RAGGED,
        "past = open_ & (end * scale + (middle + 1).to(tl.int64) * shift <= place)",
        "past = open_ & (end * scale + (middle + 1).to(tl.int64) * shift < place)",
        _case("positions_ragged"),
        "the first entry of a request goes to the request before it",
    ),
    Mutant(
        "branch_shares_a_page",
        _DRAFT,
        "pages = (length % PAGE_SIZE + STEPS + PAGE_SIZE - 1) // PAGE_SIZE",
        "pages = (STEPS + PAGE_SIZE - 1) // PAGE_SIZE + length * 0",
        _case("draft_b64"),
        "historical: branches of a drafter overlap where the prefix ends inside a page (SGLang #15360)",
    ),
    Mutant(
        "window_without_the_sink",
        _DRAFT,
        "early = tl.where(column < sink, column, column + length - prefix)",
        "early = column + length - prefix",
        _case("indices_window"),
        "a window drops the first tokens that a sink must keep",
    ),
)
