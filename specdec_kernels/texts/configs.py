"""Sizes of the programs, by chip."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextConfig:
    """Numbers of what one program, or one request, takes."""

    scan: int
    """Positions that a program reads."""
    few: int
    """Requests up to which each reads all hits."""
    select: int
    """Hits that a program compares at once."""
    parts: int
    """Programs that select for one request, at most."""
    programs: int
    """Programs that select for all requests, where each has one at least."""
    file: int
    """Requests that a program files."""
    copy: int
    """Tokens that a program writes."""


_GPU = TextConfig(scan=256, few=32, select=256, parts=32, programs=1 << 14, file=128, copy=256)
CONFIGS = {
    "sm80": _GPU,
    "sm90": _GPU,
    "sm100": _GPU,
    "gfx942": TextConfig(scan=256, few=32, select=256, parts=32, programs=1 << 14, file=256, copy=256),
    # In the interpreter the number of programs costs, not the number of lanes.
    "interpreter": TextConfig(scan=1 << 14, few=1, select=1 << 10, parts=2, programs=6, file=1 << 12, copy=1 << 14),
}
NEW_TEXTS = 16
"""Texts whose ends are read first: as many as fill the list of a frequent token."""


def draft_warps(matches: int, nodes: int, requests: int) -> int:
    """Warps of a program of `draft_kernel`, whose tiles are [matches, nodes] and [matches, matches]. Four are quicker
    than one, though not four times: they are taken where there are few programs."""
    return 4 if requests <= 512 else min(4, max(1, matches * max(matches, nodes) // 256))
