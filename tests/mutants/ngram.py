"""Bugs in the n-gram store."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_INSERTION = "specdec_kernels/ngram/kernel_insert.py"
_MATCHING = "specdec_kernels/ngram/kernel_match.py"
_EVICTION = "specdec_kernels/ngram/kernel_evict.py"
_TESTS = "tests/kernels/test_ngram.py"
_case = partial(parity, "ngram")

MUTANTS = (
    Mutant(
        "overlaps_recounted",
        _INSERTION,
        "position = tl.where(begun, start, start + window - (DEPTH - 1))",
        "position = tl.where(begun, start - 1, start + window - (DEPTH - 1))",
        _case("insert_step"),
        "n-grams that reach back before the new tokens count their old tokens again",
    ),
    Mutant(
        "token_stays_under_every_parent",
        _MATCHING,
        "same = (tree_parent == above) & (tree_token == value)",
        "same = (tree_parent == 0) & (tree_token == value)",
        _case("match_recent"),
        "nodes of different parents are taken for one",
    ),
    Mutant(
        "shortest_suffix_first",
        _MATCHING,
        "size = tl.maximum(WINDOW - lane, 0)",
        "size = tl.where(lane < WINDOW, lane + 1, 0)",
        (f"{_TESTS}::test_longer_matches_come_first",),
        "short matches fill the tree before the long ones",
    ),
    Mutant(
        "breadth_of_the_root_everywhere",
        _MATCHING,
        "breadth = _breadth(below, WINDOW, LEAST, MOST, BY_COUNT)",
        "breadth = _breadth(below * 0, WINDOW, LEAST, MOST, BY_COUNT)",
        _case("match_recent", "match_narrow", "match_shipped"),
        "the breadth does not narrow with the length of the match",
    ),
    Mutant(
        "frequency_ties_to_the_higher_token",
        _INSERTION,
        "return tl.where(mask, (count << 32) | (-token + layout.MAX_TOKEN), -1)",
        "return tl.where(mask, (count << 32) | token, -1)",
        (*_case("insert_crowded_lists"), *_case("insert_same_text"), *_case("insert_step")),
        "equal counts go to the higher token",
    ),
    Mutant(
        "eviction_keeps_one_more",
        _EVICTION,
        "cut = tl.load(counters_ptr + layout.EPOCH) - _youngest(fitting.to(tl.int64)) + 1",
        "cut = tl.load(counters_ptr + layout.EPOCH) - _youngest(fitting.to(tl.int64))",
        (*_case("insert_evicting"), f"{_TESTS}::test_4096_requests_fill_one_store[600-512]"),
        "the boundary of what is kept is off by one insertion",
    ),
    Mutant(
        "old_ages_are_bins",
        _EVICTION,
        "return (age_bin - (shift << (layout.AGE_BITS - 1))) << shift",
        "return age_bin - (shift << (layout.AGE_BITS - 1))",
        (f"{_TESTS}::test_old_insertions_go_first",),
        "the number of a bin is taken for an age, and everything older goes",
    ),
    Mutant(
        "rows_do_not_take_what_is_left_over",
        _EVICTION,
        "kept = tl.minimum(count, limit + tl.where(rank < more, longer, 0))",
        "kept = tl.minimum(count, limit)",
        _case("insert_too_many"),
        "an insertion of more tokens than fit enters fewer than it could",
    ),
    Mutant(
        "ages_are_counted_twice",
        _EVICTION,
        "        _fill(ages_ptr, 0, layout.NUM_BINS, BLOCK)\n",
        "",
        (f"{_TESTS}::test_4096_requests_fill_one_store[600-512]",),
        "the ages of one eviction are left for the next",
    ),
    Mutant(
        "node_0_is_no_child",
        _MATCHING,
        "        return tl.where(child >= 0, share, -1.0)",
        "        return tl.where(child > 0, share, -1.0)",
        (f"{_TESTS}::test_node_0_may_be_a_child[triton-prob]",),
        "the continuation that happens to be node 0 is never drafted",
    ),
)
