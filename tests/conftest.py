"""Suite-wide settings: the interpreter where there is no GPU, and one hypothesis profile."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import torch

# Triton reads this when it is imported, so it is decided before any test module can import it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

# Tests start dozens of processes: what Python compiles for one of them is kept for the others.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
torch.set_num_threads(1)  # tensors are small, and threads that wait for each other starve on a busy machine
settings.register_profile(
    "ci", max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


LONG = ("test_readme.py", "test_sweep.py", "test_compile_gate.py", "test_add_a_kernel.py", "test_parity.py")
"""Files of a minute or so, which begin first: the last one would leave the other process without work."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A training program sets the number of threads; the tests behind it run on one again."""
    yield
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What is imported by now stays until the end, so the garbage collector need not walk through it every time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first. A test marked `gpu` names its reason when it cannot run."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
