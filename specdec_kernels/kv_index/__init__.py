"""Paged-KV index arithmetic: tables, ragged rows, draft locations, and the move of an accepted path.

Four topics, each a module of public functions with its definition (`*_reference`) and kernels (`*_kernel`):
`pages` (page tables and what backends read), `ragged` (prefix sums, token tables, compaction), `draft`
(branches as sequences of their own) and `paths` (after acceptance). All sizes are fixed by the arguments'
shapes, nothing is read back.
"""

from __future__ import annotations

from specdec_kernels.kv_index.draft import draft_kv_indices, draft_slots, verify_decode_indices
from specdec_kernels.kv_index.pages import flash_attention_table, flashinfer_indices, token_slots
from specdec_kernels.kv_index.paths import accepted_locations, align_eviction, move_accepted, move_slots
from specdec_kernels.kv_index.ragged import (
    accepted_positions,
    compact,
    filter_rows,
    read_table,
    row_offsets,
    write_table,
)
from specdec_kernels.kv_index.types import (
    Compacted,
    DraftSlots,
    FlashAttentionIndices,
    FlashInferIndices,
    PathLocations,
    RaggedValues,
    SequenceIndices,
    StepIndices,
)

__all__ = [
    "Compacted",
    "DraftSlots",
    "FlashAttentionIndices",
    "FlashInferIndices",
    "PathLocations",
    "RaggedValues",
    "SequenceIndices",
    "StepIndices",
    "accepted_locations",
    "accepted_positions",
    "align_eviction",
    "compact",
    "draft_kv_indices",
    "draft_slots",
    "filter_rows",
    "flash_attention_table",
    "flashinfer_indices",
    "move_accepted",
    "move_slots",
    "read_table",
    "row_offsets",
    "token_slots",
    "verify_decode_indices",
    "write_table",
]
