"""Sizes of the programs, by chip."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SuffixConfig:
    """`scan`: positions that a program compares at once; `copy`: tokens that a program writes."""

    scan: int
    copy: int


_GPU = SuffixConfig(scan=1024, copy=64)
CONFIGS = {
    "sm80": _GPU,
    "sm90": _GPU,
    "sm100": _GPU,
    "gfx942": _GPU,
    # In the interpreter the number of programs costs, not the number of lanes.
    "interpreter": SuffixConfig(scan=1 << 13, copy=1 << 12),
}
