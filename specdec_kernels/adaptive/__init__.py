"""How many nodes a step verifies: what the drafter expects, what was accepted, and what a step of each size costs."""

from specdec_kernels.adaptive.api import choose_size
from specdec_kernels.adaptive.types import SizeState

__all__ = ["SizeState", "choose_size"]
