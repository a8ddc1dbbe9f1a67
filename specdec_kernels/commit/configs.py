"""How much a program of `gather_path` copies, by chip."""

from __future__ import annotations

NUM_WARPS = 4
DEFAULT_ROWS = 4
DEFAULT_WIDTH = 1024
# In the interpreter, only the number of programs costs.
BLOCK_ROWS = {"interpreter": 512}
BLOCK_WIDTH = {"interpreter": 4096}
