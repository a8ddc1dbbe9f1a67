"""Verification of drafts: which are kept, and which token the target adds; nine rules for chains and trees."""

from specdec_kernels.verify.api import accept, accept_targets
from specdec_kernels.verify.reference_tree import draft_by_node, expected_accepted
from specdec_kernels.verify.types import CHAIN_RULES, RULES, SAMPLED_RULES, TREE_RULES, Accepted

__all__ = [
    "CHAIN_RULES", "RULES", "SAMPLED_RULES", "TREE_RULES", "Accepted", "accept", "accept_targets", "draft_by_node",
    "expected_accepted",
]  # fmt: skip
