"""Mutants of the rules for drawn trees."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, parity

_RULES = "specdec_kernels/verify/reference_tree.py"
_KERNEL = "specdec_kernels/verify/kernel_tree.py"
_LAW = "tests/kernels/test_tree_distribution.py::test_exact_distribution_of_three_tokens"

MUTANTS = (
    Mutant(
        "only_the_last_rejection_counts",
        _KERNEL,
        "raised = tl.where(asks, rate + due, 0.0)",
        "raised = tl.where(asks, due, 0.0)",
        parity("verify", "multi_round_far"),
        "behind two rejected siblings only the second one's share of the draft is subtracted",
    ),
    Mutant(
        "repeated_sibling_is_judged",
        _KERNEL,
        "judged &= tl.max(tl.where((tokens == token[:, None]) & (above == end[:, None]), missed, 0), 1) == 0",
        "judged &= tl.max(tl.where((tokens == token[:, None]) & (above == end[:, None]), missed, 0), 1) >= 0",
        ("tests/kernels/test_tree_distribution.py::test_two_siblings_by_hand",),
        "without replacement, a token that a rejected sibling carried counts as a draw",
    ),
    Mutant(
        "rejected_token_stays_in_the_draft",
        _KERNEL,
        "mass = tl.where(misses, mass - q, mass)",
        "mass = tl.where(misses, mass, mass)",
        parity("verify", "without_replacement_far"),
        "without replacement, the draft is not renormalised behind a rejection",
    ),
    Mutant(
        "residual_behind_the_depth_limit",
        _KERNEL,
        "first = tl.where(depth < DEPTH, entry(children, lane, end), -1)",
        "first = tl.where(depth <= DEPTH, entry(children, lane, end), -1)",
        parity("verify", "multi_round_cut"),
        "children that the depth limit forbids to judge still shape the last token",
    ),
    Mutant(
        "weight_ignored_in_the_residual",
        _KERNEL,
        "rises = left / tl.where(weight * mass > 0, weight * mass, 1.0)",
        "rises = left / tl.where(weight * mass > 0, mass, 1.0)",
        parity("verify", "traversal_far"),
        "from the leaves up, a node is rejected as if its parent had been accepted for sure",
    ),
    Mutant(
        "weight_of_the_child_stays",
        _KERNEL,
        "weight = tl.where(goes, share, tl.where(returns, _float_entry(weights, lane, parent), weight))",
        "weight = tl.where(goes, share, weight)",
        parity("verify", "traversal_far"),
        "from the leaves up, the walk goes back to a node and judges its other children with the weight of the first",
    ),
    Mutant(
        "weight_before_the_children",
        _KERNEL,
        "settles |= going & (has == 0) & (end > 0) & (due > 0) & (uniform < weight)",
        "settles |= going & (has == 0) & (end < 0)",
        parity("verify", "traversal_near"),
        "from the leaves up, a node is judged as if the last of its children had not been rejected",
    ),
    Mutant(
        "kept_child_counts_as_any_draw",
        "specdec_kernels/verify/reference_tree.py",
        "return torch.where(stays, above, -1), proposal * factor.gather(-1, kind)",
        "return torch.where(stays, above, -1), proposal",
        (f"{_LAW}[greedy_paths-reference-spread]",),
        "the child that the target prefers is judged as if it had not been picked among several",
    ),
    Mutant(
        "first_child_is_kept",
        _KERNEL,
        "kept = tl.min(tl.where(drawn & (kind == best[:, None]), lane, NODES), 1)",
        "kept = tl.min(tl.where(drawn, lane, NODES), 1)",
        parity("verify", "greedy_paths_far"),
        "no child is kept for what the target thinks of it",
    ),
    Mutant(
        "k_seq_without_its_factor",
        _KERNEL,
        "ratio = p.to(tl.float64) / tl.where(judged, k_seq_rate * q, 1.0)",
        "ratio = p.to(tl.float64) / tl.where(judged, q, 1.0)",
        parity("verify", "k_seq_far"),
        "every draft is judged as if it were the only one",
    ),
    Mutant(
        "siblings_share_their_noise",
        "specdec_kernels/tree/kernel_draw.py",
        "uniform = d.philox_uniform(seed, position, _DRAFT, child)",
        "uniform = d.philox_uniform(seed, position, _DRAFT, child * 0)",
        parity("tree", "draw_small_again"),
        "all children of a step are drawn with one uniform",
    ),
    Mutant(
        "group_keeps_what_was_drawn",
        "specdec_kernels/tree/kernel_draw.py",
        "mass = tl.where(wanted[:, None] & (group_lane == group[:, None]), rest[:, None], mass)",
        "mass = mass + 0.0 * rest[:, None]",
        parity("tree", "draw_groups_once"),
        "without replacement, the group of a drawn token keeps its mass",
    ),
    Mutant(
        "rows_of_another_level",
        "algorithms/runtime/drawn_tree.py",
        "rows[node] = first + column",
        "rows[node] = column",
        ("tests/algorithms/test_drawn_trees.py::test_the_shape_does_not_depend_on_what_is_drawn",),
        "the rules are told another distribution than the one that a level was drawn from",
    ),
    Mutant(
        "draft_not_renormalised",
        _RULES,
        "others = normalised(proposal[rows, up].scatter(1, at[:, None], 0.0))",
        "others = proposal[rows, up].scatter(1, at[:, None], 0.0)",
        (f"{_LAW}[without_replacement-reference-spread]",),
        "without replacement, what is left of the draft does not sum to 1",
    ),
    Mutant(
        "residual_not_renormalised",
        _RULES,
        "left[rows, up] = torch.where(shrinks[:, None], normalised(residual), left[rows, up])",
        "left[rows, up] = torch.where(shrinks[:, None], residual, left[rows, up])",
        (f"{_LAW}[multi_round-reference-spread]",),
        "the second sibling is compared with a residual that does not sum to 1",
    ),
)
