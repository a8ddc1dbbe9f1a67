"""The gated activation of a decoder's feed-forward block."""

from specdec_kernels.activation.api import silu_mul

__all__ = ["silu_mul"]
