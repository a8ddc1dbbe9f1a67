"""The end of a projection, its norm, the router's product, the routing and the schedule in one launch, of few rows.

    stream = residual + sum of parts;   logits = router norm(stream);   experts, weights and schedule of the logits

A program takes a tile of experts and a split of the router's inner dimension, as `projection.kernel` does, and loads
its weights before it waits for its predecessor. Every program norms all rows for itself. The program that arrives last
adds the splits in their order and chooses. All sums are those of the separate kernels, bit for bit.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.experts import reference
from specdec_kernels.experts.configs import FEW_ROWS, row_tile_of
from specdec_kernels.experts.kernel_route import (
    Rules,
    empty_routed,
    route_and_schedule,
    rules_of,
    write_choice,
    write_schedule,
)
from specdec_kernels.experts.kernel_schedule import empty_schedule
from specdec_kernels.experts.types import ExpertSchedule, Routed, Router
from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.norm.configs import num_warps
from specdec_kernels.norm.kernel import inverse_rms, normed_by
from specdec_kernels.norm.types import Normed, NormInputs
from specdec_kernels.pdl import launch_dependents, pdl_options, wait_for_predecessor
from specdec_kernels.projection.configs import LinearConfig, linear_config
from specdec_kernels.projection.device import arrived, tickets
from specdec_kernels.projection.kernel import config_of, linear, linear_add_rms_norm, parts_of, takes
from specdec_kernels.projection.types import Product

_MOST_STEPS = 8
_WARPGROUP = 4  # warps that the products of sm90 need
_CHIPS = ("sm90", "interpreter")


@triton.jit
def _stream_at(parts_ptr, residual_ptr, at, here, size, PARTS: tl.constexpr):
    """The residual stream at places `at` of [rows, H]: the sum of parts `size` apart in their order, rounded, and the
    residual. All parts are requested before the first is added."""
    parts = ()
    for part in tl.static_range(PARTS):
        parts += (tl.load(parts_ptr + part * size + at, mask=here, other=0.0),)
    residual = tl.load(residual_ptr + at, mask=here, other=0.0)
    total = parts[0]
    for part in tl.static_range(1, PARTS):
        total += parts[part]
    return (total.to(residual.dtype).to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)


@triton.jit
def _held(weight, PDL: tl.constexpr):
    """The weight in registers: without this the compiler moves it to shared memory where it was requested."""
    if PDL:
        weight = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [weight], weight.dtype, is_pure=False, pack=2)
    return weight


@triton.jit
def _logits(part_ptr, bias_ptr, row, expert, here, rows, SPLITS: tl.constexpr, EXPERTS: tl.constexpr):
    """[T, BLOCK_E] float32: the partial sums in their order and the bias, -inf past the last expert. Read past the
    first-level cache, which does not see what other processors write."""
    at = part_ptr + row[:, None] * EXPERTS + expert[None, :]
    parts = ()
    for split in tl.static_range(SPLITS):
        parts += (tl.load(at + split * rows * EXPERTS, mask=here, other=float("-inf"), cache_modifier=".cg"),)
    total = parts[0]
    for split in tl.static_range(1, SPLITS):
        total += parts[split]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["rows", "scale", "capacity"])
def _norm_route_kernel(
    parts_ptr,  # [PARTS, rows, H] float32
    residual_ptr,  # [rows, H]
    norm_weight_ptr,  # [H]
    router_ptr,  # [EXPERTS, H]
    router_bias_ptr,  # [EXPERTS] or None
    bias_ptr,  # as of `kernel_route`, like the ones below without a comment
    is_real_ptr,
    normed_ptr,  # [rows, H]
    stream_ptr,  # [rows, H]
    part_ptr,  # [splits, rows, EXPERTS] float32
    ticket_ptr,  # [1] int32 zero, left as zero
    experts_ptr,
    weights_ptr,
    order_ptr,
    starts_ptr,
    items_ptr,
    num_items_ptr,
    num_touched_ptr,
    eps,
    rows,
    capacity,
    scale,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    TWO_BEST: tl.constexpr,
    SIGMOID: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,  # of a split
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    WIDE: tl.constexpr,  # logits are float32
    PDL: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    program, programs = split * tl.num_programs(0) + tile, tl.num_programs(0) * SPLITS
    column, lane, k = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    dims = tl.arange(0, BLOCK_H)
    k_first = split * STEPS * BLOCK_K
    k_end = tl.minimum(H, k_first + STEPS * BLOCK_K)
    # Before the wait: weights are constants, which no kernel writes.
    norm_weight = tl.load(norm_weight_ptr + dims, mask=dims < H, other=0.0)
    router, router_norm = (), ()
    for step in tl.static_range(STEPS):
        inner = k_first + step * BLOCK_K + k
        at = router_ptr + column.to(tl.int64)[:, None] * H + inner[None, :]
        router += (tl.load(at, mask=(column < EXPERTS)[:, None] & (inner < k_end)[None, :], other=0.0),)
        router_norm += (tl.load(norm_weight_ptr + inner, mask=inner < k_end, other=0.0),)
    launch_dependents(PDL)
    wait_for_predecessor(PDL)
    size = rows * H
    own, inverse = (), ()
    for number in tl.static_range(BLOCK_T * STEPS):
        row, inner = number // STEPS, k_first + number % STEPS * BLOCK_K + k
        own += (_stream_at(parts_ptr, residual_ptr, row * H + inner, (inner < k_end) & (row < rows), size, PARTS),)
    for row in tl.static_range(BLOCK_T):
        whole = (dims < H) & (row < rows)
        stream = _stream_at(parts_ptr, residual_ptr, row * H + dims, whole, size, PARTS)
        inverse += (inverse_rms(stream, eps, H),)
        if program == row % programs:
            tl.store(stream_ptr + row * H + dims, stream, mask=whole)
            tl.store(normed_ptr + row * H + dims, normed_by(stream, inverse[row], norm_weight), mask=whole)
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in tl.static_range(STEPS):
        normed = tl.zeros([BLOCK_K, ROWS], residual_ptr.dtype.element_ty)
        for row in tl.static_range(BLOCK_T):
            one = normed_by(own[row * STEPS + step], inverse[row], router_norm[step])
            normed = tl.where((lane == row)[None, :], one[:, None], normed)
        acc = tl.dot(_held(router[step], PDL), normed, acc, input_precision="ieee")
    at = part_ptr + (split * rows + lane)[None, :] * EXPERTS + column[:, None]
    tl.store(at, acc, mask=(column < EXPERTS)[:, None] & (lane < rows)[None, :])
    if arrived(ticket_ptr, programs):
        tl.store(ticket_ptr, 0)
        token, expert = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
        there = token < rows
        known = there[:, None] & (expert < EXPERTS)[None, :]
        logit = _logits(part_ptr, router_bias_ptr, token, expert, known, rows, SPLITS, EXPERTS)
        if not WIDE:
            logit = logit.to(residual_ptr.dtype.element_ty)
        real = there
        if is_real_ptr is not None:
            real = tl.load(is_real_ptr + token, mask=there, other=0) != 0
        RULES: tl.constexpr = Rules(
            EXPERTS, TOPK, GROUPS, KEPT_GROUPS, TWO_BEST, SIGMOID, OF_CHOSEN, RENORMALISE, BLOCK_G
        )
        rank, chosen = write_choice(experts_ptr, weights_ptr, logit, bias_ptr, real, token, there, scale, RULES)
        write_schedule(
            order_ptr, starts_ptr, items_ptr, num_items_ptr, num_touched_ptr, chosen & real[:, None], rank, token,
            there & (real == 0), capacity, EXPERTS, TOPK,
        )  # fmt: skip


def _config(product: Product, router: Router) -> LinearConfig | None:
    """Of the router's product, if the kernel takes all that belongs to it."""
    chip, rows = current_chip(product.x), product.rows
    if chip not in _CHIPS or not 0 < rows <= FEW_ROWS or not takes(product):
        return None
    experts, hidden = router.weight.shape
    config = linear_config(chip, experts, hidden, rows, product.x.element_size())
    steps = -(-config.split_length(hidden) // config.block_k)
    # With fewer warps than a warp group sums have other bits.
    fits = num_warps(chip, lanes(hidden)) >= _WARPGROUP and product.x.element_size() == 2
    return config if steps <= _MOST_STEPS and (fits or chip == "interpreter") else None


def linear_add_rms_norm_route(
    product: Product, end: NormInputs, router: Router
) -> tuple[Normed, Routed, ExpertSchedule]:
    if product.x.dtype == torch.float64:
        return reference.linear_add_rms_norm_route(product, end, router)
    config = _config(product, router)
    if config is None:
        normed = linear_add_rms_norm(product, end)
        logits = linear(Product(normed.normed, router.weight, product.batch_invariant), router.bias, router.out_dtype)
        return normed, *route_and_schedule(logits, router.routing, router.correction_bias, router.is_real)
    return _fused(parts_of(product, config_of(product)), end, router, config)


def _fused(
    parts: Tensor, end: NormInputs, router: Router, config: LinearConfig
) -> tuple[Normed, Routed, ExpertSchedule]:
    (rows, hidden), (experts, _), chip = end.residual.shape, router.weight.shape, current_chip(parts)
    out = Normed(torch.empty_like(end.residual), torch.empty_like(end.residual))
    routed = empty_routed(end.residual, router.routing)
    schedule = empty_schedule(routed.experts, experts, row_tile_of(routed.experts, experts))
    sums = parts.new_empty(config.splits, rows, experts)
    launch(
        _norm_route_kernel,
        (triton.cdiv(experts, config.columns), config.splits),
        *(parts, end.residual, end.weight, router.weight, router.bias, router.correction_bias, router.is_real),
        *(*out, sums, tickets(parts.device, 1), *routed, *schedule[:-1]),
        *(float(end.eps), rows, schedule.items.shape[0], float(router.routing.scale)),
        num_warps=num_warps(chip, lanes(hidden)),
        **rules_of(router.routing, experts),
        H=hidden,
        PARTS=parts.shape[0],
        SPLITS=config.splits,
        STEPS=triton.cdiv(config.split_length(hidden), config.block_k),
        COLUMNS=config.columns,
        BLOCK_K=config.block_k,
        ROWS=config.rows,
        BLOCK_T=1 if rows == 1 else lanes(rows),
        BLOCK_E=lanes(experts),
        BLOCK_H=lanes(hidden),
        WIDE=router.out_dtype == torch.float32,
        **pdl_options(chip),
    )
    return out, routed, schedule
