"""Where a result comes from: model, settings, machine, revision, versions."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from experiments.app.hardware import Hardware
from experiments.app.schema import REPO_ROOT, RunConfig

CLOCKS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "power.limit": "power_limit_w",
}
"""What nvidia-smi calls a figure, and what a row does."""
PACKAGES = ("torch", "triton", "transformers", "numpy", "hydra-core")


def git_revision() -> str | None:
    """Commit of the repository, `-dirty` with uncommitted changes; None outside of one.

    The environment variable `SPECDEC_REVISION` names it where a tree travels without its history.
    """
    if named := os.environ.get("SPECDEC_REVISION"):
        return named
    command = ["git", "-C", str(REPO_ROOT), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def short_revision(revision: str) -> str:
    """The first seven digits of a commit, and `-dirty` where its tree had uncommitted changes."""
    commit, dash, state = revision.partition("-")
    return commit[:7] + dash + state


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that a result depends on."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def machine(device: str) -> str:
    """One line that names the GPU, or the processor and its cores."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return f"{_cpu_name()}, {os.cpu_count()} cores"


def gpu_clocks(device: str) -> dict[str, float] | None:
    """Clocks of the GPU in MHz, as they are now and at most, and its power limit in watts; None where nothing tells."""
    if device != "cuda":
        return None
    number = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", f"--id={number}", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return dict(zip(CLOCKS.values(), map(float, done.stdout.strip().split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


_SIZES = (
    "page_size", "max_batch", "prefill_chunk", "piggyback", "prefill_ahead", "graph", "kv_dtype", "kv_scales",
    "deterministic",
)  # fmt: skip
"""Settings of `runtime` that are part of a row."""


def run_conditions(config: RunConfig, hardware: Hardware, model: str) -> dict[str, Any]:
    """What all rows of one run share: the provenance record that every task writes.

    `model` is what the target is called. A setting that the task varies by itself is None.
    """
    varied = config.task.IGNORED
    sampling = asdict(config.sampling) | ({"temperature": None} if "sampling.temperature" in varied else {})
    sizes = {key: None if f"runtime.{key}" in varied else getattr(config.runtime, key) for key in _SIZES}
    return {
        "model": model,
        "backend": config.backend.name,
        "device": hardware.device,
        "dtype": hardware.dtype,
        "impl": hardware.label,
        "forward": hardware.forward,
        "machine": machine(hardware.device),
        "clocks": gpu_clocks(hardware.device),
        "sampling": sampling,
        **sizes,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "revision": git_revision(),
        "versions": versions(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
