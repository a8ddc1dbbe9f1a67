"""Index arithmetic that only SGLang's signatures need.

Tables of token slots, ragged rows, the locations and KV indices of draft branches, eviction, and the conversion of
trees: parents from EAGLE's candidate ids, masks in other layouts. Sizes are fixed by the shapes of the arguments;
nothing is read back from the device.
"""

from __future__ import annotations

from specdec_kernels.compat.sglang.index.api import export_mask, parents_from_candidates
from specdec_kernels.compat.sglang.index.types import ExportedMask

__all__ = ["ExportedMask", "export_mask", "parents_from_candidates"]
