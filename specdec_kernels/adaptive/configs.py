"""Sizes of the programs, by chip: nodes that a node is compared with at once, and rows that are summed at once."""

from __future__ import annotations

from specdec_kernels.launch import CHIPS

COMPARED = dict.fromkeys(CHIPS, 32) | dict(interpreter=64)
FEW_ROWS = 2
"""Rows whose steps are counted by the program that chooses."""
ROWS = dict.fromkeys(CHIPS, 64) | dict(interpreter=4)
