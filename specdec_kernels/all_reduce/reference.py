"""The definition of the exchange in plain torch, for an `Exchange` that holds the memory of all ranks."""

from __future__ import annotations

import torch

from specdec_kernels.all_reduce.types import SLOTS, Exchange
from specdec_kernels.norm.reference import add_rms_norm
from specdec_kernels.norm.types import Normed


def all_reduce_add_rms_norm(
    parts: torch.Tensor, exchange: Exchange, slot: int, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Normed:
    """residual + the sum over ranks of each rank's parts, and the norm of that."""
    width = residual.shape[-1]
    own = parts[0]
    for part in parts[1:]:
        own = own + part
    rows = own.numel() // width
    sums, flags = _places(exchange, slot, rows)
    sums[exchange.rank].copy_(own.view(rows, width))
    for rank in range(len(exchange.offsets)):
        if rank != exchange.rank:
            flags[rank][exchange.rank].fill_(1)
            flags[exchange.rank][rank].fill_(0)
    total = sums[0].clone()
    for other in sums[1:]:
        total += other
    return add_rms_norm(total.to(residual.dtype).view_as(residual), residual, weight, eps)


def _places(exchange: Exchange, slot: int, rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of every rank the sums [rows, width] and the flags [ranks, rows] of a slot, as views."""
    ranks, capacity, width = len(exchange.offsets), exchange.rows, exchange.width
    sums, flags = [], []
    for start in exchange.offsets.tolist():
        first = start + slot * capacity * width
        sums.append(exchange.memory[first : first + rows * width].view(rows, width))
        first = start + SLOTS * capacity * width + slot * ranks * capacity
        flags.append(exchange.flags[first : first + ranks * capacity].view(ranks, capacity)[:, :rows])
    return sums, flags
