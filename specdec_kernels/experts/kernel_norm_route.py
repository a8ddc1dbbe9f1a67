"""The end of a projection, its norm and the router's product, then the routing, which adds the router's splits.

    stream = residual + sum of parts;   logits = router norm(stream)

Of few rows norm and product are one launch: a program takes a tile of experts and a split of the router's inner
dimension, as `projection.kernel` does, loads its weights before it waits for its predecessor, and norms all rows for
itself. All sums are those of the separate kernels, bit for bit.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.experts import reference
from specdec_kernels.experts.configs import FEW_ROWS
from specdec_kernels.experts.kernel_route import Logits, routed_and_scheduled
from specdec_kernels.experts.types import ExpertSchedule, Routed, Router
from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.norm.configs import num_warps
from specdec_kernels.norm.kernel import inverse_rms, normed_by
from specdec_kernels.norm.types import Normed, NormInputs
from specdec_kernels.pdl import launch_dependents, pdl_options, wait_for_predecessor
from specdec_kernels.projection.configs import LinearConfig
from specdec_kernels.projection.kernel import config_of, launch_linear, linear, linear_add_rms_norm, takes
from specdec_kernels.projection.types import Product

_MOST_STEPS = 8
TRY_HELD, TRY_PARTS = True, True
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
def _held(weight, HELD: tl.constexpr):
    """The weight in registers: without this the compiler moves it to shared memory where it was requested."""
    if HELD:
        weight = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [weight], weight.dtype, is_pure=False, pack=2)
    return weight


@triton.jit(do_not_specialize=["rows"])
def _norm_router_kernel(
    parts_ptr,  # [PARTS, rows, H] float32
    residual_ptr,  # [rows, H]
    norm_weight_ptr,  # [H]
    router_ptr,  # [EXPERTS, H]
    normed_ptr,  # [rows, H]
    stream_ptr,  # [rows, H]
    logits_ptr,  # [SPLITS, rows, EXPERTS] float32
    eps,
    rows,
    EXPERTS: tl.constexpr,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,  # of a split
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HELD: tl.constexpr,
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
        acc = tl.dot(_held(router[step], HELD), normed, acc, input_precision="ieee")
    at = logits_ptr + (split * rows + lane)[None, :] * EXPERTS + column[:, None]
    tl.store(at, acc, mask=(column < EXPERTS)[:, None] & (lane < rows)[None, :])


def _fuses(product: Product, router: Product, config: LinearConfig) -> bool:
    """Whether the norm of `product` and the router's product with this config are one launch."""
    chip, rows = current_chip(product.x), product.rows
    if chip not in _CHIPS or not 0 < rows <= FEW_ROWS or not takes(product):
        return False
    hidden = router.plain.shape[1]
    # With fewer warps than a warp group sums have other bits.
    fits = num_warps(chip, lanes(hidden)) >= _WARPGROUP and product.x.element_size() == 2
    return -(-config.split_length(hidden) // config.block_k) <= _MOST_STEPS and (fits or chip == "interpreter")


def linear_add_rms_norm_route(
    product: Product, end: NormInputs, router: Router
) -> tuple[Normed, Routed, ExpertSchedule]:
    if product.x.dtype == torch.float64:
        return reference.linear_add_rms_norm_route(product, end, router)
    normed, logits = _normed_and_logits(product, end, router)
    return normed, *routed_and_scheduled(logits, router.routing, router.correction_bias, router.is_real)


def _normed_and_logits(product: Product, end: NormInputs, router: Router) -> tuple[Normed, Logits]:
    (experts, _), rows = router.weight.shape, product.rows
    second = Product(end.residual, router.weight, product.batch_invariant)
    config = config_of(second)
    sums = product.x.new_empty(config.splits, rows, experts, dtype=torch.float32)
    logits = Logits(sums, router.bias, router.out_dtype or product.x.dtype)
    if _fuses(product, second, config):
        ending = config_of(product)
        parts = torch.empty((ending.splits, *end.residual.shape), dtype=torch.float32, device=product.x.device)
        launch_linear(product, None, parts, False, ending)
        return _norm_and_router(parts, end, router.weight, sums, config), logits
    normed = linear_add_rms_norm(product, end)
    second = second._replace(x=normed.normed)
    if not TRY_PARTS or not takes(second) or config.splits == 1 or config.in_order:
        return normed, Logits(linear(second, router.bias, router.out_dtype))
    launch_linear(second, None, sums, False, config)
    return normed, logits


def _norm_and_router(parts: Tensor, end: NormInputs, weight: Tensor, sums: Tensor, config: LinearConfig) -> Normed:
    """The norm of the sum of `parts`; the router's partial sums are written to `sums`."""
    (rows, hidden), experts, chip = end.residual.shape, weight.shape[0], current_chip(parts)
    out = Normed(torch.empty_like(end.residual), torch.empty_like(end.residual))
    launch(
        _norm_router_kernel,
        (triton.cdiv(experts, config.columns), config.splits),
        *(parts, end.residual, end.weight, weight, out.normed, out.residual, sums, float(end.eps), rows),
        num_warps=num_warps(chip, lanes(hidden)),
        EXPERTS=experts,
        H=hidden,
        PARTS=parts.shape[0],
        SPLITS=config.splits,
        STEPS=triton.cdiv(config.split_length(hidden), config.block_k),
        COLUMNS=config.columns,
        BLOCK_K=config.block_k,
        ROWS=config.rows,
        BLOCK_T=1 if rows == 1 else lanes(rows),
        BLOCK_H=lanes(hidden),
        HELD=TRY_HELD and chip == "sm90",
        **pdl_options(chip),
    )
    return out
