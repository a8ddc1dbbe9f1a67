"""Linear attention with the gated delta rule (Gated DeltaNet, arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

A request has a state of fixed size in place of keys and values. Verification of a chain or a tree reads the state
before the draft and keeps no state of a node; the commit repeats the accepted path. One recurrence serves decoding,
verification of chains and commit, so the state has the same bits for any split of a text into steps. Whole chunks of
prompts and draft trees have a faster form by matrix products, whose outputs have other bits.
"""

from specdec_kernels.linear_attention.api import (
    commit_delta_rule,
    delta_rule,
    delta_rule_chunks,
    delta_rule_inputs,
    delta_rule_tree,
    gated_rms_norm,
)
from specdec_kernels.linear_attention.paths import (
    accepted_paths,
    chain_paths,
    chunk_paths,
    prompt_paths,
    tree_masks,
    tree_paths,
)
from specdec_kernels.linear_attention.types import (
    CHUNK,
    Chunks,
    DeltaInputs,
    DeltaState,
    DeltaWeights,
    Paths,
    RowLinks,
    Trees,
)

__all__ = [
    "CHUNK", "Chunks", "DeltaInputs", "DeltaState", "DeltaWeights", "Paths", "RowLinks", "Trees", "accepted_paths",
    "chain_paths", "chunk_paths", "commit_delta_rule", "delta_rule", "delta_rule_chunks", "delta_rule_inputs",
    "delta_rule_tree", "gated_rms_norm", "prompt_paths", "tree_masks", "tree_paths",
]  # fmt: skip
