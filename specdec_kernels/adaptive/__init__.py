"""How many nodes a step verifies: what was accepted in steps before, and what a step of each size costs."""

from specdec_kernels.adaptive.api import choose_size
from specdec_kernels.adaptive.types import SizeState, prior_tokens

__all__ = ["SizeState", "choose_size", "prior_tokens"]
