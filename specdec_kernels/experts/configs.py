"""Static launch table of the expert kernels: no autotuning on a step's path.

The tile of columns and the order along the inner dimension follow from the chip, the dtype and the shape of the weight
alone. The row tile follows the number of rows, which changes no sum, because a product adds along the inner dimension
in the same order for every row tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from specdec_kernels.launch import CHIPS, SHARED_BYTES, current_chip

LEAST_ROWS, _MOST_ROWS = 16, 128
FEW_ROWS = 4  # that one program routes and schedules at most; more take longer than two launches
_INNER_STEP, _ODD_INNER_STEP = 128, 64
_GROUP = 32  # elements with one scale in MXFP4
# On sm90 so long that a thread has four scales, the fewest that are copied ahead; others lack the registers.
_MXFP4_STEP = {"sm80": 128, "sm90": 256, "sm100": 128, "gfx942": 128}
_MOST_STAGES = 4
_FLOAT32_STEP, _FLOAT32_SPLIT = 16, 128  # inner elements that are added one by one where there is no tensor core


@dataclass(frozen=True)
class ProductConfig:
    """columns: rows of an expert's weight of one program. block_k: inner elements of a step. split: inner elements
    that are added from zero; the sums of the splits are added in order."""

    columns: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int


class RingConfig(NamedTuple):
    """Of `kernel_hopper`. step: inner elements of a step. buffers: steps in shared memory. programs: of a
    multiprocessor, as many as it holds at once."""

    step: int
    buffers: int
    programs: int


@dataclass(frozen=True)
class RouteConfig:
    """rows: of a program of the routing. experts: that a program of the schedule sorts. ids: that it reads at once.
    items: that it writes at once. columns: of a program of the combination."""

    rows: int = 1
    experts: int = 1
    ids: int = 256
    items: int = 16
    columns: int = 1024


# The interpreter's time goes with programs, not lanes; its products all have one shape, so that a row has one routine.
INTERPRETER_PRODUCT = ProductConfig(128, 128, 1 << 30, 1, 1)
RING = {16: RingConfig(128, 5, 2), 64: RingConfig(64, 5, 2)}
"""By row tile. With others `kernel` is as fast or faster."""
ROUTE = dict.fromkeys(CHIPS, RouteConfig()) | {"interpreter": RouteConfig(64, 64, 256, 16, 4096)}


def row_tile_of(experts: Tensor, num_experts: int) -> int:
    """Rows of an item for assignments [T, K]: about twice the mean of an expert. One tile in the interpreter."""
    if current_chip(experts) == "interpreter":
        return LEAST_ROWS
    mean = experts.numel() // num_experts
    return min(_MOST_ROWS, max(LEAST_ROWS, 1 << (2 * mean - 1).bit_length() if mean else 0))


def product_config(chip: str, inner: int, row_tile: int, element_bytes: int, is_mxfp4: bool = False) -> ProductConfig:
    """The row of the table for weights [E, outer, inner] and inputs of `element_bytes`."""
    if chip == "interpreter":
        config = INTERPRETER_PRODUCT
        return replace(config, block_k=max(config.block_k, _GROUP)) if is_mxfp4 else config
    if element_bytes == 4:
        return ProductConfig(32, _GROUP if is_mxfp4 else _FLOAT32_STEP, _FLOAT32_SPLIT, 4, 3)
    block_k = _INNER_STEP if inner % _INNER_STEP == 0 else _ODD_INNER_STEP
    if is_mxfp4:
        block_k = _MXFP4_STEP[chip]
    fitting = SHARED_BYTES[chip] // ((64 // (4 if is_mxfp4 else 1) + row_tile) * block_k * element_bytes)
    warps = 8 if row_tile == _MOST_ROWS and chip != "sm90" else 4
    return ProductConfig(64, block_k, 1 << 30, warps, max(2, min(_MOST_STAGES, fitting)))


def scaled_product_config(chip: str, inner: int, row_tile: int, element_bytes: int, float8_x: bool) -> ProductConfig:
    """`product_config` for float8 codes: no step is in two groups of 128 inner elements, and a step is a group where x
    is rounded to codes."""
    found = product_config(chip, inner, row_tile, element_bytes)
    if not float8_x:
        return found
    found = replace(found, block_k=_INNER_STEP, split=max(found.split, _INNER_STEP))
    if chip == "interpreter":
        return found
    # A sum and a product that is added to it take twice the registers.
    warps = 8 if row_tile > 2 * LEAST_ROWS else 4
    return replace(found, num_warps=warps, num_stages=2 if element_bytes == 4 else found.num_stages)
