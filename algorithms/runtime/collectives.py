"""Sums, joins and broadcasts between the processes that share a target, one process per device.

Every rank reads a small sum straight from the memory of the others (one shot, over symmetric memory of torch): it is
bound by latency, and one exchange has less of it than a ring. The ranks add in the same order, so all of them hold the
same bits. Larger sums, and machines whose devices cannot read each other, use the all-reduce of the process group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

_ONE_SHOT_BYTES = 1 << 20
_ONE_SHOT_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16


def parallel() -> bool:
    """Whether this process is one of several that share a target."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of every rank's `x`, of the same shape and dtype; `x` may hold it afterwards."""
    size = x.numel() * x.element_size()
    one_shot = x.is_cuda and x.dtype in _ONE_SHOT_DTYPES and 0 < size <= _ONE_SHOT_BYTES and size % _ALIGNMENT == 0
    if one_shot and (shared := _shared_memory(x.device)) is not None:
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        return torch.ops.symm_mem.one_shot_all_reduce_copy(shared.view(x.dtype), x.contiguous(), "sum", group)
    x = x.contiguous()
    dist.all_reduce(x)
    return x


def join_columns(part: Tensor) -> Tensor:
    """Every rank's `part [..., n]` side by side, [..., ranks * n], rank 0 first."""
    ranks = dist.get_world_size()
    parts = part.new_empty((ranks, *part.shape))
    dist.all_gather(list(parts), part.contiguous())
    return parts.movedim(0, -2).reshape(*part.shape[:-1], ranks * part.shape[-1])


def from_rank_0(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Rank 0's tensors, on every rank, by one broadcast; shapes and dtypes are the same on all ranks."""
    zeros = torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=tensors[0].device)
    pieces, starts, end = [], [], 0
    for tensor in tensors:
        # Every tensor begins at a multiple of the alignment, so that kernels see the same as without other ranks.
        size = tensor.numel() * tensor.element_size()
        starts.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
        pieces += [tensor.contiguous().flatten().view(torch.uint8), zeros[: end - starts[-1] - size]]
    packed = torch.cat(pieces)
    dist.broadcast(packed, 0)
    return [
        packed[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


@cache
def _shared_memory(device: torch.device) -> Tensor | None:
    """[bytes] uint8 that all ranks read, or None where devices cannot read each other. All ranks call this at once."""
    import torch.distributed._symmetric_memory as symmetric_memory

    # Sums here never use multicast; without this line it would be set up all the same.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    try:
        shared = symmetric_memory.empty(_ONE_SHOT_BYTES, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(shared, dist.group.WORLD)  # type: ignore[arg-type]
    except RuntimeError:
        return None
    return shared
