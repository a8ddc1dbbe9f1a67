"""Bugs in the commit of a speculative step."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_KERNEL = "specdec_kernels/commit/kernel.py"
_case = partial(parity, "commit")

MUTANTS = (
    Mutant(
        "kept_entry_of_a_row_without_tokens",
        _KERNEL,
        "live = (feature < WIDTH) & (count > 0)",
        "live = feature < WIDTH",
        _case("keep_small"),
        "a row of which nothing is committed keeps the last entry of the row before it",
    ),
    Mutant(
        "history_overwrites_the_last_token",
        _KERNEL,
        "place = length + 1 + column",
        "place = length + column",
        _case("commit_chain"),
        "emitted tokens begin at the place of the last token instead of behind it",
    ),
    Mutant(
        "padding_row_gets_a_last_token",
        _KERNEL,
        "tl.store(last_tokens_ptr + request, bonus, mask=active > 0)",
        "tl.store(last_tokens_ptr + request, bonus)",
        _case("commit_padding"),
        "a row without a request changes its state",
    ),
    Mutant(
        "bonus_token_of_the_last_column",
        _KERNEL,
        "tl.where(column == accepted, token, 0)",
        "tl.where(column == PATH - 1, token, 0)",
        _case("commit_tree"),
        "the bonus token stands behind the accepted drafts, not in the last column",
    ),
    Mutant(
        "siblings_are_no_drafts",
        _KERNEL,
        "tl.sum((child >= 0).to(tl.int32) + (sibling >= 0).to(tl.int32), 0)",
        "tl.sum((child >= 0).to(tl.int32), 0)",
        _case("commit_tree"),
        "nodes that are the next sibling of another one are not counted as drafted",
    ),
    Mutant(
        "draft_ends_at_the_root",
        _KERNEL,
        "(node == end) & (child < 0)",
        "(node == 0) & (child < 0)",
        _case("commit_tree"),
        "a draft is taken for missing by the root's children, not by those of the last accepted node",
    ),
    Mutant(
        "history_runs_into_the_next_row",
        _KERNEL,
        "mask=on_path & (place < capacity))",
        "mask=on_path & (place <= capacity))",
        _case("commit_past_end"),
        "a path that a history has no room for writes the first token of the next request",
    ),
    Mutant(
        "gathered_from_the_next_request",
        _KERNEL,
        "source = row // PATH * NODES",
        "source = (row + 1) // PATH * NODES",
        _case("gather_small"),
        "the last row of a path is taken from another request",
    ),
)
