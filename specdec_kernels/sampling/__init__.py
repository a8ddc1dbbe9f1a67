"""One token per row of logits, the distribution that it is drawn from, penalties and forbidden tokens.

`pick_tokens` takes the argmax or an exact draw from softmax(logits / temperature) under filters; see `api` for the
definitions of the draw, of the random stream and of the filters.
"""

from specdec_kernels.sampling.api import (
    apply_penalties,
    count_tokens,
    filtered_probs,
    forbid_tokens,
    mask_tokens,
    pick_tokens,
    top_k_renorm,
    top_p_renorm,
)
from specdec_kernels.sampling.types import (
    ACCEPT_STREAM,
    BONUS_STREAM,
    DRAFT_STREAM,
    MASK_BITS,
    RECOVER_STREAM,
    TARGET_STREAM,
    Picked,
    SamplingTensors,
)

__all__ = [
    "ACCEPT_STREAM",
    "BONUS_STREAM",
    "DRAFT_STREAM",
    "MASK_BITS",
    "RECOVER_STREAM",
    "TARGET_STREAM",
    "Picked",
    "SamplingTensors",
    "apply_penalties",
    "count_tokens",
    "filtered_probs",
    "forbid_tokens",
    "mask_tokens",
    "pick_tokens",
    "top_k_renorm",
    "top_p_renorm",
]
