"""One exchange between devices and the norm behind it as one Triton kernel: a program a row.

A program writes its rank's sum of a row to its own memory, raises a flag in the memory of every other rank, waits for
the flags of the others in its own, and reads their sums. It waits for the same row of the others alone, and every
device starts its programs in the order of the rows, so no two programs wait for each other. A flag goes from 0 to 1 by
the writer and back by the reader, so a captured graph can be replayed. The slots are used in turn: a rank whose flag of
this call has arrived had ended the call before, and so had read the memory that this rank writes in the next call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.all_reduce.types import SLOTS, Exchange
from specdec_kernels.launch import current_chip, launch
from specdec_kernels.norm.configs import num_warps
from specdec_kernels.norm.kernel import normed_row
from specdec_kernels.norm.types import Normed
from specdec_kernels.overlap import let_next_kernel_start, overlapped, wait_for_kernel_ahead


@triton.jit
def _exchange_flags(flags_ptr, offsets_ptr, first_flag, row, capacity, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Tell every other rank that this rank's row is written, and wait until theirs is."""
    tl.debug_barrier()  # all threads have written before one of them raises a flag
    for other in tl.static_range(RANKS):
        if other != RANK:
            theirs = flags_ptr + tl.load(offsets_ptr + other) + first_flag + RANK * capacity + row
            while tl.atomic_cas(theirs, 0, 1, sem="release", scope="sys") != 0:
                pass
    for other in tl.static_range(RANKS):
        if other != RANK:
            ours = flags_ptr + tl.load(offsets_ptr + RANK) + first_flag + other * capacity + row
            while tl.atomic_cas(ours, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    tl.debug_barrier()  # no thread reads before the flags have come


@triton.jit(do_not_specialize=["num_parts", "rows", "first_sum", "first_flag", "capacity"])
def _all_reduce_kernel(
    parts_ptr,  # [num_parts, rows, D] float32
    memory_ptr,  # this rank's memory, float32
    flags_ptr,  # the same, int32
    offsets_ptr,  # [RANKS] int64
    residual_ptr,  # [rows, D]
    weight_ptr,  # [D]
    out_ptr,  # [rows, D]
    sum_ptr,  # [rows, D]
    eps,
    num_parts,
    rows,
    first_sum,
    first_flag,
    capacity,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_D)
    inside = dims < D
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0)
    wait_for_kernel_ahead(OVERLAP)
    let_next_kernel_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(parts_ptr + row * D + dims, mask=inside, other=0.0)
    for part in tl.range(1, num_parts):
        own += tl.load(parts_ptr + (part * rows + row) * D + dims, mask=inside, other=0.0)
    place = first_sum + row * D + dims
    tl.store(memory_ptr + tl.load(offsets_ptr + RANK) + place, own, mask=inside)
    _exchange_flags(flags_ptr, offsets_ptr, first_flag, row, capacity, RANK, RANKS)
    total = tl.zeros([BLOCK_D], tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += own
        else:
            # Past the caches, which do not see what other devices write.
            theirs = memory_ptr + tl.load(offsets_ptr + rank) + place
            total += tl.load(theirs, mask=inside, other=0.0, cache_modifier=".cv")
    x = total.to(out_ptr.dtype.element_ty)
    residual = tl.load(residual_ptr + row * D + dims, mask=inside, other=0.0)
    x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + row * D + dims, x, mask=inside)
    tl.store(out_ptr + row * D + dims, normed_row(x, weight, eps, D), mask=inside)


def all_reduce_add_rms_norm(
    parts: torch.Tensor, exchange: Exchange, slot: int, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Normed:
    normed, total = torch.empty_like(residual), torch.empty_like(residual)
    width, chip, ranks = exchange.width, current_chip(residual), len(exchange.offsets)
    rows, block = residual.numel() // width, triton.next_power_of_2(width)
    first_flag = SLOTS * exchange.rows * width + slot * ranks * exchange.rows
    launch(
        _all_reduce_kernel,
        (rows,),
        *(parts, exchange.memory, exchange.flags, exchange.offsets, residual, weight, normed, total, float(eps)),
        *(parts.shape[0], rows, slot * exchange.rows * width, first_flag, exchange.rows),
        num_warps=num_warps(chip, block),
        D=width,
        BLOCK_D=block,
        RANK=exchange.rank,
        RANKS=ranks,
        **overlapped(chip),
    )
    return Normed(normed, total)
