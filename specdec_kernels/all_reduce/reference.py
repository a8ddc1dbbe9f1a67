"""The definition of the exchange in plain torch, for an `Exchange` that holds the memory of all ranks."""

import torch
from torch import Tensor

from specdec_kernels.all_reduce.types import SLOTS, Exchange
from specdec_kernels.norm.reference import add_rms_norm
from specdec_kernels.norm.types import Normed, NormInputs

_LOW = (1 << 32) - 1


def all_reduce_add_rms_norm(parts: Tensor, exchange: Exchange, slot: int, end: NormInputs) -> Normed:
    """residual + the sum over ranks of each rank's parts, and the norm of that."""
    residual, width = end.residual, exchange.width
    own = parts[0]
    for part in parts[1:]:
        own = own + part
    own = own.view(-1, width)
    own = own if own.dtype == torch.float64 else as_sent(own)
    counters = _places(exchange, exchange.rank, slot, len(own))[1]
    calls = counters + 1
    counters.copy_(calls)
    for rank in range(len(exchange.offsets)):
        if rank != exchange.rank:
            _sums(exchange, rank, slot, len(own))[exchange.rank].copy_(packed(own, calls))
    total = torch.zeros_like(own)
    for rank, words in enumerate(_sums(exchange, exchange.rank, slot, len(own))):
        total += own if rank == exchange.rank else as_sent(words.view(torch.float32))
    return add_rms_norm(total.to(residual.dtype).view_as(residual), end)


def tell_numbers(numbers: Tensor, exchange: Exchange) -> Tensor:
    """The numbers that every rank sends of each row [ranks, R, width] int32; this rank sends `numbers` [R, width]
    int32. The slot follows the call, whose number is counted for each row in the first of the counters."""
    told = []
    for row, own in enumerate(numbers):
        counter = _places(exchange, exchange.rank, 0, row + 1)[1][row]
        call = counter + 1
        received, _ = _places(exchange, exchange.rank, int(call) % SLOTS, row + 1)
        counter.copy_(call)
        for rank in range(len(exchange.offsets)):
            if rank != exchange.rank:
                words = _places(exchange, rank, int(call) % SLOTS, row + 1)[0][exchange.rank, row]
                words.copy_(words_of(own[None], call[None])[0])
        each = (received[:, row] & _LOW).to(torch.int32)
        each[exchange.rank] = own
        told.append(each)
    return torch.stack(told, 1) if told else numbers.expand(len(exchange.offsets), *numbers.shape)


def as_sent(x: Tensor) -> Tensor:
    """float32 numbers x as ranks send them to each other: without their last bit, which marks the call."""
    return (x.view(torch.int32) & -2).view(torch.float32)


def packed(rows: Tensor, calls: Tensor) -> Tensor:
    """Words [R, width] int32 of the rows [R, width], as float32, sent in the calls [R]."""
    return (rows.float().view(torch.int32) & -2) | (calls[:, None] & 1).int()


def words_of(numbers: Tensor, calls: Tensor) -> Tensor:
    """Words [R, width] of int32 numbers [R, width] sent in the calls [R]."""
    return (calls[:, None] << 32) | (numbers.long() & _LOW)


def _sums(exchange: Exchange, rank: int, slot: int, rows: int) -> Tensor:
    """The sums that a rank receives in a slot, [ranks, rows, width] int32, as a view."""
    words, _ = _places(exchange, rank, slot, exchange.rows)
    return words.reshape(-1).view(torch.int32)[: words.numel()].view(words.shape)[:, :rows]


def _places(exchange: Exchange, rank: int, slot: int, rows: int) -> tuple[Tensor, Tensor]:
    """The words that a rank receives in a slot [ranks, rows, width], and the counters [rows], as views."""
    ranks, capacity, width = len(exchange.offsets), exchange.rows, exchange.width
    start, size = int(exchange.offsets[rank]), ranks * capacity * width
    words = exchange.memory[start + slot * size :][:size].view(ranks, capacity, width)[:, :rows]
    counters = exchange.memory[start + SLOTS * size + slot * capacity :][:rows]
    return words, counters
