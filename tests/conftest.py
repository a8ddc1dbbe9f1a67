"""Suite-wide settings: the interpreter where there is no GPU, and one hypothesis profile."""

import gc
import os
import sys
from collections.abc import Iterator

import torch

# Triton reads this when it is imported, so it is decided before any test module can import it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("SPECDEC_FAST_INTERPRETER", "1")

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


LONG = tuple(
    f"test_{name}.py"
    for name in (
        *("parity", "readme", "sweep", "add_a_kernel", "prefill", "joint_distribution", "rule_distribution", "replay"),
        *("exact_distribution", "tasks", "graphs", "losslessness", "lookup", "identity", "sampled_trees", "generate"),
        *("tensor_parallel", "constraints", "sampling_parameters", "faults", "adaptive", "mixed_prefill", "plugin"),
        *("config", "training", "fuzz", "shape_scaled", "smollm2", "published", "synthetic", "mtp"),
        *("paper_table", "fusion", "frontend", "specialisation", "shared_vocabulary"),
        *("interpreter", "history", "compile_gate", "layer_kinds", "own_folders", "float8_weights", "gpt_oss"),
        *("resume", "drafts", "wrong_inputs", "mutants", "architectures", "packaging", "captured_backends"),
        "deterministic",
    )
)
"""Files that take longest. They begin first, because the last one leaves the other process without work, and
`make check` leaves them out."""


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    """A training program sets the number of threads and flushes small numbers to zero; the tests behind it do not."""
    yield
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)


def pytest_collection_finish() -> None:
    """What is imported by now stays until the end, so the garbage collector need not walk through it every time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first. A test marked `gpu` names its reason when it cannot run."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    for item in items:
        if item.path.name in LONG:
            item.add_marker(pytest.mark.long)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
