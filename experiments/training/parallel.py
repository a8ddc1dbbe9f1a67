"""Several processes that train one model on different batches. torchrun starts them, one process per device:

    torchrun --nproc-per-node=2 -m experiments.train drafter=dflash model=smollm2

Every process computes the gradient of its own batch; their mean is everyone's, so the weights stay equal. Process 0
keeps the clock, evaluates, and writes the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Replicas:
    """The processes of one run; without torchrun there is one."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    @classmethod
    def join(cls, device: str) -> Replicas:
        """Connect the processes that torchrun started, if it did."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        if device.startswith("cuda"):
            torch.cuda.set_device(local_device(device))
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        return cls(dist.get_rank(), world)

    @property
    def is_first(self) -> bool:
        """Whether this process evaluates and writes."""
        return self.rank == 0

    def share(self, model: nn.Module) -> None:
        """Give every process the weights and buffers of process 0."""
        if self.world > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)

    @torch.no_grad()
    def average(self, parameters: Iterable[nn.Parameter], clock: float) -> float:
        """Replace the gradients by their means over all processes, in one exchange; returns the `clock` of process 0.

        A parameter without a gradient counts as one whose gradient is zero.
        """
        if self.world == 1:
            return clock
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        mine = trained[0].new_tensor([clock if self.is_first else 0.0], dtype=torch.float32)
        together = torch.cat([*(piece.flatten().float() for piece in pieces), mine])
        dist.all_reduce(together)
        *means, told = together.split([*(piece.numel() for piece in pieces), 1])
        for parameter, mean in zip(trained, means, strict=True):
            parameter.grad = (mean / self.world).view_as(parameter).to(parameter.dtype)
        return float(told)

    def wait(self) -> None:
        """Go on when every process is here."""
        if self.world > 1:
            dist.barrier()


def local_device(device: str) -> str:
    """The device of this process: torchrun's number where `device` names no number of its own."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device


def mean_of(values: Iterable[Tensor]) -> float:
    """Mean of scalars that lie on a device, in one readback."""
    return float(torch.stack(list(values)).mean())
