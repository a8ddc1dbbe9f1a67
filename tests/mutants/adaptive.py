"""Bugs in adaptive draft length."""

from __future__ import annotations

from tests.mutants.mutant import bugs_in

_policy = bugs_in("algorithms/step/draft_length.py")
_DECISIONS = "tests/algorithms/step/test_draft_length.py::"
_TESTS = "tests/algorithms/test_adaptive.py"

MUTANTS = (
    _policy("smaller_sizes_lose_what_they_leave_out",
            "exact = [{{(1 + accepted) / min(1 + accepted, nodes) -> 1.0}} for nodes in self.sizes[: size + 1]]",
            (_DECISIONS + "test_what_a_smaller_size_leaves_out_is_written_by_later_steps",),
            "larger sizes look better than they are"),
    _policy("steps_of_a_chain_never_end_together",
            "steps = {{[each + CHAIN_WHOLE * (math.ceil(each) - each) for each in exact] -> exact}}",
            (_DECISIONS + "test_steps_of_a_chain_often_end_at_the_same_wrong_draft",),
            "small sizes of a chain look better than they are"),
    _policy("a_step_without_a_draft_emits_more_than_a_token",
            "return [{{first -> TREE_EXTRA * first + (1 - TREE_EXTRA) * len(path)}}, *(",
            (_DECISIONS + "test_nodes_rank_by_path_probs",), "drafting with trees looks worse than it is"),
    _policy("what_is_long_past_never_fades", "if i < size{{ or keep * own[i] > LEAST_EVIDENCE -> }}:",
            (_DECISIONS + "test_a_few_trials_outweigh_what_is_long_past",),
            "a larger size that pays now is not taken up for hundreds of steps"),
    _policy("larger_sizes_do_not_follow", "(smaller[i] - own[i]){{ * growth -> }}",
            (_DECISIONS + "test_larger_sizes_gain_more_where_the_size_of_the_step_does",),
            "a larger size that pays as histories grow is taken up late"),
    _policy("a_larger_size_needs_no_more_than_a_smaller_one", "{{KEEP_LARGER if best > last else  -> }}KEEP_SMALLER",
            (_DECISIONS + "test_a_small_gain_changes_nothing",),
            "sizes change where the times of steps are not known so well"),
    _policy("equal_path_probs_share_a_rank", "{{ - self._numbers[: path_probs.shape[1]] -> }}",
            (_DECISIONS + "test_choices_are_those_recorded[False]",), "a node counts as one of a smaller size"),
    bugs_in("algorithms/standalone.py")(
        "draft_model_misses_what_it_did_not_draft_behind",
        "if seen.is_prefill or {{seen.drafts_stale or  -> }}not self.chain:",
        (f"{_TESTS}::test_drafts_behind_plain_steps_are_those_of_every_run[standalone_chain]",),
        "the draft model's cache has holes behind plain steps",
    ),
    bugs_in("algorithms/step/runner.py")(
        "plain_steps_are_not_observed",
        "if self._num_kept {{and (nodes > 1 or self._num_kept == COLUMNS) -> == COLUMNS}}:",
        (f"{_TESTS}::test_drafts_behind_plain_steps_are_those_of_every_run[eagle3_chain]",),
        "a drafter drafts behind text that it has not seen",
    ),
)  # fmt: skip
