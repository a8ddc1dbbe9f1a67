"""Eviction by whole pages, and moves of lists of slots.

A list of slots that is too long for one program is gathered into a staging buffer and scattered by a second launch, so
that every source is read before any target is written.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.compat.sglang.index.configs import config_of
from specdec_kernels.kv_index.kernel import feature_offsets, move_rows
from specdec_kernels.launch import lanes, launch

_STAGING_BYTES = 64 << 20


@triton.jit(do_not_specialize=["batch"])
def _align_eviction_kernel(
    evict_ptr,  # [B, NODES] bool
    lengths_ptr,  # [B] int
    out_ptr,  # [B, NODES] bool
    batch,
    NODES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = (tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B))[:, None]
    node = tl.arange(0, BLOCK_N)[None, :]
    live = (request < batch) & (node < NODES)
    evict = tl.load(evict_ptr + request * NODES + node, mask=live, other=1).to(tl.int32)
    wanted = tl.sum(1 - evict, 1)[:, None]
    length = tl.load(lengths_ptr + request, mask=request < batch, other=0).to(tl.int64)
    # Rounded down to a page; the added page keeps the division away from negative numbers.
    first = (length + wanted - 1 + PAGE_SIZE) // PAGE_SIZE * PAGE_SIZE - PAGE_SIZE - length
    on_page = (node >= first) & (node < first + PAGE_SIZE)
    tl.store(out_ptr + request * NODES + node, (evict != 0) & (on_page == 0), mask=live)


@triton.jit
def _slot_pair(source_ptr, target_ptr, entry, size, num_slots):
    """Source and target of list entries, and which of them move something."""
    source = tl.load(source_ptr + entry, mask=entry < size, other=-1)
    target = tl.load(target_ptr + entry, mask=entry < size, other=-1)
    moves = (source >= 0) & (source < num_slots) & (target >= 0) & (target < num_slots)
    return source, target, moves & (source != target)


@triton.jit(do_not_specialize=["size", "num_slots"])
def _move_slots_kernel(
    kv_ptr,  # [PLANES, num_slots, ROW]
    source_ptr,  # [size] int64
    target_ptr,  # [size] int64
    size,
    num_slots,
    plane_stride,
    PLANES: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    source, target, moves = _slot_pair(source_ptr, target_ptr, tl.arange(0, BLOCK_M), size, num_slots)
    move_rows(kv_ptr, source, target, moves, tl.program_id(0) * BLOCK_F, PLANES, plane_stride, ROW, BLOCK_F)


@triton.jit(do_not_specialize=["size", "num_slots", "planes"])
def _stage_kernel(
    kv_ptr,  # [planes, num_slots, ROW]
    staging_ptr,  # [planes, size, ROW]
    source_ptr,  # [size] int64
    target_ptr,  # [size] int64
    size,
    num_slots,
    planes,
    plane_stride,
    ROW: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    source, target, moves = _slot_pair(source_ptr, target_ptr, entry, size, num_slots)
    first = tl.program_id(1) * BLOCK_F
    within, exists = feature_offsets(first, planes, plane_stride, ROW, BLOCK_F)
    staged, _ = feature_offsets(first, planes, size.to(tl.int64) * ROW, ROW, BLOCK_F)
    staged += entry.to(tl.int64)[:, None] * ROW
    live = moves[:, None] & exists
    if GATHER:
        values = tl.load(kv_ptr + source[:, None] * ROW + within, mask=live, other=0.0)
        tl.store(staging_ptr + staged, values, mask=live)
    else:
        values = tl.load(staging_ptr + staged, mask=live, other=0.0)
        tl.store(kv_ptr + target[:, None] * ROW + within, values, mask=live)


def align_eviction(evict: torch.Tensor, lengths: torch.Tensor, page_size: int) -> torch.Tensor:
    """See `specdec_kernels.compat.sglang.index.align_eviction`."""
    batch, nodes = evict.shape
    aligned = torch.empty_like(evict)
    config = config_of(evict)
    block_n = lanes(nodes)
    block_b = lanes(batch, max(1, config.evict_block // block_n))
    launch(
        _align_eviction_kernel, (triton.cdiv(batch, block_b),), evict, lengths, aligned, batch,
        num_warps=config.num_warps, NODES=nodes, PAGE_SIZE=page_size, BLOCK_B=block_b, BLOCK_N=block_n,
    )  # fmt: skip
    return aligned


def move_slots(kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `specdec_kernels.compat.sglang.index.move_slots`."""
    layers, _, pages, page_size, heads, dim = kv.shape
    size, planes, row = source.shape[0], layers * 2, heads * dim
    if kv.numel() == 0 or size == 0:
        return
    config = config_of(kv)
    if size > config.move_direct:
        _move_staged(kv, source, target)
        return
    block_m = lanes(size, config.move_direct)
    block_f = lanes(planes * row, max(16, config.move_budget // block_m))
    launch(
        _move_slots_kernel, (triton.cdiv(planes * row, block_f),), kv, source, target, size,
        pages * page_size, pages * page_size * row, num_warps=config.num_warps, PLANES=planes, ROW=row,
        BLOCK_M=block_m, BLOCK_F=block_f,
    )  # fmt: skip


def _move_staged(kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Gather, then scatter, as many layers at once as the staging buffer holds."""
    layers, _, pages, page_size, heads, dim = kv.shape
    size, row, num_slots = source.shape[0], heads * dim, pages * page_size
    at_once = max(1, min(layers, _STAGING_BYTES // (2 * size * row * kv.element_size())))
    staging = torch.empty(at_once * 2 * size * row, dtype=kv.dtype, device=kv.device)
    config = config_of(kv)
    for first in range(0, layers, at_once):
        part = kv[first : first + at_once]
        planes = part.shape[0] * 2
        block_f = lanes(planes * row, 256)
        block_m = lanes(size, max(2, config.move_budget // block_f))
        for gather in (True, False):
            launch(
                _stage_kernel, (triton.cdiv(size, block_m), triton.cdiv(planes * row, block_f)), part, staging,
                source, target, size, num_slots, planes, num_slots * row, num_warps=config.num_warps, ROW=row,
                GATHER=gather, BLOCK_M=block_m, BLOCK_F=block_f,
            )  # fmt: skip
