"""Locations and moves of accepted paths on the device.

A move reads all its sources for a slice of the features before it writes any of them; since source and target
may be the same slot for different lanes, a barrier stands between. Different programs own different features
(and, of different requests, different pages), so no program reads what another writes. A list of slots too
long for one program is gathered into a staging buffer and scattered by a second launch.
"""

# mypy: ignore-errors
# Device code: parameters are pointers and constexprs that Python's types do not describe.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.kv_index.configs import config_of, lanes
from specdec_kernels.kv_index.page_kernel import page_slot
from specdec_kernels.kv_index.types import PathLocations
from specdec_kernels.launch import launch

_STAGING_BYTES = 64 << 20


@triton.jit
def _floor_to(position, PAGE_SIZE: tl.constexpr):
    """Start of the page of a position, for positions of -PAGE_SIZE and above."""
    return (position + PAGE_SIZE) // PAGE_SIZE * PAGE_SIZE - PAGE_SIZE


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
    first = _floor_to(length + wanted - 1, PAGE_SIZE) - length
    on_page = (node >= first) & (node < first + PAGE_SIZE)
    tl.store(out_ptr + request * NODES + node, (evict != 0) & (on_page == 0), mask=live)


@triton.jit(do_not_specialize=["batch"])
def _accepted_locations_kernel(
    slots_ptr,  # [B, NODES] int64
    lengths_ptr,  # [B] int
    nodes_ptr,  # [B, PATH] int32
    source_ptr,  # [B, PATH] int64
    target_ptr,  # [B, PATH] int64
    freed_ptr,  # [B, NODES] int64
    num_freed_ptr,  # [B] int32
    batch,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    request = (tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B))[:, None]
    step = tl.arange(0, BLOCK_S)[None, :]
    in_path = (request < batch) & (step < PATH)
    node = tl.load(nodes_ptr + request * PATH + step, mask=in_path, other=-1)
    on_path = (node >= 0) & (node < NODES)
    source = tl.load(slots_ptr + request * NODES + node, mask=on_path, other=-1)
    # A path may be given with more steps than there are nodes; its last steps then have no slot of their own.
    place = tl.minimum(step, NODES - 1)
    target = tl.load(slots_ptr + request * NODES + place, mask=on_path, other=-1)
    tl.store(source_ptr + request * PATH + step, source, mask=in_path)
    tl.store(target_ptr + request * PATH + step, target, mask=in_path)

    kept = tl.sum(on_path.to(tl.int32), 1)[:, None]
    length = tl.load(lengths_ptr + request, mask=request < batch, other=0).to(tl.int64)
    held = _floor_to(length + kept + PAGE_SIZE - 1, PAGE_SIZE)
    num_freed = length + NODES - tl.minimum(held, length + NODES)
    tl.store(num_freed_ptr + request, num_freed.to(tl.int32), mask=request < batch)
    column = tl.arange(0, BLOCK_N)[None, :]
    in_row = (request < batch) & (column < NODES)
    freed_place = request * NODES + NODES - num_freed + column
    freed = tl.load(slots_ptr + freed_place, mask=in_row & (column < num_freed), other=-1)
    tl.store(freed_ptr + request * NODES + column, freed, mask=in_row)


@triton.jit
def _feature_offsets(first, planes, plane_stride, ROW: tl.constexpr, BLOCK_F: tl.constexpr):
    """Offsets of a slice of the features within the pool, relative to a slot's row, and which exist."""
    feature = first + tl.arange(0, BLOCK_F)
    within = (feature // ROW).to(tl.int64) * plane_stride + feature % ROW
    return within[None, :], (feature < planes * ROW)[None, :]


@triton.jit(do_not_specialize=["batch"])
def _move_kernel(
    kv_ptr,  # [PLANES, pages * PAGE_SIZE, ROW]: a plane is (layer, key or value), a row all heads
    table_ptr,  # [B, ROW_PAGES] int32
    lengths_ptr,  # [B] int64
    nodes_ptr,  # [B, PATH] int32
    batch,
    plane_stride,
    PATH: tl.constexpr,
    PLANES: tl.constexpr,
    ROW: tl.constexpr,
    ROW_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    entry = tl.arange(0, BLOCK_B * BLOCK_J)
    request, step = tl.program_id(0) * BLOCK_B + entry // BLOCK_J, entry % BLOCK_J
    on_path = (request < batch) & (step < PATH)
    node = tl.load(nodes_ptr + request.to(tl.int64) * PATH + step, mask=on_path, other=-1)
    length = tl.load(lengths_ptr + request, mask=on_path, other=0)
    moves = on_path & (node >= 0) & (node != step)
    source = page_slot(table_ptr, request, length + node, moves, ROW_PAGES, PAGE_SIZE)
    target = page_slot(table_ptr, request, length + step, moves, ROW_PAGES, PAGE_SIZE)
    moves = moves & (source >= 0) & (target >= 0)

    within, exists = _feature_offsets(tl.program_id(1) * BLOCK_F, PLANES, plane_stride, ROW, BLOCK_F)
    live = moves[:, None] & exists
    values = tl.load(kv_ptr + source[:, None] * ROW + within, mask=live, other=0.0)
    tl.debug_barrier()
    tl.store(kv_ptr + target[:, None] * ROW + within, values, mask=live)


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
    within, exists = _feature_offsets(tl.program_id(0) * BLOCK_F, PLANES, plane_stride, ROW, BLOCK_F)
    live = moves[:, None] & exists
    values = tl.load(kv_ptr + source[:, None] * ROW + within, mask=live, other=0.0)
    tl.debug_barrier()
    tl.store(kv_ptr + target[:, None] * ROW + within, values, mask=live)


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
    within, exists = _feature_offsets(first, planes, plane_stride, ROW, BLOCK_F)
    staged, _ = _feature_offsets(first, planes, size.to(tl.int64) * ROW, ROW, BLOCK_F)
    staged += entry.to(tl.int64)[:, None] * ROW
    live = moves[:, None] & exists
    if GATHER:
        values = tl.load(kv_ptr + source[:, None] * ROW + within, mask=live, other=0.0)
        tl.store(staging_ptr + staged, values, mask=live)
    else:
        values = tl.load(staging_ptr + staged, mask=live, other=0.0)
        tl.store(kv_ptr + target[:, None] * ROW + within, values, mask=live)


def align_eviction(evict: torch.Tensor, lengths: torch.Tensor, page_size: int) -> torch.Tensor:
    """See `specdec_kernels.kv_index.align_eviction`."""
    batch, nodes = evict.shape
    aligned = torch.empty_like(evict)
    config = config_of(evict)
    block_n = lanes(nodes, 1 << 30)
    block_b = lanes(batch, max(1, config.row_block // block_n))
    launch(
        _align_eviction_kernel, (triton.cdiv(batch, block_b),), evict, lengths, aligned, batch,
        num_warps=config.num_warps, NODES=nodes, PAGE_SIZE=page_size, BLOCK_B=block_b, BLOCK_N=block_n,
    )  # fmt: skip
    return aligned


def accepted_locations(
    slots: torch.Tensor, lengths: torch.Tensor, nodes: torch.Tensor, page_size: int
) -> PathLocations:
    """See `specdec_kernels.kv_index.accepted_locations`."""
    batch, num_nodes = slots.shape
    path = nodes.shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=slots.device)

    found = PathLocations(
        empty(batch, path), empty(batch, path), empty(batch, num_nodes), empty(batch, dtype=torch.int32)
    )
    config = config_of(slots)
    block_n, block_s = lanes(num_nodes, 1 << 30), lanes(path, 1 << 30)
    block_b = lanes(batch, max(1, config.row_block // max(block_n, block_s)))
    launch(
        _accepted_locations_kernel, (triton.cdiv(batch, block_b),), slots, lengths, nodes, *found, batch,
        num_warps=config.num_warps, NODES=num_nodes, PATH=path, PAGE_SIZE=page_size, BLOCK_B=block_b,
        BLOCK_N=block_n, BLOCK_S=block_s,
    )  # fmt: skip
    return found


def move_accepted(kv: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor, nodes: torch.Tensor) -> None:
    """See `specdec_kernels.kv_index.move_accepted`."""
    layers, _, pages, page_size, heads, dim = kv.shape
    batch, path = nodes.shape
    planes, row = layers * 2, heads * dim
    if kv.numel() == 0 or nodes.numel() == 0:
        return
    config = config_of(kv)
    block_j = lanes(path, 1 << 30)
    block_b = min(triton.next_power_of_2(batch), config.move_requests)
    block_f = lanes(planes * row, max(16, config.move_budget // (block_b * block_j)))
    launch(
        _move_kernel, (triton.cdiv(batch, block_b), triton.cdiv(planes * row, block_f)), kv, page_table,
        lengths, nodes, batch, pages * page_size * row, num_warps=config.num_warps, PATH=path, PLANES=planes,
        ROW=row, ROW_PAGES=page_table.shape[1], PAGE_SIZE=page_size, BLOCK_B=block_b, BLOCK_J=block_j,
        BLOCK_F=block_f,
    )  # fmt: skip


def move_slots(kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `specdec_kernels.kv_index.move_slots`."""
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
