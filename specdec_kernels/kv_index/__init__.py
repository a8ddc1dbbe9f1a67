"""Paged-KV index arithmetic: slots of positions, page tables of attention backends, the move of an accepted path.

A request's position p lies on page `page_table[b, p // page_size]`, at offset p % page_size; its KV slot is
page * page_size + offset (PagedAttention, arXiv 2309.06180).
"""

from specdec_kernels.kv_index.api import (
    flash_attention_table,
    flashinfer_chunks,
    flashinfer_indices,
    flashinfer_mask,
    level_slots,
    move_accepted,
    token_slots,
)
from specdec_kernels.kv_index.types import FlashAttentionIndices, FlashInferChunks, FlashInferIndices, LevelSlots

__all__ = [
    "FlashAttentionIndices", "FlashInferChunks", "FlashInferIndices", "LevelSlots", "flash_attention_table",
    "flashinfer_chunks", "flashinfer_indices", "flashinfer_mask", "level_slots", "move_accepted", "token_slots",
]  # fmt: skip
