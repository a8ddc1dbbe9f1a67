"""Attention of other packages behind one contract: FlashInfer and FlashAttention-4.

Both take the calls of `specdec_kernels.paged_attention`, from the same tensors and with the same results, or refuse
them with the reason before anything runs: `available()` says whether the package can be used at all, `refusal(needs)`
whether a kind of call can be served, `plan(call)` prepares what all layers of a step share, `run(planned, q, kv)`
computes one layer. Neither package is a dependency, and neither is imported before it is asked for.
"""

from __future__ import annotations

from specdec_kernels.wrappers.contract import AttentionCall, AttentionWrapper, Needs, Unsupported
from specdec_kernels.wrappers.flash_attention_4 import FlashAttention4
from specdec_kernels.wrappers.flashinfer import FlashInferAttention

__all__ = [
    "AttentionCall",
    "AttentionWrapper",
    "FlashAttention4",
    "FlashInferAttention",
    "Needs",
    "Unsupported",
]
