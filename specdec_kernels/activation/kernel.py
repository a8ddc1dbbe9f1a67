"""SiLU times up as one Triton kernel: a program takes a block of columns of one row. Bound by memory."""

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import CHIPS, current_chip, launch
from specdec_kernels.pdl import begin

BLOCK = dict.fromkeys(CHIPS, 1024) | {"interpreter": 16384}
"""Columns of a program: 16 bytes a lane of two-byte numbers."""


@triton.jit
def gated(gate, up, DTYPE: tl.constexpr):
    """silu(gate) * up of float32 tiles, rounded to DTYPE after each of the two operations."""
    silu = gate / (1.0 + tl.exp(-gate))
    return (silu.to(DTYPE).to(tl.float32) * up).to(DTYPE)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [rows, 2 * width]
    out_ptr,  # [rows, width]
    width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_ptr + 2 * row * width + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + (2 * row + 1) * width + column, mask=inside, other=0.0)
    product = gated(gate.to(tl.float32), up.to(tl.float32), gate.dtype)
    tl.store(out_ptr + row * width + column, product, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    width, block = gate_up.shape[-1] // 2, BLOCK[current_chip(gate_up)]
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    launch(
        _silu_mul_kernel,
        (out.numel() // width, -(-width // block)),
        *(gate_up, out, width),
        BLOCK=block,
    )
    return out
