"""What every algorithm stands on: models, KV cache, attention backends, engine.

Names are resolved at first use, so an algorithm file can be imported for its configuration without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorithms.runtime.algorithm import Algorithm, Batch, DraftTree, Observation, Resources
    from algorithms.runtime.cache import KVCache, OutOfPages, PageAllocator
    from algorithms.runtime.engine import Engine, EngineError, EngineSettings, Generation, StepReport
    from algorithms.runtime.models.loading import (
        ModelError,
        Target,
        load_dflash,
        load_draft,
        load_eagle,
        load_eagle3,
        load_eagle_head,
        load_target,
        read_dflash,
        read_draft,
        read_eagle,
        read_eagle3,
        read_eagle_head,
    )
    from algorithms.runtime.paged_attention import LayeredMixer, PagedMixer
    from algorithms.runtime.request import Completion, Request
    from algorithms.runtime.row_store import RowStore
    from algorithms.runtime.tree_drafting import TreeDrafter

_HOMES = {
    "algorithm": ("Algorithm", "Batch", "DraftTree", "Observation", "Resources"),
    "engine": ("Engine", "EngineError", "EngineSettings", "Generation", "StepReport"),
    "tree_drafting": ("TreeDrafter",),
    "cache": ("KVCache", "OutOfPages", "PageAllocator"),
    "models.loading": (
        "ModelError",
        "Target",
        "load_dflash",
        "load_draft",
        "load_eagle",
        "load_eagle3",
        "load_eagle_head",
        "load_target",
        "read_dflash",
        "read_draft",
        "read_eagle",
        "read_eagle3",
        "read_eagle_head",
    ),
    "paged_attention": ("LayeredMixer", "PagedMixer"),
    "request": ("Completion", "Request"),
    "row_store": ("RowStore",),
}
_MODULE_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Algorithm",
    "Batch",
    "Completion",
    "DraftTree",
    "Engine",
    "EngineError",
    "EngineSettings",
    "TreeDrafter",
    "Generation",
    "KVCache",
    "LayeredMixer",
    "ModelError",
    "Observation",
    "OutOfPages",
    "PageAllocator",
    "PagedMixer",
    "Request",
    "Resources",
    "RowStore",
    "StepReport",
    "Target",
    "load_dflash",
    "load_draft",
    "load_eagle",
    "load_eagle3",
    "load_eagle_head",
    "load_target",
    "read_dflash",
    "read_draft",
    "read_eagle",
    "read_eagle3",
    "read_eagle_head",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
