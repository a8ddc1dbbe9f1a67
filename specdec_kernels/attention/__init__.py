"""Paged attention over a committed prefix plus a draft block: decode, chain, block and tree verification, and
prefill.

The keys of a request are its committed tokens at positions [0, L), then its draft slots at positions L + j for any
shape of the draft. A mode or a bit mask says which slots a row sees.
"""

from specdec_kernels.attention.api import (
    mask_paths,
    paged_attention,
    paged_attention_with_lse,
    plan_attention,
    plan_levels,
)
from specdec_kernels.attention.configs import UNSPLIT
from specdec_kernels.attention.reference import stored_keys, visible_keys
from specdec_kernels.attention.types import MODES, AttentionMetadata, AttentionShape, TileSchedule

__all__ = [
    "UNSPLIT", "MODES", "AttentionMetadata", "AttentionShape", "TileSchedule", "mask_paths", "paged_attention",
    "paged_attention_with_lse", "plan_attention", "plan_levels", "stored_keys", "visible_keys",
]  # fmt: skip
