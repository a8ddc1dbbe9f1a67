"""Sizes of the programs, by chip."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextConfig:
    """`scan`: positions that a program compares at once; `file`: requests that a program files; `copy`: tokens that a
    program writes."""

    scan: int
    file: int
    copy: int


_GPU = TextConfig(scan=512, file=128, copy=256)
CONFIGS = {
    "sm80": _GPU,
    "sm90": _GPU,
    "sm100": _GPU,
    "gfx942": TextConfig(scan=512, file=256, copy=256),
    # In the interpreter the number of programs costs, not the number of lanes.
    "interpreter": TextConfig(scan=1 << 14, file=1 << 12, copy=1 << 14),
}
NEW_TEXTS = 16
"""Texts that are read first: as many as fill the list of a frequent token."""


def draft_warps(matches: int, nodes: int) -> int:
    """Warps of a program of `draft_kernel`, whose tiles are [matches, nodes] and [matches, matches]."""
    return min(4, max(1, matches * max(matches, nodes) // 256))
