"""Which drafted tokens are kept, and which token the target adds: one call for chains and trees, nine exact rules."""

from specdec_kernels.verify.api import accept, accept_targets
from specdec_kernels.verify.types import RULES, Accepted

__all__ = ["RULES", "Accepted", "accept", "accept_targets"]
