"""Paged attention over a committed prefix plus a draft block: decode, chain, block and tree verification, and
prefill.

The keys of a request are its committed tokens at positions [0, L), followed by its draft slots at positions L + j for
any shape of the draft. A mode or a bit mask says which slots a row sees; the layout of the keys stays the same. So any
page size works for any tree, and the mask is only as large as the draft.

`AttentionMetadata` says what the layers of a forward share. `plan_attention` makes their work list once, on the
device, `plan_levels` those of several calls. `warmup` compiles ahead what a model will need.
"""

from specdec_kernels.attention.api import (
    mask_paths,
    paged_attention,
    paged_attention_with_lse,
    plan_attention,
    plan_levels,
)
from specdec_kernels.attention.types import MODES, AttentionMetadata, AttentionShape, WorkList
from specdec_kernels.attention.warmup import warmup

__all__ = [
    "MODES",
    "AttentionMetadata",
    "AttentionShape",
    "WorkList",
    "mask_paths",
    "paged_attention",
    "paged_attention_with_lse",
    "plan_attention",
    "plan_levels",
    "warmup",
]
