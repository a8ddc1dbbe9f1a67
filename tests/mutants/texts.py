"""Bugs in the store of texts, and in drafting from it."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_INSERTION = "specdec_kernels/texts/kernel_insert.py"
_FINDING = "specdec_kernels/texts/kernel_find.py"
_SELECTION = "specdec_kernels/texts/kernel_select.py"
_DRAFTING = "specdec_kernels/texts/kernel_draft.py"
_STORE = "specdec_kernels/texts/types.py"
_TESTS = "tests/kernels/test_texts.py"
_ENGINE_TESTS = "tests/algorithms/test_lookup.py"
_case = partial(parity, "texts")

MUTANTS = (
    Mutant(
        "a_text_is_taken_before_its_turn",
        _INSERTION,
        "text = tl.load(queue_ptr + number % RING, mask=begins, other=0)",
        "text = tl.load(queue_ptr + (number + 1) % RING, mask=begins, other=0)",
        _case("insert_new", "insert_no_room"),
        "a request gets a text that is still with a row, or the wrong one is forgotten",
    ),
    Mutant(
        "every_row_takes_the_same_text",
        _INSERTION,
        "number = begun + tl.cumsum(begins.to(tl.int64), 0) - 1\n        text = tl.load(queue_ptr",
        "number = begun + begins.to(tl.int64) * 0\n        text = tl.load(queue_ptr",
        _case("insert_new", "insert_all_new"),
        "requests that begin together write into one text",
    ),
    Mutant(
        "texts_of_an_earlier_block_are_overwritten",
        _INSERTION,
        "begun += tl.sum(begins.to(tl.int64), 0)\n    tl.debug_barrier()",
        "begun = clock\n    tl.debug_barrier()",
        (f"{_TESTS}::test_4096_requests_fill_one_store",),
        "of more requests than one block holds, some exchange with the queue of others",
    ),
    Mutant(
        "last_token_not_written",
        _INSERTION,
        "(column <= count)",
        "(column < count)",
        _case("insert_step"),
        "a match cannot be continued by the last token of a text",
    ),
    Mutant(
        "a_moved_request_shares_its_text",
        _STORE,
        "        self.slots[source].copy_(self.slots[target])\n",
        "",
        (f"{_TESTS}::test_every_text_is_with_one_row_or_kept",),
        "the row that a request left writes into its text",
    ),
    Mutant(
        "the_corpus_is_forgotten",
        _STORE,
        "self.lengths[: len(self.queue)].zero_()",
        "self.lengths.zero_()",
        (f"{_TESTS}::test_a_corpus_stays",),
        "a run that forgets what it served loses the corpus too",
    ),
    Mutant(
        "the_text_before_is_the_requests_own",
        _SELECTION,
        "begun = inside & (length > 0)",
        "begun = inside & (length >= 0)",
        (f"{_TESTS}::test_a_request_that_has_written_nothing_has_no_text",),
        "a prompt of one token is continued as the request that had its row before",
    ),
    Mutant(
        "the_oldest_text_first",
        _SELECTION,
        "| ((MAX_AGE - age) << 40)",
        "| (age << 40)",
        (f"{_TESTS}::test_own_text_first_then_the_latest", *_case("match_few")),
        "of equal matches those in the oldest text are kept",
    ),
    Mutant(
        "a_match_is_taken_twice",
        _DRAFTING,
        "(tl.max(held.to(tl.int32), 1) == 0)",
        "(tl.max(held.to(tl.int32), 1) >= 0)",
        _case("match_tree", "match_latest"),
        "a place in a request's own list is taken once more from the list of its last token",
    ),
    Mutant(
        "the_own_text_is_found_twice",
        _SELECTION,
        " & (text != own)",
        "",
        _case("match_tree", "match_latest"),
        "a request meets itself among those with its last two tokens",
    ),
    Mutant(
        "a_text_between_two_passes",
        _FINDING,
        "live = live & (newest if NEWEST else newest == 0)",
        "live = live & (newest if NEWEST else age >= NEW_TEXTS)",
        (f"{_TESTS}::test_requests_that_are_served_together_find_what_each_finds_alone",),
        "the beginnings of the newest texts are read by neither pass",
    ),
    Mutant(
        "hits_of_other_requests",
        _SELECTION,
        "going = (hit >> 40 == cell) & (text != own)",
        "going = (hit >= 0) & (text != own)",
        (f"{_TESTS}::test_requests_that_are_served_together_find_what_each_finds_alone[latest-few]",),
        "a request compares itself where the last token of another stands, and counts a match of no token",
    ),
    Mutant(
        "cells_share_their_hits",
        _FINDING,
        "tl.store(begins_ptr + cell, first + tl.cumsum(count, 0) - count)",
        "tl.store(begins_ptr + cell, first + tl.cumsum(count, 0) * 0)",
        (f"{_TESTS}::test_requests_that_are_served_together_find_what_each_finds_alone[latest-many]",),
        "hits of one cell are written over those of another",
    ),
    Mutant(
        "the_smaller_rank_is_lost",
        _FINDING,
        "rank = tl.where(enters, tl.minimum(rank, before), rank)",
        "rank = tl.where(enters, -1, rank)",
        _case("match_tree", "match_latest"),
        "a list forgets what a better match displaces",
    ),
    Mutant(
        "matches_lose_their_weight",
        _DRAFTING,
        "FULL_SHARE >> (2 * tl.minimum(behind, WEIGHT_STEPS)), 0)",
        "FULL_SHARE, 0)",
        _case("match_tree"),
        "a match of one token votes like one of many",
    ),
    Mutant(
        "all_siblings_are_alike",
        _DRAFTING,
        "share = tl.where(better > 0, share * 7 // 8, share)",
        "share = tl.where(better > 0, share, share)",
        _case("match_latest", "match_many_siblings"),
        "the latest continuation is no better than the others",
    ),
    Mutant(
        "parent_of_another_match",
        _DRAFTING,
        "hook = tl.where((match == lead) | ((above == lead) & (split == depth + 1)), count, hook)",
        "hook = tl.where(match == lead, count, hook)",
        _case("match_one_letter", "match_tree"),
        "a draft hangs under the root where an earlier match has its parent",
    ),
    Mutant(
        "texts_are_not_written",
        "algorithms/runtime/parts.py",
        "            texts.observe(seen)\n",
        "            pass\n",
        (f"{_ENGINE_TESTS}::test_two_drafters_read_one_store[none]",),
        "drafters look up in an empty store",
    ),
    Mutant(
        "texts_stay_with_their_rows",
        "algorithms/runtime/parts.py",
        "            texts.store.move_row(source, target)\n",
        "            pass\n",
        (f"{_ENGINE_TESTS}::test_texts_of_requests_that_end_in_every_way[ngram]",),
        "a request that changes its row goes on in the text of another",
    ),
    Mutant(
        "each_drafter_has_a_store",
        "algorithms/runtime/texts.py",
        "            if texts.wanted == (kept, tuple(corpus)):\n                return texts\n",
        "            pass\n",
        (f"{_ENGINE_TESTS}::test_two_drafters_read_one_store[none]",),
        "two drafters store every text twice",
    ),
)
