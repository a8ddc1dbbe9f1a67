"""The device, the dtype and the implementation of a run, settled once, and its processes, one per device.

Several processes may share one target. torchrun starts them, `join` connects them:

    torchrun --nproc-per-node=2 run.py runtime.tensor_parallel=2

Every process runs the whole experiment on the same requests. Only process 0 prints and leaves files.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from algorithms.engine.settings import RuntimeSettings, runs_fused
from experiments.app.errors import UserError, user_errors

if TYPE_CHECKING:
    from algorithms.models.loading import Target, TargetFolder


INTERPRET = "TRITON_INTERPRET"
INTERPRETER = "triton-interpreter"  # the label in records of kernels that Triton's interpreter runs


@dataclass(frozen=True)
class Hardware:
    """The device of a run and its implementation: `impl` in the engine's settings, `label` in records. `forward` is
    fused or torch."""

    device: str
    dtype: str
    impl: str
    label: str
    forward: str = "torch"

    @property
    def can_capture(self) -> bool:
        """Whether CUDA graphs exist on this device."""
        return self.device == "cuda"


def chosen_device(asked: str, key: str) -> str:
    """`asked`, or where that is auto a GPU if there is one. Raises ValueError for a GPU that is not there; `key` is the
    name of the setting."""
    import torch

    has_gpu = torch.cuda.is_available()
    if asked.startswith("cuda") and not has_gpu:
        fix = f"use {key}=cpu, or install a CUDA build of torch"
        raise ValueError(f"{key}={asked}: torch {torch.__version__} sees no CUDA device\n{fix}")
    return asked if asked != "auto" else "cuda" if has_gpu else "cpu"


def resolve_hardware(runtime: RuntimeSettings) -> Hardware:
    """Settle every `auto` of `runtime`. Raises UserError where the machine lacks it. Without a GPU this switches
    Triton's interpreter on, which must happen before Triton is imported."""
    with user_errors(ValueError):
        device = chosen_device(runtime.device, "runtime.device")
    dtype = runtime.dtype if runtime.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    forward = "fused" if runs_fused(runtime, device == "cuda", dtype == "float32") else "torch"
    if runtime.impl == "reference":
        return Hardware(device, dtype, "reference", "reference", forward)
    if importlib.util.find_spec("triton") is None:
        raise UserError("Triton is not installed\npip install triton, or use runtime.impl=reference")
    if device == "cpu":
        if dtype == "bfloat16":
            raise UserError(
                "runtime.dtype=bfloat16 on the CPU: Triton's interpreter computes bfloat16 wrongly\n"
                "use runtime.dtype=float32, or runtime.impl=reference"
            )
        os.environ[INTERPRET] = "1"
    label = INTERPRETER if os.environ.get(INTERPRET) == "1" else "triton"
    return Hardware(device, dtype, "triton", label, forward)


def rank() -> int:
    """Number of this process; 0 where it is the only one."""
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Whether this process prints and writes for all."""
    return rank() == 0


def output_folder(asked: Path) -> Path:
    """The folder that this process may write to: the run folder in the main process, in others a temporary folder that
    is removed when the process ends."""
    if is_main_process():
        return asked
    folder = Path(tempfile.mkdtemp(prefix="specdec_rank_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def join(tensor_parallel: int, device: str) -> None:
    """Connect the processes of a tensor-parallel run. Raises UserError unless `tensor_parallel` processes run."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != tensor_parallel:
        asked = f"runtime.tensor_parallel={tensor_parallel}"
        again = f"torchrun --nproc-per-node={tensor_parallel} run.py {asked} …"
        raise UserError(f"{asked} needs {tensor_parallel} processes, got {started}\nstart it with {again}")
    if tensor_parallel == 1:
        return
    import torch
    import torch.distributed as dist

    from algorithms.parallel import heartbeat

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        heartbeat.start()


def load_shared(folder: TargetFolder, hardware: Hardware, tensor_parallel: int, weight_dtype: str) -> Target:
    """The target, or this process's slice of it. Raises ModelError or ValueError where it cannot be loaded."""
    import torch

    from algorithms.models.loading import Target, load_target
    from algorithms.parallel.sharding import shard

    dtype = getattr(torch, hardware.dtype)
    if tensor_parallel == 1:
        return load_target(folder, hardware.device, dtype, weight_dtype)
    whole = load_target(folder, "cpu", dtype)
    model = shard(whole.model, rank(), tensor_parallel).to(hardware.device)
    return Target(model.config, whole.path, model, origin=whole.origin)
