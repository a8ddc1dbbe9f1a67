"""Kernels for speculative decoding: tensors in, tensors out, no knowledge of models or of a configuration
system.

Each family folder holds the public functions, their definition in plain torch (`reference`), the Triton
kernels (`kernel`) and named inputs (`cases`). Names below load on first use, and Triton only when a kernel is
launched, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

FAMILIES = ("tree", "sampling", "verify", "kv_index", "attention", "kv_write", "mla", "ngram", "compat.sglang")

_FAMILY_OF = {
    "DraftTopk": "tree",
    "Expansion": "tree",
    "ExportedMask": "tree",
    "Selection": "tree",
    "TreeLinks": "tree",
    "best_first_tree": "tree",
    "build_chain": "tree",
    "build_tree": "tree",
    "draft_topk": "tree",
    "expand_tree": "tree",
    "export_mask": "tree",
    "links_from_mask": "tree",
    "parents_from_candidates": "tree",
    "rerank_tree": "tree",
    "Picked": "sampling",
    "apply_penalties": "sampling",
    "count_tokens": "sampling",
    "filtered_probs": "sampling",
    "pick_tokens": "sampling",
    "top_k_renorm": "sampling",
    "top_p_renorm": "sampling",
    "Accepted": "verify",
    "accept": "verify",
    "accept_targets": "verify",
    "Compacted": "kv_index",
    "DraftSlots": "kv_index",
    "PathLocations": "kv_index",
    "RaggedValues": "kv_index",
    "SequenceIndices": "kv_index",
    "StepIndices": "kv_index",
    "accepted_locations": "kv_index",
    "accepted_positions": "kv_index",
    "align_eviction": "kv_index",
    "compact": "kv_index",
    "draft_kv_indices": "kv_index",
    "draft_slots": "kv_index",
    "filter_rows": "kv_index",
    "move_slots": "kv_index",
    "read_table": "kv_index",
    "row_offsets": "kv_index",
    "verify_decode_indices": "kv_index",
    "write_table": "kv_index",
    "FlashAttentionIndices": "kv_index",
    "FlashInferIndices": "kv_index",
    "flash_attention_table": "kv_index",
    "flashinfer_indices": "kv_index",
    "move_accepted": "kv_index",
    "token_slots": "kv_index",
    "AttentionPlan": "attention",
    "paged_attention": "attention",
    "plan_attention": "attention",
    "materialize_kv": "kv_write",
    "write_kv": "kv_write",
    "mla_attention": "mla",
    "NgramDraft": "ngram",
    "NgramStore": "ngram",
    "ngram_insert": "ngram",
    "ngram_match": "ngram",
}

if TYPE_CHECKING:
    from specdec_kernels.attention import AttentionPlan, paged_attention, plan_attention
    from specdec_kernels.kv_index import (
        Compacted,
        DraftSlots,
        FlashAttentionIndices,
        FlashInferIndices,
        PathLocations,
        RaggedValues,
        SequenceIndices,
        StepIndices,
        accepted_locations,
        accepted_positions,
        align_eviction,
        compact,
        draft_kv_indices,
        draft_slots,
        filter_rows,
        flash_attention_table,
        flashinfer_indices,
        move_accepted,
        move_slots,
        read_table,
        row_offsets,
        token_slots,
        verify_decode_indices,
        write_table,
    )
    from specdec_kernels.kv_write import materialize_kv, write_kv
    from specdec_kernels.mla import mla_attention
    from specdec_kernels.ngram import NgramDraft, NgramStore, ngram_insert, ngram_match
    from specdec_kernels.sampling import (
        Picked,
        apply_penalties,
        count_tokens,
        filtered_probs,
        pick_tokens,
        top_k_renorm,
        top_p_renorm,
    )
    from specdec_kernels.tree import (
        DraftTopk,
        Expansion,
        ExportedMask,
        Selection,
        TreeLinks,
        best_first_tree,
        build_chain,
        build_tree,
        draft_topk,
        expand_tree,
        export_mask,
        links_from_mask,
        parents_from_candidates,
        rerank_tree,
    )
    from specdec_kernels.verify import Accepted, accept, accept_targets

__all__ = [
    "FAMILIES",
    "Accepted",
    "AttentionPlan",
    "Compacted",
    "DraftSlots",
    "DraftTopk",
    "Expansion",
    "ExportedMask",
    "FlashAttentionIndices",
    "FlashInferIndices",
    "NgramDraft",
    "NgramStore",
    "PathLocations",
    "Picked",
    "RaggedValues",
    "Selection",
    "SequenceIndices",
    "StepIndices",
    "TreeLinks",
    "accept",
    "accept_targets",
    "accepted_locations",
    "accepted_positions",
    "align_eviction",
    "apply_penalties",
    "best_first_tree",
    "build_chain",
    "build_tree",
    "compact",
    "count_tokens",
    "draft_kv_indices",
    "draft_slots",
    "draft_topk",
    "expand_tree",
    "export_mask",
    "filter_rows",
    "filtered_probs",
    "flash_attention_table",
    "flashinfer_indices",
    "links_from_mask",
    "materialize_kv",
    "mla_attention",
    "move_accepted",
    "move_slots",
    "ngram_insert",
    "ngram_match",
    "paged_attention",
    "parents_from_candidates",
    "pick_tokens",
    "plan_attention",
    "read_table",
    "rerank_tree",
    "row_offsets",
    "token_slots",
    "top_k_renorm",
    "top_p_renorm",
    "verify_decode_indices",
    "write_kv",
    "write_table",
]


def __getattr__(name: str) -> Any:
    if name not in _FAMILY_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FAMILY_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_FAMILY_OF))
