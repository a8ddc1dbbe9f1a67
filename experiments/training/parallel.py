"""Several processes that train one model on different batches. torchrun starts them, one process per device:

    torchrun --nproc-per-node=2 -m experiments.train drafter=dflash model=smollm2

Every process computes the gradient of its own batch; their mean is everyone's, so the weights stay equal. Process 0
keeps the clock, evaluates, and writes the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LONGEST_WAIT = timedelta(hours=1)
"""The others wait while process 0 evaluates, or while one of them writes its last text."""


class Told:
    """A number on its way from the device to the host; reading it waits for nothing that was launched later."""

    def __init__(self, value: Tensor) -> None:
        self._host = torch.empty(1, pin_memory=value.is_cuda)
        self._host.copy_(value, non_blocking=True)
        self._arrived = torch.cuda.Event() if value.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def __float__(self) -> float:
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._host)


class Replicas:
    """The processes of one run; without torchrun there is one.

    They do not use torch's default process group: its members share a target, and the engine would split each request
    over them (`algorithms/runtime/collectives.py`), while every process here serves requests of its own.
    """

    def __init__(self, rank: int = 0, world: int = 1, group: Any = None, device: str = "cpu") -> None:
        """`group` is a backend of torch.distributed, whose type stubs leave the collectives out, on `device`."""
        self.rank, self.world, self._group, self._device = rank, world, group, device
        self._told: Told | None = None

    @classmethod
    def join(cls, device: str) -> Replicas:
        """Connect the processes that torchrun started, if it did."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        store, rank, world = next(dist.rendezvous("env://"))
        if not device.startswith("cuda"):
            return cls(rank, world, dist.ProcessGroupGloo(store, rank, world, LONGEST_WAIT))
        own = local_device(device)
        torch.cuda.set_device(own)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = LONGEST_WAIT
        return cls(rank, world, dist.ProcessGroupNCCL(store, rank, world, options), own)

    @property
    def is_first(self) -> bool:
        """Whether this process evaluates and writes."""
        return self.rank == 0

    def share(self, model: nn.Module) -> None:
        """Give every process the weights and buffers of process 0."""
        if self._group is not None:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            for tensor in model.state_dict().values():
                self._group.broadcast([tensor], options).wait()

    @torch.no_grad()
    def average(self, parameters: Iterable[nn.Parameter], clock: float) -> float:
        """Replace the gradients by their means over all processes, in one exchange; returns the `clock` that process 0
        gave at the call before, or at this one if it is the first.

        To read this call's clock would be to wait for the step. A parameter without a gradient counts as one whose
        gradient is zero.
        """
        if self._group is None:
            return clock
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        mine = trained[0].new_tensor([clock if self.is_first else 0.0], dtype=torch.float32)
        together = torch.cat([*(piece.flatten().float() for piece in pieces), mine])
        self._group.allreduce([together]).wait()
        *means, told = together.split([*(piece.numel() for piece in pieces), 1])
        now = Told(told)
        before, self._told = self._told or now, now
        for parameter, mean in zip(trained, means, strict=True):
            parameter.grad = (mean / self.world).view_as(parameter).to(parameter.dtype)
        return float(before)

    def wait(self) -> None:
        """Go on when every process is here."""
        if self._group is not None:
            # NCCL's own barrier guesses the device.
            flag = torch.zeros(1, device=self._device)
            self._group.allreduce([flag]).wait()
            flag.item()


def local_device(device: str) -> str:
    """The device of this process: torchrun's number where `device` names no number of its own."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device
