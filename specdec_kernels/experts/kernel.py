"""Both products of the chosen experts, and the weighted sum of their outputs.

    hidden[place] = act(gate_e x[row], up_e x[row])     place in the order of the schedule, row = order[place] / K
    part[order[place]] = down_e hidden[place]           float32
    y[row] = sum over slots of w[row, slot] part[row, slot]

A program takes an item, a tile of rows of one expert, and a tile of columns: rows of the expert's weight are the M side
of the tensor core, the rows of the item its N side. The grid covers the most items that there can be; programs of items
that there are not end at once. Items of one expert follow each other, so the second finds the weight in the cache.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.activation.kernel import gated
from specdec_kernels.experts import configs
from specdec_kernels.experts.configs import ROUTE, product_config, scaled_product_config
from specdec_kernels.experts.kernel_hopper import launch_ring, takes
from specdec_kernels.experts.kernel_mxfp4 import mxfp4_partial_sum
from specdec_kernels.experts.types import Activation, ExpertCall, ExpertSchedule, Matrices, Mxfp4
from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.norm.configs import num_warps
from specdec_kernels.norm.kernel import normed_row
from specdec_kernels.norm.types import Normed, NormInputs
from specdec_kernels.pdl import begin, launch_dependents, wait_for_predecessor
from specdec_kernels.projection.kernel import Operands, Tile, partial_sum, weight_rows
from specdec_kernels.projection.kernel_scaled import numbers_of, scaled_sum, scales_of, scaling_of
from specdec_kernels.projection.types import ScaledWeight

_NO_ROW = tl.constexpr(1 << 30)  # rows from here on count as zeros


@triton.jit
def _activated(gate, up, limit, alpha, DTYPE: tl.constexpr, CLAMPED: tl.constexpr):
    """Of float32 tiles that hold numbers of DTYPE."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        out = (gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)).to(DTYPE)
    else:
        out = gated(gate, up, DTYPE)
    return out


@triton.jit
def _store_hidden(
    hidden_ptr, acc, place, here, tile, limit, alpha, WIDTH, HALF: tl.constexpr, ROWS: tl.constexpr,
    CLAMPED: tl.constexpr,
):  # fmt: skip
    """The activation of a tile whose first half are gates, at the places of the schedule."""
    DTYPE: tl.constexpr = hidden_ptr.dtype.element_ty
    narrow = acc.to(DTYPE).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(narrow, (2, HALF, ROWS)), (1, 2, 0)))
    column = tile * HALF + tl.arange(0, HALF)
    at = hidden_ptr + place.to(tl.int64)[None, :] * WIDTH + column[:, None]
    out = _activated(gate, up, limit, alpha, DTYPE, CLAMPED)
    tl.store(at, out, mask=(column < WIDTH)[:, None] & here[None, :])


@triton.jit
def _sum(of, own, weight_stride, scale_stride, tile, OUTER, k_first, k_end, TILE: tl.constexpr, SCALING: tl.constexpr,
         GATED: tl.constexpr):  # fmt: skip
    """The sum over k_first to k_end; `own` are the scales of the expert, if there are any."""
    if SCALING is not None:
        scales = scales_of(own, own, of.weight_row, tile, OUTER, scale_stride, SCALING, TILE.COLUMNS, GATED)
        acc = scaled_sum(of, scales, k_first, k_end, TILE, SCALING)
    elif own is not None:
        acc = mxfp4_partial_sum(of, own, weight_stride, scale_stride, k_first, k_end, TILE)
    else:
        acc = partial_sum(of, k_first, k_end, TILE)
    return acc


@triton.jit(do_not_specialize=["topk", "limit", "alpha"])
def _product_kernel(
    x_ptr,  # [T, K] if GATED, else [T * topk, K] in the order of the schedule
    weight_ptr,  # [E, OUTER, K], codes with scales in float32; [E, OUTER, weight_stride] uint8, the codes of MXFP4
    scale_ptr,  # [E, OUTER, scale_stride] uint8 of MXFP4; [E, ceil(OUTER / GROUP_ROWS), scale_stride] float32; or None
    bias_ptr,  # [E, OUTER], or None
    out_ptr,  # [T * topk, OUTER / 2] in the order of the schedule if GATED, else [T * topk, OUTER] float32
    schedule,  # ExpertSchedule without its row tile
    topk,
    OUTER,
    K,
    weight_stride,
    scale_stride,
    split_length,
    limit,
    alpha,
    TILE: tl.constexpr,  # Tile
    SCALING: tl.constexpr,  # Scaling, or None
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    IN_ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    item, tile = tl.program_id(0), tl.program_id(1)
    COLUMNS: tl.constexpr = TILE.COLUMNS
    weight_row = weight_rows(tile, OUTER, COLUMNS, GATED)
    wait_for_predecessor(PDL)
    if item < tl.load(schedule.num_items):
        entry = schedule.items + item * 3
        expert = tl.load(entry).to(tl.int64)
        place = tl.load(entry + 1) + tl.arange(0, TILE.ROWS)
        here = place < tl.load(entry + 2)
        assignment = tl.load(schedule.order + place, mask=here, other=0)
        row = tl.where(here, assignment // topk if GATED else place, _NO_ROW)
        of = Operands(x_ptr, weight_ptr + expert * OUTER * weight_stride, weight_row, row, _NO_ROW, K)
        own = scale_ptr
        if SCALING is not None:
            own += expert * tl.cdiv(OUTER, SCALING.GROUP_ROWS) * scale_stride
        elif scale_ptr is not None:
            own += expert * OUTER * scale_stride
        k_end = tl.minimum(K, split_length)
        acc = _sum(of, own, weight_stride, scale_stride, tile, OUTER, 0, k_end, TILE, SCALING, GATED)
        if IN_ORDER:
            for k_first in tl.range(split_length, K, split_length):
                k_end = tl.minimum(K, k_first + split_length)
                acc += _sum(of, own, weight_stride, scale_stride, tile, OUTER, k_first, k_end, TILE, SCALING, GATED)
        launch_dependents(PDL)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + expert * OUTER + weight_row).to(tl.float32)[:, None]
        if GATED:
            _store_hidden(out_ptr, acc, place, here, tile, limit, alpha, OUTER // 2, COLUMNS // 2, TILE.ROWS, CLAMPED)
        else:
            column = tile * COLUMNS + tl.arange(0, COLUMNS)
            at = out_ptr + assignment.to(tl.int64)[None, :] * OUTER + column[:, None]
            tl.store(at, acc, mask=(column < OUTER)[:, None] & here[None, :])


@triton.jit
def _combine_kernel(
    parts_ptr,  # [rows, TOPK, H] float32; entries without an expert hold anything
    experts_ptr,  # [rows, TOPK] int32
    weights_ptr,  # [rows, TOPK] float32
    shared_ptr,  # [rows, H], or None
    out_ptr,  # [rows, H], normed if there is a residual
    residual_ptr,  # [rows, H], or None like the two below: no norm
    norm_weight_ptr,  # [H]
    sum_ptr,  # [rows, H]
    eps,
    H: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    # Before the wait: the second product, which precedes, has waited for all kernels before it.
    slot_experts, slot_weights = (), ()
    for slot in tl.static_range(TOPK):
        slot_experts += (tl.load(experts_ptr + row * TOPK + slot),)
        slot_weights += (tl.load(weights_ptr + row * TOPK + slot),)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * H + column, mask=inside, other=0.0)
        norm_weight = tl.load(norm_weight_ptr + column, mask=inside, other=0.0)
    begin(PDL)
    # All requested before the first is added, those without expert too: a condition would make each wait for another.
    parts = ()
    for slot in tl.static_range(TOPK):
        parts += (tl.load(parts_ptr + (row * TOPK + slot) * H + column, mask=inside, other=0.0),)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOPK):
        there = (slot_experts[slot] >= 0) & (slot_experts[slot] < EXPERTS)
        total += slot_weights[slot] * tl.where(there, parts[slot], 0.0)
    if shared_ptr is not None:
        total += tl.load(shared_ptr + row * H + column, mask=inside, other=0.0).to(tl.float32)
    out = total.to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        out = (out.to(tl.float32) + residual.to(tl.float32)).to(out.dtype)
        tl.store(sum_ptr + row * H + column, out, mask=inside)
        out = normed_row(out, norm_weight, eps, H)
    tl.store(out_ptr + row * H + column, out, mask=inside)


def expert_mlp(call: ExpertCall) -> Tensor:
    out, columns = torch.empty_like(call.x), ROUTE[current_chip(call.x)].columns
    _launch(call, lanes(call.x.shape[1], columns), 4, out, None, None, None, 0.0)
    return out


def expert_mlp_add_rms_norm(call: ExpertCall, end: NormInputs) -> Normed:
    out, block = Normed(torch.empty_like(call.x), torch.empty_like(call.x)), lanes(call.x.shape[1])
    warps = num_warps(current_chip(call.x), block)
    _launch(call, block, warps, out.normed, end.residual, end.weight, out.residual, float(end.eps))
    return out


def _launch(call: ExpertCall, block: int, warps: int, *end: Tensor | float | None) -> None:
    """Both products, and their combination in blocks of columns, to the results that `end` begins with."""
    x, routed, schedule, weights, activation, shared = call
    (rows, topk), hidden = routed.experts.shape, x.shape[1]
    inner = x.new_empty(rows * topk, weights.down.shape[2])
    parts = torch.empty((rows, topk, hidden), dtype=torch.float32, device=x.device)
    _launch_product(x, weights.gate_up, weights.gate_up_bias, inner, schedule, topk, activation)
    _launch_product(inner, weights.down, weights.down_bias, parts, schedule, topk, None)
    launch(
        _combine_kernel,
        (rows, triton.cdiv(hidden, block)),
        *(parts, *routed, shared, *end),
        num_warps=warps,
        H=hidden,
        EXPERTS=schedule.num_experts,
        TOPK=topk,
        BLOCK=block,
    )


def _launch_product(
    x: Tensor,
    weight: Matrices,
    bias: Tensor | None,
    out: Tensor,
    schedule: ExpertSchedule,
    topk: int,
    activation: Activation | None,
) -> None:
    """The first product with its activation, or the second without."""
    (_, outer, inner), chip = weight.shape, current_chip(x)
    limit, alpha = activation or Activation()
    ring = configs.RING.get(schedule.row_tile)
    if ring and bias is None and limit is None and takes(x, weight, ring):
        launch_ring(x, weight, out, schedule, topk, ring, activation is not None)
        return
    is_gated, sizes = activation is not None, (chip, inner, schedule.row_tile, x.element_size())
    scaling, config = None, product_config(*sizes, isinstance(weight, Mxfp4))
    if isinstance(weight, ScaledWeight):
        config = scaled_product_config(*sizes, weight.float8_x)
        scaling = scaling_of(weight, chip, config.columns // 2, is_gated)
        values, scales = numbers_of(weight, chip), weight.scales
    else:
        values, scales = weight if isinstance(weight, Mxfp4) else (weight, None)
    scale_stride = 0 if scales is None else scales.shape[2]
    columns, width = (config.columns // 2, outer // 2) if is_gated else (config.columns, outer)
    split, step = min(inner, config.split), config.block_k
    launch(
        _product_kernel,
        (schedule.items.shape[0], triton.cdiv(width, columns)),
        *(x, values, scales, bias, out, schedule._replace(row_tile=None)),
        *(topk, outer, inner, values.shape[2], scale_stride, split, limit or 0.0, alpha),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        TILE=Tile(schedule.row_tile, config.columns, step, inner % step == split % step == 0),
        SCALING=scaling,
        GATED=is_gated,
        CLAMPED=limit is not None,
        IN_ORDER=split < inner,
    )
