"""Sizes of the programs, by chip."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NgramConfig:
    """`windows`: lanes of a program that follows windows (few, because lanes wait for memory and not for arithmetic);
    `sweep`: lanes of a program that passes over rows or over the store, and `sweep_programs`: most of these; `pairs`:
    pairs of children that one program compares at once; `list_programs`: how many programs do so."""

    windows: int
    sweep: int
    sweep_programs: int
    pairs: int
    list_programs: int


# 64 lanes are one warp on AMD: with fewer, threads would be copies of each other, and each copy would do the atomics.
_GPU = NgramConfig(windows=64, sweep=512, sweep_programs=264, pairs=1024, list_programs=528)
CONFIGS = {
    "sm80": _GPU,
    "sm90": _GPU,
    "sm100": _GPU,
    # One swap per thread: with several, Triton 3.6 does not compile for this chip.
    "gfx942": _GPU,
    # In the interpreter the number of programs costs, not the number of lanes.
    "interpreter": NgramConfig(windows=1024, sweep=1 << 14, sweep_programs=264, pairs=1 << 16, list_programs=1),
}


def match_warps(anchors: int, entries: int) -> int:
    """Warps of a program of `match_kernel`, whose tile is [anchors, entries]."""
    return min(8, max(1, anchors * entries // 64))
