"""Bugs in the history store, and in drafting from it."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import bugs_in, parity

_insertion = bugs_in("specdec_kernels/history/kernel_insert.py")
_scan = bugs_in("specdec_kernels/history/kernel_scan.py")
_selection = bugs_in("specdec_kernels/history/kernel_select.py")
_drafting = bugs_in("specdec_kernels/history/kernel_draft.py")
_store = bugs_in("specdec_kernels/history/types.py")
_TESTS = "tests/kernels/test_history.py"
_ENGINE_TESTS = "tests/algorithms/test_lookup.py"
_case = partial(parity, "history")
_context = bugs_in("algorithms/step/context.py")

MUTANTS = (
    _insertion("a_history_is_taken_before_its_turn",
               "history = tl.load(store.ring + {{number -> (number + 1)}} % RING, mask=starts, other=0)",
               _case("insert_new", "insert_no_room"),
               "a request gets a history that a slot still has, or the wrong one is dropped"),
    _insertion("every_slot_takes_the_same_history",
               "number = started + {{tl.cumsum( -> }}starts.to(tl.int64){{, 0) - 1 ->  * 0}}\n"
               "        history = tl.load(store.ring", _case("insert_new", "insert_all_new"),
               "requests that begin together write into one history"),
    _insertion("histories_of_an_earlier_block_are_overwritten",
               "started {{+= tl.sum(starts.to(tl.int64), 0) -> = clock}}\n    tl.debug_barrier()",
               (f"{_TESTS}::test_4096_requests_fill_one_store",),
               "of more requests than one block holds, some take the histories of others"),
    _insertion("last_token_not_written", "(column {{<= -> <}} count)", _case("insert_step"),
               "a match cannot be continued by the last token of a history"),
    _store("a_moved_request_shares_its_history", "{{        self.of_slot[source].copy_(self.of_slot[target])\n -> }}",
           (f"{_TESTS}::test_reference_is_the_shelf",), "the slot that a request left writes into its history"),
    _store("the_corpus_is_cleared", "self.lengths{{[: len(self.ring)] -> }}.zero_()",
           (f"{_TESTS}::test_a_corpus_stays",), "a reset run loses the corpus too"),
    _selection("the_previous_history_is_the_requests_own", "written = (length {{> -> >=}} 0) & (length < context)",
               (f"{_TESTS}::test_a_request_that_has_written_nothing_has_no_history",),
               "a prompt of one token is continued as the request that had its slot before"),
    _selection("the_oldest_history_first", "| ({{(MAX_AGE - age) -> age}} << 40)",
               (f"{_TESTS}::test_kernels_are_the_shelf",), "of equal matches those in the oldest history are kept"),
    _drafting(
        "a_match_is_taken_twice",
        "(tl.max(known.to(tl.int32), 1) {{== -> >=}} 0)",
        (
            *_case("match_one_letter", "match_unigrams"),
            f"{_TESTS}::test_requests_served_together_find_what_each_finds_alone[latest-many]",
        ),
        "a place in a request's own list is taken once more from the list of its last token",
    ),
    _selection("the_own_history_is_found_twice", "{{ & (other != own) -> }}", _case("match_tree", "match_latest"),
               "a request meets itself among those with its last two tokens"),
    _scan("a_history_between_two_passes",
          "live = live & (newest if NEWEST else {{newest == 0 -> age >= NEW_HISTORIES}})",
          (f"{_TESTS}::test_requests_served_together_find_what_each_finds_alone",),
          "the beginnings of the newest histories are read by neither pass"),
    _selection("hits_of_other_requests", "matching = (hit {{>> 40 == bucket -> >= 0}}) & (other != own)",
               (f"{_TESTS}::test_requests_served_together_find_what_each_finds_alone[latest-few]",),
               "a request compares itself where the last token of another stands, and counts a match of no token"),
    _scan("buckets_share_their_hits", "tl.store(begins_ptr + bucket, first + tl.cumsum(count, 0) {{- count -> * 0}})",
          (f"{_TESTS}::test_requests_served_together_find_what_each_finds_alone[latest-many]",),
          "hits of one bucket are written over those of another"),
    _scan(
        "the_smaller_rank_is_lost",
        "rank = tl.where(enters, {{tl.minimum(rank, before) -> -1}}, rank)",
        (
            *_case("match_one_letter", "match_unigrams"),
            f"{_TESTS}::test_requests_served_together_find_what_each_finds_alone[latest-many]",
        ),
        "a list drops what a better match displaces",
    ),
    _drafting("matches_lose_their_weight", "FULL_SHARE >> ({{2 -> 0}} * tl.minimum(shortfall, MAX_SHORTFALL))",
              _case("match_tree"), "a match of one token votes like one of many"),
    _drafting("all_siblings_are_alike", "share = tl.where(better > 0, share{{ * 7 // 8 -> }}, share)",
              _case("match_latest", "match_many_siblings"), "the latest continuation is no better than the others"),
    _drafting("parent_of_another_match",
              "attach = tl.where({{( -> }}candidate == owner{{) | ((parent == owner) & (branch == depth + 1)) -> "
              "}}, count, attach)", _case("match_one_letter", "match_tree"),
              "a draft hangs under the root where an earlier candidate has its parent"),
    _context("texts_are_not_written", "            {{texts.observe(seen) -> pass}}\n",
             (f"{_ENGINE_TESTS}::test_two_drafters_read_one_store[none]",), "drafters look up in an empty store"),
    _context("texts_stay_with_their_rows", "            {{texts.store.move_slot(source, target) -> pass}}\n",
             (f"{_ENGINE_TESTS}::test_texts_of_requests_that_end_in_every_way[ngram]",),
             "a request that changes its row goes on in the text of another"),
    bugs_in("algorithms/drafting/token_history.py")(
        "each_drafter_has_a_store",
        "            {{if histories.arguments == (num_kept, tuple(corpus)):\n"
        "                return histories -> pass}}\n",
        (f"{_ENGINE_TESTS}::test_two_drafters_read_one_store[none]",),
        "two drafters store every text twice",
    ),
)  # fmt: skip
