"""How much of a step is captured in CUDA graphs. No torch is imported here: settings are checked without it."""

from __future__ import annotations

LAST_CAPTURED = {"none": None, "draft": "draft", "verify": "verify", "step": "commit"}
"""Level to the last phase that is captured, as all before it are."""
GRAPH_LEVELS = tuple(LAST_CAPTURED)
