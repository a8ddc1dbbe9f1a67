"""EAGLE-3 (arXiv 2503.01840): EAGLE with fused features and a reduced vocabulary.

The head reads a fusion of low, middle and high features of the target, and knows only the most frequent tokens. The
loop is EAGLE's; the head brings the fusion, feeds back its own output, and maps its tokens to the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from algorithms.eagle import Eagle

if TYPE_CHECKING:
    from algorithms.runtime.models.loading import Target, TargetShape


class Eagle3(Eagle):
    """Fused features, reduced vocabulary, chain or tree."""

    name = "eagle3"

    @dataclass
    class Config(Eagle.Config):
        name: str = "eagle3"

    @staticmethod
    def load(draft_path: str, target: Target, device: Any, dtype: Any) -> Any:
        from algorithms.runtime.models.loading import load_eagle3

        return load_eagle3(draft_path, target, device, dtype)

    @staticmethod
    def read(draft_path: str, target: TargetShape) -> Any:
        from algorithms.runtime.models.loading import read_eagle3

        return read_eagle3(draft_path, target)
