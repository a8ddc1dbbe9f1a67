"""Bugs in suffix drafting."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_INSERTION = "specdec_kernels/suffix/kernel_insert.py"
_MATCHING = "specdec_kernels/suffix/kernel_match.py"
_TESTS = "tests/kernels/test_suffix.py"
_case = partial(parity, "suffix")

MUTANTS = (
    Mutant(
        "text_of_a_running_row_is_taken",
        _INSERTION,
        "age = tl.where(inside & (owners < 0), stamps, 0x7FFFFFFFFFFFFFFF)",
        "age = tl.where(inside, stamps, 0x7FFFFFFFFFFFFFFF)",
        (f"{_TESTS}::test_the_oldest_text_without_a_row_makes_room",),
        "a long request loses its text to a new one",
    ),
    Mutant(
        "last_token_not_written",
        _INSERTION,
        "live = (column <= count) & (place < context)",
        "live = (column < count) & (place < context)",
        _case("insert_step"),
        "a match cannot be continued by the last token of a text",
    ),
    Mutant(
        "matches_lose_their_weight",
        _MATCHING,
        "weight = tl.where(found & (behind <= STEPS), 1 << (2 * tl.maximum(STEPS - behind, 0)), 0)",
        "weight = tl.where(found & (behind <= STEPS), 1, 0)",
        _case("match_tree"),
        "a match of one token votes like one of many",
    ),
    Mutant(
        "parent_of_another_match",
        _MATCHING,
        "above = tl.sum(tl.sum(tl.where((match == lead) & (depth == at - 1), first, 0), 1), 0)",
        "above = lead",
        _case("match_one_letter", "match_tree"),
        "a draft hangs under the root where an earlier match has its parent",
    ),
)
