"""Tile of one program of the activation kernel."""

from __future__ import annotations

NUM_WARPS = 4
_BLOCK = 1024  # 16 bytes a lane of two-byte numbers
_INTERPRETER_BLOCK = 16384


def block_of(chip: str) -> int:
    """Columns of a program."""
    return _INTERPRETER_BLOCK if chip == "interpreter" else _BLOCK
