"""Several processes that share one target, one process per device. torchrun starts them, `join` connects them:

    torchrun --nproc-per-node=2 run.py runtime.tensor_parallel=2

Every process runs the whole experiment on the same requests. Only process 0 prints and leaves files.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.app.errors import UserError
from experiments.app.hardware import Hardware

if TYPE_CHECKING:
    from algorithms.models.loading import Target, TargetFolder


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
