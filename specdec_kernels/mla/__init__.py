"""Absorbed multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) over a paged latent cache.

The cache holds one latent row and one small rotary key per token for all heads. With the up-projections absorbed into
query and output, H query heads share one head of width latent + rope, whose value is the latent part. The caller
multiplies the result by the absorbed value up-projection.
"""

from specdec_kernels.mla.api import head_product, mla_attention, mla_attention_with_lse, write_latent

__all__ = ["head_product", "mla_attention", "mla_attention_with_lse", "write_latent"]
