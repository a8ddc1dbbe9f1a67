"""Bugs in the commit of a speculative step."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import bugs_in, parity

_kernel = bugs_in("specdec_kernels/commit/kernel.py")
_case = partial(parity, "commit")

MUTANTS = (
    _kernel("kept_entry_of_a_row_without_tokens", "live = {{(feature < WIDTH) & (count > 0) -> feature < WIDTH}}",
            _case("keep_small"), "a row of which nothing is committed keeps the last entry of the row before it"),
    _kernel("history_overwrites_the_last_token", "place = length + {{1 +  -> }}column", _case("commit_chain"),
            "emitted tokens begin at the place of the last token instead of behind it"),
    _kernel("padding_row_gets_a_last_token", "tl.store(inputs.last_tokens + request, bonus{{, mask=active > 0 -> }})",
            _case("commit_padding"), "a row without a request changes its state"),
    _kernel("bonus_token_of_the_last_column", "tl.where(column == {{accepted -> PATH - 1}}, token, 0)",
            _case("commit_tree"), "the bonus token stands behind the accepted drafts, not in the last column"),
    _kernel("siblings_are_no_drafts", "tl.sum((child >= 0).to(tl.int32){{ + (sibling >= 0).to(tl.int32) -> }}, 0)",
            _case("commit_tree"), "nodes that are the next sibling of another one are not counted as drafted"),
    _kernel("draft_ends_at_the_root", "(node == {{end -> 0}}) & (child < 0)", _case("commit_tree"),
            "a draft is taken for missing by the root's children, not by those of the last accepted node"),
    _kernel("history_runs_into_the_next_row", "mask=on_path & (place {{< -> <=}} capacity))", _case("commit_past_end"),
            "a path that a history has no room for writes the first token of the next request"),
    _kernel("gathered_from_the_next_request", "source = {{row -> (row + 1)}} // PATH * NODES", _case("gather_small"),
            "the last row of a path is taken from another request"),
)  # fmt: skip
