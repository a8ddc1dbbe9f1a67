"""Mutants of the rules for sampled trees."""

from __future__ import annotations

from tests.mutants.mutant import bugs_in, parity

_rules = bugs_in("specdec_kernels/verify/reference_tree.py")
_kernel = bugs_in("specdec_kernels/verify/kernel_tree.py")
_LAW = "tests/kernels/test_rule_distribution.py::test_exact_distribution_of_three_tokens"
_kernel_sample = bugs_in("specdec_kernels/tree/kernel_sample.py")

MUTANTS = (
    _kernel("only_the_last_rejection_counts", "raised = tl.where(asks, state.{{rate + state. -> }}due, 0.0)",
            parity("verify", "multi_round_far"),
            "behind two rejected siblings only the second one's share of the draft is subtracted"),
    _kernel("repeated_sibling_is_judged", "return tl.max(tl.where(same, missed, 0), 1) {{!= -> <}} 0",
            ("tests/kernels/test_rule_distribution.py::test_two_siblings_by_hand",),
            "without replacement, a token that a rejected sibling carried counts as a draw"),
    _kernel("rejected_token_stays_in_the_draft", "mass = tl.where(misses, mass{{ - q -> }}, mass)",
            parity("verify", "without_replacement_far"),
            "without replacement, the draft is not renormalised behind a rejection"),
    _kernel("residual_behind_the_depth_limit",
            "return tl.where(depth {{< -> <=}} DEPTH, v.entry(tree.children, lane, end), -1)",
            parity("verify", "multi_round_cut"),
            "children that the depth limit forbids to judge still shape the last token"),
    _kernel("weight_ignored_in_the_residual",
            "rises = state.left / tl.where(state.weight * mass > 0, {{state.weight *  -> }}mass, 1.0)",
            parity("verify", "traversal_far"),
            "from the leaves up, a node is rejected as if its parent had been accepted for sure"),
    _kernel(
        "weight_of_the_child_stays",
        "weight = {{tl.where(where, _float_entry(saved.weight, lane, node), state.weight) -> state.weight}}",
        parity("verify", "traversal_far"),
        "from the leaves up, the walk goes back to a node and judges its other children with the weight of the first",
    ),
    _kernel("weight_before_the_children",
            "settles = {{(judged | (leaves & (uniform < state.weight))) -> judged}} & (state.due > 0)",
            parity("verify", "traversal_far"),
            "from the leaves up, a node is judged as if the last of its children had not been rejected"),
    _rules("kept_child_counts_as_any_draw",
           "return torch.where(stays, above, -1), proposal{{ * factor.gather(-1, kind) -> }}",
           (f"{_LAW}[greedy_paths-reference-spread]",),
           "the child that the target prefers is judged as if it had not been picked among several"),
    _kernel("first_child_is_kept",
            "kept = tl.min(tl.where(sampled{{ & (kind == best[:, None]) -> }}, lane, STATIC.NODES), 1)",
            parity("verify", "greedy_paths_far"), "no child is kept for what the target thinks of it"),
    _kernel("k_seq_without_its_factor", "ratio = p / tl.where(judged, {{k_seq_rate *  -> }}q, 1.0)",
            parity("verify", "k_seq_far"), "every draft is judged as if it were the only one"),
    _kernel_sample("siblings_share_their_noise", "request, request, wanted, _DRAFT, child{{ ->  * 0}})",
                   parity("tree", "sample_small_again"), "all children of a step are drawn with one uniform"),
    _kernel_sample("group_keeps_what_was_sampled",
                   "mass = {{tl.where(wanted[:, None] & (group_lane == group[:, None]), rest[:, None], mass) -> "
                   "mass + 0.0 * rest[:, None]}}", parity("tree", "sample_groups_once"),
                   "without replacement, the group of a drawn token keeps its mass"),
    bugs_in("algorithms/drafting/sampled_tree.py")(
        "rows_of_another_level",
        "rows[node] = {{first +  -> }}column",
        ("tests/algorithms/test_sampled_trees.py::test_the_shape_does_not_depend_on_what_is_sampled",),
        "the rules are told another distribution than the one that a level was drawn from",
    ),
    _rules("draft_not_renormalised",
           "others = {{normalised( -> }}proposal[rows, up].scatter(1, at[:, None], 0.0){{) -> }}",
           (f"{_LAW}[without_replacement-reference-spread]",),
           "without replacement, what is left of the draft does not sum to 1"),
    _rules("residual_not_renormalised",
           "left[rows, up] = torch.where(shrinks[:, None], {{normalised(residual) -> residual}}, left[rows, up])",
           (f"{_LAW}[multi_round-reference-spread]",),
           "the second sibling is compared with a residual that does not sum to 1"),
)  # fmt: skip
