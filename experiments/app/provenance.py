"""Provenance of a result: model, settings, machine, revision, versions."""

import hashlib
import importlib.util
import os
import platform
import re
import subprocess
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from algorithms.registry import PACKAGES_VARIABLE
from experiments.app.hardware import Hardware
from experiments.app.schema import REPO_ROOT, RunConfig

CLOCKS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "power.limit": "power_limit_w",
}
"""Name of a figure in nvidia-smi, and in a result."""
PACKAGES = ("torch", "triton", "transformers", "numpy", "hydra-core")


def git_revision() -> str | None:
    """Commit of the repository; None outside of one. Uncommitted changes of anything but pages add `-dirty-HASH`, and
    packages that `SPECDEC_ALGORITHMS` names add `-plugins-HASH`, so that other code has another revision. The
    environment variable `SPECDEC_REVISION` names it where a tree travels without its history."""
    revision = os.environ.get("SPECDEC_REVISION") or _repository_revision()
    sources = [file for name in os.environ.get(PACKAGES_VARIABLE, "").split(",") for file in _sources(name.strip())]
    plugins = "".join(file.read_text(encoding="utf-8", errors="replace") for file in sources)
    return f"{revision or 'unknown'}-plugins-{_hash(plugins)}" if plugins else revision


@lru_cache
def _repository_revision() -> str | None:
    """Commit and state of the repository when this process began to use it."""
    try:
        commit = _git("rev-parse", "HEAD").strip()
        changes = _git("diff", "HEAD", "--", ".", ":!*.md")
        new = _git("ls-files", "--others", "--exclude-standard", "--", "*.py", "*.yaml").splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    changes += "".join((REPO_ROOT / name).read_text(encoding="utf-8", errors="replace") for name in new)
    return f"{commit}-dirty-{_hash(changes)}" if changes else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPO_ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=True).stdout


def _sources(package: str) -> list[Path]:
    """The Python files of a module or package."""
    spec = importlib.util.find_spec(package) if package else None
    if spec is None or spec.origin is None:
        return []
    origin = Path(spec.origin)
    return sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def short_revision(revision: str) -> str:
    """The first seven digits of a commit, and what follows it."""
    commit, dash, state = revision.partition("-")
    return commit[:7] + dash + state


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that a result depends on."""
    found: dict[str, str | None] = {"python": platform.python_version()} | dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def machine(device: str) -> str:
    """One line that names the GPU, or the processor and its cores."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    names = re.findall(r"^model name\s*:\s*(.*\S)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def gpu_clocks(device: str) -> dict[str, float] | None:
    """Current and maximal clocks of the GPU in MHz, and its power limit in watts; None where nvidia-smi fails."""
    if device != "cuda":
        return None
    number = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", f"--id={number}", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return dict(zip(CLOCKS.values(), map(float, done.stdout.strip().split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def measured_on(device: str) -> dict[str, Any]:
    """What every figure depends on, whatever the settings."""
    return {"machine": machine(device), "revision": git_revision(), "versions": versions()}


_SIZES = (
    "page_size", "max_batch", "prefill_chunk", "mixed_prefill", "prefill_ahead", "graph", "kv_dtype", "kv_scales",
    "weight_dtype", "deterministic",
)  # fmt: skip
"""Settings of `runtime` that are part of a row."""


def run_conditions(config: RunConfig, hardware: Hardware, model: str) -> dict[str, Any]:
    """The conditions of all results of one run: the provenance record that every task writes. `model` is what the
    target is called. A setting that the task varies by itself is None."""
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
        **measured_on(hardware.device),
        "clocks": gpu_clocks(hardware.device),
        "sampling": sampling,
        **sizes,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
