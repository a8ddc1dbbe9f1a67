"""How much a program of `gather_path` copies, by chip."""

from __future__ import annotations

NUM_WARPS = 4
BLOCK_ROWS = {"interpreter": 512}
"""Rows of the path; few programs matter most in the interpreter."""
BLOCK_WIDTH = {"interpreter": 4096}
DEFAULT_ROWS = 4
DEFAULT_WIDTH = 1024
