"""Matrix products of a decoding step: few rows against a large weight."""

from specdec_kernels.projection.api import (
    linear,
    linear_add_rms_norm,
    linear_all_reduce_add_rms_norm,
    linear_argmax,
    linear_silu_mul,
)
from specdec_kernels.projection.configs import MAX_KERNEL_ROWS, warmup_rows
from specdec_kernels.projection.types import ScaledWeight

__all__ = [
    "MAX_KERNEL_ROWS", "ScaledWeight", "linear", "linear_add_rms_norm", "linear_all_reduce_add_rms_norm",
    "linear_argmax", "linear_silu_mul", "warmup_rows",
]  # fmt: skip
