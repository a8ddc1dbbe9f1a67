"""Speculative decoding algorithms, one drafter per file or folder, over a shared engine.

From Python: `load_target`, `load_algorithm`, `load_backend` and `generate`, see `docs/python.md`. No heavy package is
imported before one of them is called.
"""

from algorithms.frontend import generate, load_algorithm, load_backend, load_target
from algorithms.step.sampling_params import GrammarParams, SamplingParams

__all__ = ["GrammarParams", "SamplingParams", "generate", "load_algorithm", "load_backend", "load_target"]
