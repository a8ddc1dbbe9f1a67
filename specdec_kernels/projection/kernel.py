"""Products of few rows in Triton: every program reads its part of the weight once.

    acc[column, row] = sum_k weight[column, k] x[row, k]

A program takes a tile of columns of the result, which are rows of the weight and the M side of the tensor core,
and all rows of x as its N side: the tensor core is used at 16 rows as well as at 128. Where the column tiles do
not fill the chip, the inner dimension is cut, and each program of a tile writes its partial sum in float32. They are
added in the order of the inner dimension, so that the result does not depend on which program ends when:

- `linear_add_rms_norm` leaves them to the norm, which reads them all anyway.
- Beyond the rows of one program there are programs enough, so one program takes all splits of its tile, one after
  the other, and adds their sums as it goes.
- Elsewhere the program that arrives last adds them. It is found by a ticket a tile: a counter that each program
  raises after its partial sum is written (release) and that tells the last one that all others are (acquire). The
  last program sets the counter back to 0 for the next launch, also for the next replay of a captured graph. This is
  the one place where programs of a launch read what others of the same launch wrote.

A program may ask for the last part of its weights before it waits for the kernel ahead, and hold it in registers: then
the memory is busy while that kernel ends.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from specdec_kernels.activation import kernel as activation
from specdec_kernels.activation.kernel import gated
from specdec_kernels.all_reduce import kernel as all_reduce
from specdec_kernels.all_reduce.types import Exchange
from specdec_kernels.launch import current_chip, launch
from specdec_kernels.norm import kernel as norm
from specdec_kernels.norm.types import Normed
from specdec_kernels.overlap import let_next_kernel_start, overlapped, wait_for_kernel_ahead
from specdec_kernels.projection import reference
from specdec_kernels.projection.configs import FAST_ROWS, LinearConfig, linear_config
from specdec_kernels.projection.kernel_library import has_the_bits, products_of_splits

_FEWEST_TICKETS = 1 << 16


@triton.jit
def weight_rows(tile, OUTER, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """The weight's rows of a column tile, [COLUMNS]: past the last one the last again. A gated tile holds rows of
    the gate in its first half and the same rows of up in its second."""
    lane = tl.arange(0, COLUMNS)
    if GATED:
        HALF: tl.constexpr = COLUMNS // 2
        row = tl.minimum(tile * HALF + lane % HALF, OUTER // 2 - 1) + (lane // HALF) * (OUTER // 2)
    else:
        row = tl.minimum(tile * COLUMNS + lane, OUTER - 1)
    return row


@triton.jit
def _held_weight(weight_ptr, weight_row, k_first, K, HELD: tl.constexpr):
    """[COLUMNS, HELD] of the weight from k_first on: asked for here, waited for where it is used."""
    at = weight_ptr + weight_row.to(tl.int64)[:, None] * K + k_first + tl.arange(0, HELD)[None, :]
    return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _with_held_weight(acc, held, x_ptr, row, rows, k_first, K, HELD: tl.constexpr):
    """`acc` and the sum over the inner elements of `held`, from k_first on."""
    x_at = x_ptr + row.to(tl.int64)[None, :] * K + k_first + tl.arange(0, HELD)[:, None]
    x = tl.load(x_at, mask=(row < rows)[None, :], other=0.0)
    # Without this the compiler moves the weight to shared memory where it was asked for, and waits for it there.
    held = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [held], held.dtype, is_pure=False, pack=2)
    return tl.dot(held, x, acc, input_precision="ieee")


@triton.jit
def partial_sum(
    x_ptr,  # [M, K]
    weight_ptr,  # [OUTER, K]
    weight_row,  # [COLUMNS]
    row,  # [ROWS]
    rows,
    k_first,
    k_end,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """[COLUMNS, ROWS] float32: the sum over k_first to k_end. EVEN_K: that is a whole number of steps."""
    lane = tl.arange(0, BLOCK_K)
    weight_at = weight_ptr + weight_row.to(tl.int64)[:, None] * K + k_first + lane[None, :]
    x_at = x_ptr + row.to(tl.int64)[None, :] * K + k_first + lane[:, None]
    here = (row < rows)[None, :]
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for first in tl.range(k_first, k_end, BLOCK_K):
        if EVEN_K:
            weight = tl.load(weight_at, eviction_policy="evict_first")
            x = tl.load(x_at, mask=here, other=0.0)
        else:
            inside = first + lane < k_end
            weight = tl.load(weight_at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_at, mask=inside[:, None] & here, other=0.0)
        acc = tl.dot(weight, x, acc, input_precision="ieee")
        weight_at += BLOCK_K
        x_at += BLOCK_K
    return acc


@triton.jit
def with_later_splits(
    acc,
    x_ptr,
    weight_ptr,
    weight_row,
    row,
    rows,
    splits,
    split_length,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """`acc`, the sum of the first split, with the sums of the others in their order."""
    for later in tl.range(1, splits):
        k_first = later * split_length
        k_end = tl.minimum(K, k_first + split_length)
        acc += partial_sum(x_ptr, weight_ptr, weight_row, row, rows, k_first, k_end, K, ROWS, COLUMNS, BLOCK_K, EVEN_K)
    return acc


@triton.jit
def _arrive(part_ptr, ticket_ptr, acc, split, splits, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Write this split's partial sum; whether all splits of the tile are written now."""
    lane = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(part_ptr + split * (COLUMNS * ROWS) + lane, acc)
    tl.debug_barrier()  # all threads have stored before one of them raises the counter
    return tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == splits - 1


@triton.jit
def _sum_of_splits(part_ptr, splits, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """[COLUMNS, ROWS] float32: the partial sums added in order. Read past the first-level cache, which does not see
    what other processors write."""
    lane = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    total = tl.load(part_ptr + lane, cache_modifier=".cg")
    for split in tl.range(1, splits):
        total += tl.load(part_ptr + split * (COLUMNS * ROWS) + lane, cache_modifier=".cg")
    return total


@triton.jit
def _write(
    out_ptr,  # [M, OUTER], or [M, OUTER / 2] if GATED
    bias_ptr,  # [OUTER] or None
    acc,  # [COLUMNS, ROWS] float32
    weight_row,  # [COLUMNS]
    row,  # [ROWS]
    tile,
    rows,
    OUTER,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Bias, rounding, and the activation if GATED."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    narrow = acc.to(out_ptr.dtype.element_ty)
    if GATED:
        HALF: tl.constexpr = COLUMNS // 2
        pairs = tl.permute(tl.reshape(narrow.to(tl.float32), (2, HALF, ROWS)), (1, 2, 0))
        gate, up = tl.split(pairs)
        narrow = gated(gate, up, out_ptr.dtype.element_ty)
        width = OUTER // 2
        column = tile * HALF + tl.arange(0, HALF)
    else:
        width = OUTER
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
    at = out_ptr + row.to(tl.int64)[None, :] * width + column[:, None]
    tl.store(at, narrow, mask=(column < width)[:, None] & (row < rows)[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def _linear_kernel(
    x_ptr,  # [rows, K]
    weight_ptr,  # [OUTER, K]
    bias_ptr,  # [OUTER] or None
    out_ptr,  # [rows, OUTER], or [rows, OUTER / 2] if GATED; [splits, rows, OUTER] float32 if not added here
    part_ptr,  # [tiles, splits, COLUMNS, ROWS] float32, or None if not added here
    ticket_ptr,  # [tiles] int32 zeros, left as zeros; or None if not added here
    rows,
    OUTER,
    K,
    splits,
    split_length,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    IN_ORDER: tl.constexpr,
    HELD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    weight_row = weight_rows(tile, OUTER, COLUMNS, GATED)
    k_first = split * split_length
    k_end = tl.minimum(K, k_first + split_length)
    if HELD > 0:
        k_end -= HELD
        held = _held_weight(weight_ptr, weight_row, k_end, K, HELD)
        let_next_kernel_start(OVERLAP)
    wait_for_kernel_ahead(OVERLAP)
    acc = partial_sum(x_ptr, weight_ptr, weight_row, row, rows, k_first, k_end, K, ROWS, COLUMNS, BLOCK_K, EVEN_K)
    if HELD > 0:
        acc = _with_held_weight(acc, held, x_ptr, row, rows, k_end, K, HELD)
    if IN_ORDER:
        acc = with_later_splits(
            acc, x_ptr, weight_ptr, weight_row, row, rows, splits, split_length, K, ROWS, COLUMNS, BLOCK_K, EVEN_K
        )
    if HELD == 0:
        let_next_kernel_start(OVERLAP)
    if ticket_ptr is None:  # all splits, or one of those that the next kernel adds
        out_ptr += split.to(tl.int64) * rows * OUTER
        _write(out_ptr, bias_ptr, acc, weight_row, row, tile, rows, OUTER, COLUMNS, ROWS, GATED)
    else:
        place = tl.program_id(0) * tl.num_programs(1) + tile
        tile_ptr = part_ptr + place.to(tl.int64) * splits * (COLUMNS * ROWS)
        if _arrive(tile_ptr, ticket_ptr + place, acc, split, splits, COLUMNS, ROWS):
            total = _sum_of_splits(tile_ptr, splits, COLUMNS, ROWS)
            tl.store(ticket_ptr + place, 0)
            _write(out_ptr, bias_ptr, total, weight_row, row, tile, rows, OUTER, COLUMNS, ROWS, GATED)


_tickets_of: dict[torch.device, torch.Tensor] = {}


def _tickets(device: torch.device, tiles: int) -> torch.Tensor:
    """Zeros that every launch leaves as zeros. Launches that share them must be ordered, as on one stream.

    Raises:
        RuntimeError: the first use on the device is inside a graph capture, where the zeros would not be written.
    """
    found = _tickets_of.get(device)
    if found is None or found.shape[0] < tiles:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("linear: call it once outside of a graph capture first, its counters must be zeroed")
        found = torch.zeros(max(tiles, _FEWEST_TICKETS), dtype=torch.int32, device=device)
        _tickets_of[device] = found
    return found


def takes(x: torch.Tensor, batch_invariant: bool) -> bool:
    """Whether the kernel computes x, and not torch."""
    few = x.numel() <= FAST_ROWS * x.shape[-1]
    return (few or batch_invariant) and x.dtype != torch.float64


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if not takes(x, batch_invariant):
        return reference.linear(x, weight, bias, out_dtype=out_dtype)
    config = config_of(x, weight)
    if bias is None and out_dtype in (None, x.dtype) and _library_takes(x, weight, config):
        return _added(products_of_splits(x, weight, config), x.dtype, config)
    out = x.new_empty(*x.shape[:-1], weight.shape[0], dtype=out_dtype or x.dtype)
    launch_linear(x, weight, bias, out, False, config)
    return out


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor, *, batch_invariant: bool = False) -> torch.Tensor:
    if not takes(x, batch_invariant):
        product = reference.linear(x, weight)
        return reference.silu_mul(product) if x.dtype == torch.float64 else activation.silu_mul(product)
    config = config_of(x, weight)
    if _library_takes(x, weight, config):
        return activation.silu_mul(_added(products_of_splits(x, weight, config), x.dtype, config))
    out = x.new_empty(*x.shape[:-1], weight.shape[0] // 2)
    launch_linear(x, weight, None, out, True, config)
    return out


def linear_add_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    batch_invariant: bool = False,
) -> Normed:
    if x.dtype == torch.float64:
        return reference.linear_add_rms_norm(x, weight, residual, norm_weight, eps)
    if not takes(x, batch_invariant):
        return norm.add_rms_norm(reference.linear(x, weight), residual, norm_weight, eps)
    config = config_of(x, weight)
    if config.splits > 1 and _library_takes(x, weight, config):
        parts = products_of_splits(x, weight, config)
        return norm.add_rms_norm_of_parts(parts, residual, norm_weight, eps)
    if config.splits == 1 or config.in_order:
        return norm.add_rms_norm(linear(x, weight, batch_invariant=True), residual, norm_weight, eps)
    parts = torch.empty((config.splits, *residual.shape), dtype=torch.float32, device=x.device)
    launch_linear(x, weight, None, parts, False, config)
    return norm.add_rms_norm_of_parts(parts, residual, norm_weight, eps)


def linear_all_reduce_add_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    exchange: Exchange,
    slot: int,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    batch_invariant: bool = False,
) -> Normed:
    if x.dtype == torch.float64:
        return reference.linear_all_reduce_add_rms_norm(x, weight, exchange, slot, residual, norm_weight, eps)
    if takes(x, batch_invariant):
        config = config_of(x, weight)
        splits = 1 if config.in_order else config.splits
        parts = torch.empty((splits, *residual.shape), dtype=torch.float32, device=x.device)
        launch_linear(x, weight, None, parts, False, config)
    else:
        parts = reference.linear(x, weight).float()[None]
    return all_reduce.all_reduce_add_rms_norm(parts, exchange, slot, residual, norm_weight, eps)


def _library_takes(x: torch.Tensor, weight: torch.Tensor, config: LinearConfig) -> bool:
    """Whether the library computes the product, because it has the bits of the kernel and is the faster one."""

    def by_kernel(sample: torch.Tensor) -> torch.Tensor:
        shape, dtype = (*sample.shape[:-1], weight.shape[0]), sample.dtype
        if config.splits > 1:
            shape, dtype = (config.splits, *shape), torch.float32
        out = torch.empty(shape, dtype=dtype, device=sample.device)
        launch_linear(sample, weight, None, out, False, replace(config, in_order=False))
        return out

    return has_the_bits(x, weight, config, by_kernel)


def _added(product: torch.Tensor, dtype: torch.dtype, config: LinearConfig) -> torch.Tensor:
    """The result of `products_of_splits`: of several splits their sum in order, rounded once."""
    if config.splits == 1:
        return product
    total = product[0]
    for part in product[1:]:
        total += part
    return total.to(dtype)


def config_of(x: torch.Tensor, weight: torch.Tensor) -> LinearConfig:
    """The table's row for this product."""
    outer, inner = weight.shape
    return linear_config(current_chip(x), outer, inner, x.numel() // inner, x.element_size())


def launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    is_gated: bool,
    config: LinearConfig,
) -> None:
    """Write the product to `out` under a given config, or its partial sums where `out` has one more dimension."""
    outer, inner = weight.shape
    rows = x.numel() // inner
    columns, width = (config.columns // 2, outer // 2) if is_gated else (config.columns, outer)
    row_blocks, tiles = -(-rows // config.rows), -(-width // columns)
    part = ticket = None
    if config.splits > 1 and out.ndim == x.ndim and not config.in_order:
        part_shape = (row_blocks * tiles, config.splits, config.columns, config.rows)
        part = torch.empty(part_shape, dtype=torch.float32, device=x.device)
        ticket = _tickets(x.device, row_blocks * tiles)
    launch(
        _linear_kernel,
        (row_blocks, tiles, 1 if config.in_order else config.splits),
        *(x, weight, bias, out, part, ticket, rows, outer, inner, config.splits, config.split_length(inner)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        ROWS=config.rows,
        COLUMNS=config.columns,
        BLOCK_K=config.block_k,
        EVEN_K=inner % config.block_k == 0,
        GATED=is_gated,
        IN_ORDER=config.in_order,
        HELD=config.held,
        **overlapped(current_chip(x)),
    )
