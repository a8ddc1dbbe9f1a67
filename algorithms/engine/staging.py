"""Arrays that the host sends to the device: named, of fixed shape, in one copy.

The device's tensors keep their addresses, so work on them can be captured in a CUDA graph. The host writes into pinned
memory. There are several such buffers, so it waits for a copy only where it is that many ahead of the device.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUM_BUFFERS = 3  # a copy is queued after the steps in flight, which are fewer than this
_ALIGNED_BYTES = 128

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name to shape and dtype
Arrays = dict[str, "np.ndarray[Any, Any]"]


class Staging:
    """Device tensors of `fields` in one allocation, and host buffers of the same layout."""

    def __init__(self, fields: Fields, device: torch.device, num_buffers: int = NUM_BUFFERS) -> None:
        """`num_buffers` is how many sends the host may be ahead of the device."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in fields.values()]
        starts = [0]
        for size in sizes:
            # Every field begins at one alignment, so that kernels are compiled for one.
            starts.append(starts[-1] + -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES)
        places = dict(zip(fields, zip(starts, sizes, strict=False), strict=True))

        def views(memory: Tensor) -> dict[str, Tensor]:
            parts = {name: memory[start : start + size] for name, (start, size) in places.items()}
            return {name: part.view(fields[name][1]).view(fields[name][0]) for name, part in parts.items()}

        self._cuda = device.type == "cuda"
        self._memory = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        self._hosts = [torch.zeros(starts[-1], dtype=torch.uint8, pin_memory=self._cuda) for _ in range(num_buffers)]
        self._arrays: list[Arrays] = [
            {name: part.numpy() for name, part in views(host).items()} for host in self._hosts
        ]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if self._cuda else []
        self._next = 0
        self.tensors = views(self._memory)
        """The arrays of the last `send`, by name."""

    def arrays(self) -> Arrays:
        """The buffer that the next `send` copies, to be written to; it holds what was sent from it last."""
        if self._cuda:
            self._copied[self._next].synchronize()
        return self._arrays[self._next]

    def send(self) -> None:
        """Copy the buffer to the device, after the work that is queued there."""
        self._memory.copy_(self._hosts[self._next], non_blocking=True)
        if self._cuda:
            self._copied[self._next].record()
        self._next = (self._next + 1) % len(self._hosts)
