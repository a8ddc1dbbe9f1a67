"""Sums, joins and broadcasts between the processes that share a target, one process per device, and their agreement.

Every rank adds its share of a sum straight from the memory of the others and writes it to all of them (two shots, over
symmetric memory of torch), so all ranks hold the same bits. Sums of few rows are bound by latency and have a kernel of
this project (`exchange_of`). Very large sums, and machines whose devices cannot read each other, use the all-reduce of
the process group.

Every rank runs the same loop over the same requests, but equal bits on every device are not guaranteed. So rank 0
decides: its draft and its acceptance are broadcast. Greedy tokens that all ranks have chosen together, see
`Decoder.argmax`, are equal already.
"""

import os
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from algorithms.algorithm import DraftTree
from specdec_kernels import Accepted, Exchange, TreeLinks, exchange_elements

_SHARED_BYTES = 1 << 25
_SHARED_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16
_EXCHANGE_ROWS = 128  # more rows are summed sooner in two shots
_CHOICE_ROWS = 2048
_WORD_BYTES = 8


def parallel() -> bool:
    """Whether this process is one of several that share a target."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of every rank's `x`, of the same shape and dtype, in `x` or in memory that the next sum overwrites."""
    size = x.numel() * x.element_size()
    shareable = x.is_cuda and x.dtype in _SHARED_DTYPES and 0 < size <= _SHARED_BYTES and size % _ALIGNMENT == 0
    if shareable and (shared := _shared_memory(x.device)) is not None:
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        place = shared[:size].view(x.dtype).view(x.shape)
        return torch.ops.symm_mem.two_shot_all_reduce_(place.copy_(x), "sum", group)
    x = x.contiguous()
    dist.all_reduce(x)
    return x


def sum_in_order(x: Tensor) -> Tensor:
    """The sum of every rank's `x`, added in float32 in the order of the ranks and rounded once.

    A number has the same bits regardless of the rest of the sum. The other sums choose how they add by the size of `x`.
    """
    parts = x.new_empty((dist.get_world_size(), *x.shape))
    dist.all_gather_into_tensor(parts.flatten(), x.flatten())
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    return total.to(x.dtype)


def exchange_of(rows: Tensor, width: int | None = None) -> Exchange | None:
    """Memory to exchange `width` numbers, D if None, for each of `rows [..., D]` with the other ranks inside a kernel;
    None where the rows are too many, or where devices cannot read each other. Every rank calls this at once."""
    most = _EXCHANGE_ROWS if width is None else _CHOICE_ROWS
    if not rows.is_cuda or not 0 < rows.numel() <= most * rows.shape[-1]:
        return None
    return _exchange(rows.device, most, width or rows.shape[-1])


def join_columns(part: Tensor) -> Tensor:
    """Every rank's `part [..., n]` side by side, [..., ranks * n], rank 0 first."""
    ranks = dist.get_world_size()
    parts = part.new_empty((ranks, *part.shape))
    dist.all_gather_into_tensor(parts.flatten(), part.flatten())
    return parts.movedim(0, -2).reshape(*part.shape[:-1], ranks * part.shape[-1])


def from_rank_0(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Rank 0's tensors, on every rank, by one broadcast; shapes and dtypes are the same on all ranks."""
    parts = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
    # Every tensor begins at a multiple of the alignment, so that kernels see the same as without other ranks.
    spare = [-len(part) % _ALIGNMENT for part in parts]
    zeros = torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=tensors[0].device)
    packed = torch.cat([each for part, rest in zip(parts, spare, strict=True) for each in (part, zeros[:rest])])
    dist.broadcast(packed, 0)
    agreed = packed.split([size for part, rest in zip(parts, spare, strict=True) for size in (len(part), rest)])[::2]
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(agreed, tensors, strict=True)]


@cache
def _exchange(device: torch.device, rows: int, width: int) -> Exchange | None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    found = _symmetric(device, _WORD_BYTES * exchange_elements(ranks, rows, width))
    if found is None:
        return None
    memory, addresses = found
    memory.zero_()
    offsets = torch.tensor([(address - addresses[rank]) // _WORD_BYTES for address in addresses], device=device)
    torch.cuda.synchronize(device)
    # No rank sends to memory that another has not zeroed yet.
    dist.barrier()
    return Exchange(memory.view(torch.int64), offsets, rank, rows, width)


@cache
def _shared_memory(device: torch.device) -> Tensor | None:
    """[bytes] uint8 that torch sums over, or None where devices cannot read each other. All ranks call this at once."""
    found = _symmetric(device, _SHARED_BYTES)
    return None if found is None else found[0]


def _symmetric(device: torch.device, size: int) -> tuple[Tensor, list[int]] | None:
    """[size] uint8 that every rank can read and write, and the address at which this process sees each rank's."""
    import torch.distributed._symmetric_memory as symmetric_memory

    # Nothing here uses multicast; without this line it would be set up all the same.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    try:
        memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        shared = symmetric_memory.rendezvous(memory, dist.group.WORLD)  # type: ignore[arg-type]
    except RuntimeError:
        return None
    return memory, list(shared.buffer_ptrs)


def own_share(tensor: Tensor, dim: int) -> Tensor:
    """This rank's part of `tensor`, which the ranks share out evenly along `dim`."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()] if parallel() else tensor


def agree_on_draft(draft: DraftTree) -> DraftTree:
    """Rank 0's draft, on every rank. A draft of node 0 alone is what all ranks have agreed on before."""
    if not parallel() or draft.tokens.shape[1] == 1:
        return draft
    others = {name: getattr(draft, name) for name in ("draft_probs", "draft_rows", "path_probs")}
    given = {name: tensor for name, tensor in others.items() if tensor is not None}
    tokens, *rest = from_rank_0([draft.tokens, *draft.links, *given.values()])
    links, agreed = TreeLinks(*rest[: len(draft.links)]), rest[len(draft.links) :]
    return DraftTree(tokens, links, **dict(zip(given, agreed, strict=True)))


def agree_on_acceptance(accepted: Accepted) -> Accepted:
    if not parallel():
        return accepted
    agreed = iter(from_rank_0([tensor for tensor in accepted if tensor is not None]))
    return Accepted(*(None if tensor is None else next(agreed) for tensor in accepted))  # type: ignore[arg-type]
