"""Warps of one program of the norm kernel, by the width of a row alone: a row's bits do not depend on other rows."""

MAX_WIDTH = 32768
_ELEMENTS_PER_WARP = 512  # two 16-byte loads of two-byte numbers a lane
_MAX_WARPS = 16


def num_warps(chip: str, block: int) -> int:
    """Warps for a row of `block` elements, a power of two."""
    if chip == "interpreter":
        return 1
    return max(1, min(_MAX_WARPS, block // _ELEMENTS_PER_WARP))
