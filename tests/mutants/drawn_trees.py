"""Mutants of the rules for drawn trees."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, parity

_RULES = "specdec_kernels/verify/reference.py"
_KERNEL = "specdec_kernels/verify/kernel_tree.py"
_LAW = "tests/kernels/test_tree_distribution.py::test_exact_distribution_of_three_tokens"

MUTANTS = (
    Mutant(
        "only_the_last_rejection_counts",
        _KERNEL,
        "raised = tl.where(misses, rate + left /",
        "raised = tl.where(misses, left /",
        parity("verify", "multi_round_far"),
        "behind two rejected siblings only the second one's share of the draft is subtracted",
    ),
    Mutant(
        "repeated_sibling_is_judged",
        _KERNEL,
        "missed, 0), 1) == 0",
        "missed, 0), 1) >= 0",
        ("tests/kernels/test_tree_distribution.py::test_two_siblings_by_hand",),
        "without replacement, a token that a rejected sibling carried counts as a draw",
    ),
    Mutant(
        "rejected_token_stays_in_the_draft",
        _KERNEL,
        "tl.where(misses, draft_left - q, draft_left)",
        "tl.where(misses, draft_left, draft_left)",
        parity("verify", "without_replacement_far"),
        "without replacement, the draft is not renormalised behind a rejection",
    ),
    Mutant(
        "residual_behind_the_depth_limit",
        _KERNEL,
        "rejected = (inverse > 0) & (count < DEPTH)",
        "rejected = inverse > 0",
        parity("verify", "multi_round_cut"),
        "children that the depth limit forbids to judge still shape the last token",
    ),
    Mutant(
        "draft_not_renormalised",
        _RULES,
        "others = _normalised(proposal.scatter(1, at[:, None], 0.0))",
        "others = proposal.scatter(1, at[:, None], 0.0)",
        (f"{_LAW}[without_replacement-reference-spread]",),
        "without replacement, what is left of the draft does not sum to 1",
    ),
    Mutant(
        "residual_not_renormalised",
        _RULES,
        "left = torch.where(shrinks[:, None], _normalised(residual), left)",
        "left = torch.where(shrinks[:, None], residual, left)",
        (f"{_LAW}[multi_round-reference-spread]",),
        "the second sibling is compared with a residual that does not sum to 1",
    ),
)
