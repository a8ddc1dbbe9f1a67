"""Index arithmetic that only SGLang's signatures need.

Tables of token slots, ragged rows, the locations and KV indices of draft branches, eviction, and the conversion of
trees: parents from EAGLE's candidate ids, masks in other layouts. Sizes are fixed by the shapes of the arguments;
nothing is read back from the device.
"""

from __future__ import annotations

from specdec_kernels.compat.sglang.index.api import (
    align_eviction,
    compact,
    draft_kv_indices,
    draft_slots,
    export_mask,
    move_slots,
    parents_from_candidates,
    read_table,
    row_offsets,
    verify_decode_indices,
    write_table,
)
from specdec_kernels.compat.sglang.index.types import (
    Compacted,
    DraftSlots,
    ExportedMask,
    RaggedValues,
    SequenceIndices,
)

__all__ = [
    "Compacted",
    "DraftSlots",
    "ExportedMask",
    "RaggedValues",
    "SequenceIndices",
    "align_eviction",
    "compact",
    "draft_kv_indices",
    "draft_slots",
    "export_mask",
    "move_slots",
    "parents_from_candidates",
    "read_table",
    "row_offsets",
    "verify_decode_indices",
    "write_table",
]
