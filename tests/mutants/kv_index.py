"""Bugs in page-table arithmetic, in running sums, and in moving accepted paths."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import bugs_in, parity

_kernel = bugs_in("specdec_kernels/kv_index/kernel.py")
_case = partial(parity, "kv_index")

MUTANTS = (
    _kernel("page_edge_off_by_one",
            "size = (count + ADD + step + GROWTH * (entry % REPEAT){{ + UNIT - 1 -> }}) // UNIT{{ ->  + 1}}",
            _case("flashinfer_edges"), "one page too many where a request ends on a page edge"),
    _kernel("last_page_len_zero",
            "last_page_len = {{tl.where(held > 0, (tl.maximum(held, 1) - 1) % PAGE_SIZE + 1, 0) -> held % PAGE_SIZE}}",
            _case("flashinfer_edges"), "a full last page counts as empty"),
    _kernel("slot_in_32_bits",
            "{{page.to(tl.int64) * PAGE_SIZE -> (page * PAGE_SIZE).to(tl.int64)}} + place % PAGE_SIZE",
            ("tests/kernels/test_large_offsets.py::test_slots_beyond_32_bits",),
            "the slot of a page in a large pool wraps around 2^31"),
    _kernel("entries_past_the_length", "used = in_out & (column * PAGE_SIZE {{< -> <=}} held)", _case("table_edges"),
            "a page that the request does not hold yet is handed to the backend"),
    _kernel("move_offset_in_32_bits",
            "{{values = tl.load(kv_ptr + source[:, None] * ROW + within, mask=live, other=0.0) -> "
            "at = (source.to(tl.int32)[:, None] * ROW).to(tl.int64)\n"
            "    values = tl.load(kv_ptr + at + within, mask=live, other=0.0)}}",
            ("tests/kernels/test_large_offsets.py::test_a_path_moves_beyond_32_bit_offsets",),
            "an element offset in a large pool wraps around 2^31"),
    _kernel(
        "move_in_the_wrong_order",
        "    {{values = tl.load(kv_ptr + source[:, None] * ROW + within, mask=live, other=0.0)\n"
        "    tl.debug_barrier()  # one lane's target may be another lane's source\n"
        "    tl.store(kv_ptr + target[:, None] * ROW + within, values, mask=live) -> for last_first in range(PATH):\n"
        "        now = live & (step == PATH - 1 - last_first)[:, None]\n"
        "        values = tl.load(kv_ptr + source[:, None] * ROW + within, mask=now, other=0.0)\n"
        "        tl.store(kv_ptr + target[:, None] * ROW + within, values, mask=now)}}\n",
        _case("move_overlap", "move_page_16"),
        "an accepted path is moved entry by entry from its end, over entries that are not read yet",
    ),
    _kernel("commit_to_the_next_slot",
            "target = _page_slot(table_ptr, request, length + step{{ ->  + 1}}, moves, ROW_PAGES, PAGE_SIZE)",
            _case("move_overlap"), "accepted keys are stored one position late"),
    _kernel("running_sum_restarts", "        before {{+ -> }}= tl.sum(size, 0)",
            ("tests/kernels/test_small_tiles.py::test_running_sums_carry_over_many_blocks",),
            "sums of the third block of requests forget the first"),
    _kernel("row_of_the_previous_end",
            "past = open_ & (tl.load(sums_ptr + middle + 1, mask=open_, other=0) {{<= -> <}} place)",
            _case("flashinfer_edges"), "the first entry of a request goes to the request before it"),
)  # fmt: skip
