"""One token per row of logits, the distribution that it is sampled from, penalties and forbidden tokens.

`pick_tokens` takes the argmax or an exact sample of softmax(logits / temperature) under filters; see `api` for the
definitions of the sample, of the random stream and of the filters.
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
from specdec_kernels.sampling.reference import philox_uniform, row_distribution
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
    "ACCEPT_STREAM", "BONUS_STREAM", "DRAFT_STREAM", "MASK_BITS", "RECOVER_STREAM", "TARGET_STREAM", "Picked",
    "SamplingTensors", "apply_penalties", "count_tokens", "filtered_probs", "forbid_tokens", "mask_tokens",
    "philox_uniform", "pick_tokens", "row_distribution", "top_k_renorm", "top_p_renorm",
]  # fmt: skip
