"""Bugs in the choice of the number of nodes."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_KERNEL = "specdec_kernels/adaptive/kernel.py"
_TESTS = "tests/algorithms/test_adaptive.py"
_case = partial(parity, "adaptive")

MUTANTS = (
    Mutant(
        "smaller_sizes_lose_what_they_leave_out",
        _KERNEL,
        "return tl.where(index <= size, steps, 0.0)",
        "return tl.where(index <= size, 1.0, 0.0)",
        _case("choose_tree"),
        "larger sizes look better than they are",
    ),
    Mutant(
        "steps_of_a_chain_never_end_together",
        _KERNEL,
        "steps += _CHAIN_WHOLE * (whole - steps)",
        "steps += 0.0 * (whole - steps)",
        _case("choose_lookup"),
        "small sizes of a chain look better than they are",
    ),
    Mutant(
        "a_plain_step_writes_more_than_a_token",
        _KERNEL,
        "steps = tl.where(index > 0, 1.0 + _TREE_EXTRA * (steps - 1.0), steps)",
        "steps = 1.0 + _TREE_EXTRA * (steps - 1.0)",
        _case("choose_tree"),
        "drafting with trees looks worse than it is",
    ),
    Mutant(
        "what_is_long_past_never_fades",
        _KERNEL,
        "left = tl.where(fades, keep, 1.0)",
        "left = tl.where(updated, keep, 1.0)",
        _case("choose_fading"),
        "a larger size that pays now is not taken up for hundreds of steps",
    ),
    Mutant(
        "larger_sizes_do_not_follow",
        _KERNEL,
        "smaller = tl.where(grows, own + (smaller - own) * growth, smaller)",
        "smaller = tl.where(grows, own + (smaller - own), smaller)",
        _case("choose_small_step"),
        "a larger size that pays as texts fill a store is taken up late",
    ),
    Mutant(
        "a_larger_size_needs_no_more_than_a_smaller_one",
        _KERNEL,
        "tl.where(best > last, _KEEP_SMALLER, _KEEP_STILL)",
        "_KEEP_STILL",
        ("tests/kernels/test_adaptive.py::test_a_small_gain_changes_nothing[triton]",),
        "sizes change where the times of steps are not known so well",
    ),
    Mutant(
        "ratio_of_a_size_to_itself",
        _KERNEL,
        "index[None, :] == index[:, None] - 1, steps[None, :]",
        "index[None, :] == index[:, None], steps[None, :]",
        _case("choose_chain"),
        "no size ever gains on the smaller one",
    ),
    Mutant(
        "padding_of_few_rows_is_judged",
        _KERNEL,
        "if tl.load(active_ptr + request) > 0:",
        "if tl.load(active_ptr + request) >= 0:",
        _case("choose_padding_alone"),
        "a row without a request counts as one that accepts nothing",
    ),
    Mutant(
        "equal_confidence_shares_a_rank",
        _KERNEL,
        "tl.sum(((theirs[None, :] > score[:, None]) | equal).to(tl.int32), 1)",
        "tl.sum((theirs[None, :] > score[:, None]).to(tl.int32), 1)",
        _case("choose_ties"),
        "a node counts as one of a smaller size",
    ),
    Mutant(
        "draft_model_misses_what_it_did_not_draft_behind",
        "algorithms/standalone.py",
        "if seen.is_prefill or seen.altered or not self.chain:",
        "if seen.is_prefill or not self.chain:",
        (f"{_TESTS}::test_drafts_behind_plain_steps_are_those_of_every_run[standalone_chain]",),
        "the draft model's cache has holes behind plain steps",
    ),
    Mutant(
        "plain_steps_are_not_observed",
        "algorithms/runtime/cuda_graph.py",
        "if self._num_kept and (nodes > 1 or self._num_kept == COLUMNS):",
        "if self._num_kept == COLUMNS:",
        (f"{_TESTS}::test_drafts_behind_plain_steps_are_those_of_every_run[eagle3_chain]",),
        "a drafter drafts behind text that it has not seen",
    ),
)
