"""Commit of a speculative step: accepted tokens enter the state of each request; the observed path is gathered."""

from specdec_kernels.commit.api import commit_step, gather_path, keep_last
from specdec_kernels.commit.types import Committed

__all__ = ["Committed", "commit_step", "gather_path", "keep_last"]
