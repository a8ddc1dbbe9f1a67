"""Absorbed multi-head latent attention (MLA) over a paged latent cache: decode, chain, block and tree verification.

MLA (DeepSeek-V2, arXiv 2405.04434) caches one latent row and one small rotary key per token for all heads. With the
up-projections absorbed into the query and the output, attention is multi-query attention whose value is the latent
part of the key: H query heads share one head of width latent + rope. The result stays in latent space; the caller
multiplies it by the absorbed value up-projection.
"""

from specdec_kernels.mla.api import mla_attention, mla_attention_with_lse

__all__ = ["mla_attention", "mla_attention_with_lse"]
