"""One exchange between devices and the norm after it in one Triton kernel: a program a row.

A program sends its rank's sum of a row to the memory of every other rank, waits for theirs in its own memory, and
adds. A sent word is a float whose last bit is the last bit of the call's number, so data and signal arrive together
without a fence. One bit is enough, because every call of a row writes all of its words. A program waits for the same
row of the others alone, and every device starts its programs in the order of the rows: no deadlock.

The number of the call is counted in memory, so a captured graph can be replayed. The slots are used in turn: a rank
whose words of one call have arrived has read the slot that the next call writes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.all_reduce.types import SLOTS, Exchange
from specdec_kernels.launch import current_chip, launch
from specdec_kernels.norm.configs import num_warps
from specdec_kernels.norm.kernel import normed_row
from specdec_kernels.norm.types import Normed, NormInputs
from specdec_kernels.pdl import launch_dependents, wait_for_predecessor


@triton.jit
def packed_word(number, call):
    """The word of an int32 `number` that is sent in a `call` (int32)."""
    return (call.to(tl.int64) << 32) | (number.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def received(words_ptr, call, inside):
    """The int32 numbers at `words_ptr`, as soon as all of them were sent in this `call` (int32)."""
    word = tl.load(words_ptr, mask=inside, other=0, volatile=True)
    while tl.max((inside & ((word >> 32).to(tl.int32) != call)).to(tl.int32), 0) > 0:
        word = tl.load(words_ptr, mask=inside, other=0, volatile=True)
    return word.to(tl.int32)


@triton.jit
def _floats_at(memory_ptr, offset, first_word):
    """The words of four bytes from `offset` + `first_word` on, both even: several words are written and read at a
    time, because the form shows that."""
    return (memory_ptr + offset // 2 * 2 + first_word // 2 * 2).to(tl.pointer_type(tl.int32))


@triton.jit
def _received_sums(words_ptr, call, inside):
    """The floats at `words_ptr` without their last bits, as soon as all of them were sent in this `call` (int32)."""
    word = tl.load(words_ptr, mask=inside, other=0, volatile=True)
    while tl.max((inside & ((word ^ call) & 1 != 0)).to(tl.int32), 0) > 0:
        word = tl.load(words_ptr, mask=inside, other=0, volatile=True)
    return (word & -2).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_parts", "rows", "first_word", "first_counter", "capacity"])
def _all_reduce_kernel(
    parts_ptr,  # [num_parts, rows, D] float32
    memory_ptr,  # this rank's memory, int64
    offsets_ptr,  # [RANKS] int64
    residual_ptr,  # [rows, D]
    weight_ptr,  # [D]
    out_ptr,  # [rows, D]
    sum_ptr,  # [rows, D]
    eps,
    num_parts,
    rows,
    first_word,
    first_counter,
    capacity,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_D)
    inside = dims < D
    # Loaded before the wait: weights and the offsets of the exchange are constants, which no kernel writes.
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0)
    own_offset = tl.load(offsets_ptr + RANK)
    launch_dependents(PDL)
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    counter_ptr = memory_ptr + own_offset + first_counter + row
    call = (tl.load(counter_ptr) + 1).to(tl.int32)
    residual = tl.load(residual_ptr + row * D + dims, mask=inside, other=0.0)
    own = tl.load(parts_ptr + row * D + dims, mask=inside, other=0.0)
    for part in tl.range(1, num_parts):
        own += tl.load(parts_ptr + (part * rows + row) * D + dims, mask=inside, other=0.0)
    bits = own.to(tl.int32, bitcast=True) & -2
    for other in tl.static_range(RANKS):
        if other != RANK:
            place = (RANK * capacity + row) * D + dims
            there_ptr = _floats_at(memory_ptr, tl.load(offsets_ptr + other), first_word)
            tl.store(there_ptr + place, bits | (call & 1), mask=inside)
    total = tl.zeros([BLOCK_D], tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += bits.to(tl.float32, bitcast=True)
        else:
            here_ptr = _floats_at(memory_ptr, own_offset, first_word)
            total += _received_sums(here_ptr + (rank * capacity + row) * D + dims, call, inside)
    x = total.to(out_ptr.dtype.element_ty)
    x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + row * D + dims, x, mask=inside)
    tl.store(out_ptr + row * D + dims, normed_row(x, weight, eps, D), mask=inside)
    tl.store(counter_ptr, call.to(tl.int64))


def all_reduce_add_rms_norm(parts: Tensor, exchange: Exchange, slot: int, end: NormInputs) -> Normed:
    residual = end.residual
    result = Normed(torch.empty_like(residual), torch.empty_like(residual))
    width = exchange.width
    ranks = len(exchange.offsets)
    rows = residual.numel() // width
    block = triton.next_power_of_2(width)
    words = ranks * exchange.rows * width
    launch(
        _all_reduce_kernel,
        (rows,),
        *(parts, exchange.memory, exchange.offsets, residual, end.weight, *result, float(end.eps)),
        *(parts.shape[0], rows, slot * words, SLOTS * words + slot * exchange.rows, exchange.rows),
        num_warps=num_warps(current_chip(residual), block),
        D=width,
        BLOCK_D=block,
        RANK=exchange.rank,
        RANKS=ranks,
    )
    return result
