"""Products of few rows in Triton: every program reads its part of the weight once.

    acc[column, row] = sum_k weight[column, k] x[row, k]

A program takes a tile of columns of the result, which are rows of the weight and the M side of the tensor core, and all
rows of x as its N side. Where the column tiles do not fill the chip, the inner dimension is split, and each program of
a tile writes its partial sum in float32. Partial sums are added in the order of the inner dimension:

- `linear_add_rms_norm` leaves them to the norm, which reads them all anyway.
- Of more rows than one program has, a program takes all splits of its tile, one after the other.
- Elsewhere the program that arrives last adds them. It is found by a ticket a tile: a counter that each program raises
  after its partial sum is written (release) and whose value shows the last one that all others are (acquire). The last
  program sets it back to 0 for the next launch.

Register-resident weights: a program may load the last part of its weights before it waits for its predecessor, so that
the memory is busy while that kernel ends. Weights are constants, which no kernel writes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.activation import kernel as activation
from specdec_kernels.all_reduce import kernel as all_reduce
from specdec_kernels.all_reduce.types import Exchange
from specdec_kernels.launch import current_chip, launch
from specdec_kernels.norm import kernel as norm
from specdec_kernels.norm.types import Normed, NormInputs
from specdec_kernels.pdl import launch_dependents, wait_for_predecessor
from specdec_kernels.projection import kernel_hopper, kernel_scaled, reference
from specdec_kernels.projection.configs import MAX_KERNEL_ROWS, LinearConfig, linear_config, scaled_config
from specdec_kernels.projection.device import Operands, Tile, finish, weight_at, weight_rows, work_of, x_at
from specdec_kernels.projection.kernel_library import has_the_bits, products_of_splits
from specdec_kernels.projection.types import Product, ScaledWeight


@triton.jit
def _with_resident_weight(acc, resident, of, k_first, RESIDENT: tl.constexpr):
    """`acc` and the sum over the inner elements of `resident`, from k_first on."""
    x = tl.load(x_at(of, k_first, tl.arange(0, RESIDENT)), mask=(of.row < of.rows)[None, :], other=0.0)
    # Without this the compiler moves the weight to shared memory where it was requested, and waits for it there.
    resident = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [resident], resident.dtype, is_pure=False, pack=2)
    return tl.dot(resident, x, acc, input_precision="ieee")


@triton.jit
def partial_sum(of, k_first, k_end, TILE: tl.constexpr):
    """[COLUMNS, ROWS] float32: the sum over k_first to k_end."""
    lane = tl.arange(0, TILE.BLOCK_K)
    weight_ptr = weight_at(of, k_first, lane)
    x_ptr = x_at(of, k_first, lane)
    here = (of.row < of.rows)[None, :]
    acc = tl.full([TILE.COLUMNS, TILE.ROWS], 0.0, tl.float32)
    for first in tl.range(k_first, k_end, TILE.BLOCK_K):
        if TILE.EVEN_K:
            weight = tl.load(weight_ptr, eviction_policy="evict_first")
            x = tl.load(x_ptr, mask=here, other=0.0)
        else:
            inside = first + lane < k_end
            weight = tl.load(weight_ptr, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr, mask=inside[:, None] & here, other=0.0)
        acc = tl.dot(weight, x, acc, input_precision="ieee")
        weight_ptr += TILE.BLOCK_K
        x_ptr += TILE.BLOCK_K
    return acc


@triton.jit
def with_later_splits(acc, of, splits, split_length, TILE: tl.constexpr):
    """`acc`, the sum of the first split, with the sums of the others in their order."""
    for later in tl.range(1, splits):
        k_first = later * split_length
        acc += partial_sum(of, k_first, tl.minimum(of.K, k_first + split_length), TILE)
    return acc


@triton.jit(do_not_specialize=["rows", "splits"])
def _linear_kernel(
    x_ptr,  # [rows, K]
    weight_ptr,  # [OUTER, K]
    results,  # Results, written
    rows,
    OUTER,
    K,
    splits,
    split_length,
    TILE: tl.constexpr,  # Tile
    GATED: tl.constexpr,
    IN_ORDER: tl.constexpr,
    RESIDENT: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * TILE.ROWS + tl.arange(0, TILE.ROWS)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    weight_row = weight_rows(tile, OUTER, TILE.COLUMNS, GATED)
    of = Operands(x_ptr, weight_ptr, weight_row, row, rows, K)
    k_first = split * split_length
    k_end = tl.minimum(K, k_first + split_length)
    if RESIDENT > 0:
        k_end -= RESIDENT
        # Loaded before the wait: weights are constants, which no kernel writes.
        resident = tl.load(weight_at(of, k_end, tl.arange(0, RESIDENT)), eviction_policy="evict_first")
        launch_dependents(PDL)
    wait_for_predecessor(PDL)
    acc = partial_sum(of, k_first, k_end, TILE)
    if RESIDENT > 0:
        acc = _with_resident_weight(acc, resident, of, k_end, RESIDENT)
    if IN_ORDER:
        acc = with_later_splits(acc, of, splits, split_length, TILE)
    if RESIDENT == 0:
        launch_dependents(PDL)
    finish(results, acc, of, tile, split, splits, OUTER, TILE, GATED)


def takes(product: Product) -> bool:
    """Whether the kernel computes it, and not torch."""
    if product.rows <= MAX_KERNEL_ROWS or product.batch_invariant:
        return True
    return isinstance(product.weight, ScaledWeight) and not kernel_scaled.torch_takes(product)


def _by_torch(product: Product, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """A product that the kernel does not take."""
    if isinstance(product.weight, ScaledWeight):
        return kernel_scaled.by_torch(product, bias, out_dtype)
    return reference.linear(product, bias, out_dtype)


def linear(product: Product, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    if not takes(product):
        return _by_torch(product, bias, out_dtype)
    x, config = product.x, config_of(product)
    if bias is None and out_dtype in (None, x.dtype) and _library_takes(product, config):
        return _added(products_of_splits(x, product.plain, config), x.dtype, config)
    out = x.new_empty(product.shape, dtype=out_dtype or x.dtype)
    launch_linear(product, bias, out, False, config)
    return out


def linear_silu_mul(product: Product) -> Tensor:
    x = product.x
    if not takes(product):
        return activation.silu_mul(_by_torch(product))
    config = config_of(product)
    if _library_takes(product, config):
        return activation.silu_mul(_added(products_of_splits(x, product.plain, config), x.dtype, config))
    out = x.new_empty(*x.shape[:-1], product.weight.shape[0] // 2)
    launch_linear(product, None, out, True, config)
    return out


def linear_add_rms_norm(product: Product, end: NormInputs) -> Normed:
    config = config_of(product)
    if not takes(product) or config.splits == 1:
        return norm.add_rms_norm(linear(product), end)
    if _library_takes(product, config):
        parts = products_of_splits(product.x, product.plain, config)
    elif config.in_order:
        return norm.add_rms_norm(linear(product), end)
    else:
        parts = _parts(product, config)
    return norm.add_rms_norm_of_parts(parts, end)


def linear_all_reduce_add_rms_norm(product: Product, exchange: Exchange, slot: int, end: NormInputs) -> Normed:
    if takes(product):
        parts = _parts(product, config_of(product))
    else:
        parts = reference.linear(product).float()[None]
    return all_reduce.all_reduce_add_rms_norm(parts, exchange, slot, end)


def _parts(product: Product, config: LinearConfig) -> Tensor:
    """[splits, ..., N] float32: the partial sums, or one sum where a program adds all splits."""
    splits = 1 if config.in_order else config.splits
    parts = torch.empty((splits, *product.shape), dtype=torch.float32, device=product.x.device)
    launch_linear(product, None, parts, False, config)
    return parts


def _library_takes(product: Product, config: LinearConfig) -> bool:
    """Whether the library computes the product, because it has the bits of the kernel and is the faster one."""

    def by_kernel(sample: Tensor) -> Tensor:
        alike, split = product._replace(x=sample), replace(config, in_order=False)
        if config.splits > 1:
            return _parts(alike, split)
        out = sample.new_empty(product.shape)
        launch_linear(alike, None, out, False, split)
        return out

    return not isinstance(product.weight, ScaledWeight) and has_the_bits(product.x, product.weight, config, by_kernel)


def _added(product: Tensor, dtype: torch.dtype, config: LinearConfig) -> Tensor:
    """The result of `products_of_splits`: of several splits their sum in order, rounded once."""
    if config.splits == 1:
        return product
    total = product[0]
    for part in product[1:]:
        total += part
    return total.to(dtype)


def config_of(product: Product) -> LinearConfig:
    """The table's row for this product."""
    x, outer, inner = product.x, *product.weight.shape
    call = (current_chip(x), outer, inner, product.rows, x.element_size())
    if isinstance(product.weight, ScaledWeight):
        return scaled_config(*call, product.weight.float8_x)
    return linear_config(*call)


def launch_linear(product: Product, bias: Tensor | None, out: Tensor, is_gated: bool, config: LinearConfig) -> None:
    """Write the product to `out` under a given config, or its partial sums where `out` has one more dimension."""
    if isinstance(product.weight, ScaledWeight):
        kernel_scaled.launch_scaled(product, bias, out, is_gated, config)
        return
    if config.ring and kernel_hopper.takes(product, config, is_gated):
        kernel_hopper.launch_hopper(product, bias, out, config)
        return
    x, weight = product.x, product.weight
    outer, inner = weight.shape
    grid, results = work_of(product, bias, out, is_gated, config)
    launch(
        _linear_kernel,
        grid,
        *(x, weight, results, product.rows, outer, inner, config.splits, config.split_length(inner)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        TILE=Tile.of(config, inner),
        GATED=is_gated,
        IN_ORDER=config.in_order,
        RESIDENT=config.resident,
    )
