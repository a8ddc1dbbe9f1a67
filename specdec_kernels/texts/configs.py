"""Sizes of the programs, by chip."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextConfig:
    """`scan`: positions that a program compares at once; `programs`: most programs that scan for one request; `copy`:
    tokens that a program writes."""

    scan: int
    programs: int
    copy: int


_GPU = TextConfig(scan=512, programs=128, copy=256)
CONFIGS = {
    "sm80": _GPU,
    "sm90": _GPU,
    "sm100": _GPU,
    "gfx942": _GPU,
    # In the interpreter the number of programs costs, not the number of lanes.
    "interpreter": TextConfig(scan=1 << 13, programs=3, copy=1 << 14),
}
RANKS = 2048
"""Matches that one program compares, at most."""
