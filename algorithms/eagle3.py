"""EAGLE-3 (arXiv 2503.01840): EAGLE with fused features and a reduced vocabulary.

The head reads a fusion of low, middle and high features of the target, and knows only the most frequent tokens. The
loop is EAGLE's; the head brings the fusion, feeds back its own output, and maps its tokens to the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.eagle import Eagle


class Eagle3(Eagle):
    """Fused features, reduced vocabulary, chain or tree."""

    name = "eagle3"
    kind = "EAGLE-3"

    @dataclass
    class Config(Eagle.Config):
        name: str = "eagle3"
