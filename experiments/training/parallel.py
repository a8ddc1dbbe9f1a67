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
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

LONGEST_WAIT = timedelta(hours=1)
"""Longest wait for process 0, which evaluates, or for a process that writes its last text."""


class Replicas:
    """The processes of one run; without torchrun there is one. They do not use torch's default process group: its
    members share a target, and the engine would split each request over them (`algorithms/parallel/collectives.py`),
    while every process here serves requests of its own."""

    def __init__(
        self, rank: int = 0, world: int = 1, group: Any = None, store: Any = None, device: str = "cpu"
    ) -> None:
        """`group` is a backend of torch.distributed, whose type stubs leave the collectives out, on `device`."""
        self.rank, self.world, self._group, self._store, self._device = rank, world, group, store, device

    @classmethod
    def join(cls, device: str) -> Replicas:
        """Connect the processes that torchrun started, if it did."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        store, rank, world = next(dist.rendezvous("env://"))
        store.set_timeout(LONGEST_WAIT)
        if not device.startswith("cuda"):
            return cls(rank, world, dist.ProcessGroupGloo(store, rank, world, LONGEST_WAIT), store)
        own = local_device(device)
        torch.cuda.set_device(own)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = LONGEST_WAIT
        return cls(rank, world, dist.ProcessGroupNCCL(store, rank, world, options), store, own)

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

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradients by their means over all processes, in one exchange. A missing one counts as zero."""
        if self._group is None:
            return
        gradients = []
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients.append(parameter.grad)
        together = parameters_to_vector(gradients)
        self._group.allreduce([together]).wait()
        vector_to_parameters(together / self.world, gradients)

    def clock(self, step: int, own: float) -> float:
        """Process 0's `own` clock at `step`, in every process. It goes through the host, so no device is waited for."""
        if self._store is not None and self.is_first:
            self._store.set(f"clock {step}", str(own))
        return own if self._store is None else float(self._store.get(f"clock {step}"))

    def wait(self) -> None:
        if self._group is not None:
            # NCCL's own barrier guesses the device.
            flag = torch.zeros(1, device=self._device)
            self._group.allreduce([flag]).wait()
            flag.item()


def local_device(device: str) -> str:
    """The device of this process: torchrun's number where `device` names no number of its own."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device
