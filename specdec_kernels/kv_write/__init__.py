"""Head norm, rotary embedding and paged store in one pass, for new tokens of the target and for a drafter's
context.

Between the projections and attention, every key is normalised, rotated and stored, and every query normalised
and rotated, in one launch per layer. `rope_table` makes the tables of the scaling rules that checkpoints use.
"""

from specdec_kernels.kv_write.api import materialize_kv, write_kv
from specdec_kernels.kv_write.rope import rope_table
from specdec_kernels.kv_write.types import LinearScaling, Llama3Scaling, YarnScaling, head_dim_problem

__all__ = [
    "LinearScaling", "Llama3Scaling", "YarnScaling", "head_dim_problem", "materialize_kv", "rope_table", "write_kv",
]  # fmt: skip
