# mypy: ignore-errors
"""Steps of recurrent heads: the look-up, the products and the cell in one kernel per step.

A program owns some rows and some entries of their states: for each entry it reads the three rows of the weights that
its gates need, so that nothing but the new state is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.lattice.configs import CONFIGS
from specdec_kernels.lattice.kernel import table_rows
from specdec_kernels.lattice.types import RnnStep
from specdec_kernels.launch import current_chip, launch
from specdec_kernels.pdl import begin

_MIN_DOT = 16


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _product(acc, x, weight_ptr, output, column, SIZE, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """acc [M, J] + x [M, K] times the columns [K] of the rows [J] of the weights; `output` is below SIZE."""
    inside = (output < SIZE)[:, None] & (column < WIDTH)[None, :]
    weight = tl.load(weight_ptr + output[:, None].to(tl.int64) * STRIDE + column[None, :], mask=inside, other=0.0)
    return tl.dot(x, tl.trans(weight), acc, input_precision="ieee")


@triton.jit
def _load(rows_ptr, row, column, in_rows, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """[M, K]: columns below WIDTH of rows, zeros elsewhere."""
    inside = in_rows[:, None] & (column < WIDTH)[None, :]
    return tl.load(rows_ptr + row[:, None] * STRIDE + column[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["rows", "vocab"])
def _rnn_kernel(
    tokens_ptr,  # [rows] int64
    state_ptr,  # [rows, SIZE]
    embedding_ptr,  # [vocab, SIZE]
    weight_ptr,  # [3 SIZE, 2 SIZE], row stride STRIDE
    hidden_ptr,  # [rows, 3 SIZE]
    next_ptr,  # [rows, SIZE]
    output_ptr,  # [rows, SIZE]
    rows,
    vocab,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    unit = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    in_rows = row < rows
    begin(PDL)
    token = tl.load(tokens_ptr + row, mask=in_rows, other=-1)
    gate = _load(hidden_ptr, row, unit, in_rows, 3 * SIZE, SIZE).to(tl.float32)
    candidate = _load(hidden_ptr + SIZE, row, unit, in_rows, 3 * SIZE, SIZE).to(tl.float32)
    output = _load(hidden_ptr + 2 * SIZE, row, unit, in_rows, 3 * SIZE, SIZE).to(tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        state = _load(state_ptr, row, column, in_rows, SIZE, SIZE)
        gate = _product(gate, state, weight_ptr, unit, column, SIZE, STRIDE, SIZE)
        candidate = _product(candidate, state, weight_ptr + SIZE * STRIDE, unit, column, SIZE, STRIDE, SIZE)
        output = _product(output, state, weight_ptr + 2 * SIZE * STRIDE, unit, column, SIZE, STRIDE, SIZE)
        embedded = table_rows(embedding_ptr, token, column, vocab, SIZE)
        of_token = weight_ptr + SIZE
        gate = _product(gate, embedded, of_token, unit, column, SIZE, STRIDE, SIZE)
        candidate = _product(candidate, embedded, of_token + SIZE * STRIDE, unit, column, SIZE, STRIDE, SIZE)
        output = _product(output, embedded, of_token + 2 * SIZE * STRIDE, unit, column, SIZE, STRIDE, SIZE)
    kept = tl.sigmoid(gate)
    state = _load(state_ptr, row, unit, in_rows, SIZE, SIZE).to(tl.float32)
    following = kept * state + (1.0 - kept) * _tanh(candidate)
    at = row[:, None] * SIZE + unit[None, :]
    inside = in_rows[:, None] & (unit < SIZE)[None, :]
    tl.store(next_ptr + at, following.to(next_ptr.dtype.element_ty), mask=inside)
    tl.store(output_ptr + at, _tanh(output).to(output_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "vocab"])
def _gru_kernel(
    tokens_ptr,  # [rows] int64
    state_ptr,  # [rows, SIZE]
    embedding_ptr,  # [vocab, WIDTH]
    weight_ih_ptr,  # [3 SIZE, WIDTH]
    weight_hh_ptr,  # [3 SIZE, SIZE]
    next_ptr,  # [rows, SIZE]
    rows,
    vocab,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    unit = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    in_rows = row < rows
    begin(PDL)
    token = tl.load(tokens_ptr + row, mask=in_rows, other=-1)
    reset = tl.zeros((BLOCK_M, BLOCK_J), tl.float32)
    update = tl.zeros((BLOCK_M, BLOCK_J), tl.float32)
    new = tl.zeros((BLOCK_M, BLOCK_J), tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        embedded = table_rows(embedding_ptr, token, column, vocab, WIDTH)
        reset = _product(reset, embedded, weight_ih_ptr, unit, column, SIZE, WIDTH, WIDTH)
        update = _product(update, embedded, weight_ih_ptr + SIZE * WIDTH, unit, column, SIZE, WIDTH, WIDTH)
        new = _product(new, embedded, weight_ih_ptr + 2 * SIZE * WIDTH, unit, column, SIZE, WIDTH, WIDTH)
    recurrent = tl.zeros((BLOCK_M, BLOCK_J), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        state = _load(state_ptr, row, column, in_rows, SIZE, SIZE)
        reset = _product(reset, state, weight_hh_ptr, unit, column, SIZE, SIZE, SIZE)
        update = _product(update, state, weight_hh_ptr + SIZE * SIZE, unit, column, SIZE, SIZE, SIZE)
        recurrent = _product(recurrent, state, weight_hh_ptr + 2 * SIZE * SIZE, unit, column, SIZE, SIZE, SIZE)
    kept = tl.sigmoid(update)
    state = _load(state_ptr, row, unit, in_rows, SIZE, SIZE).to(tl.float32)
    following = (1.0 - kept) * _tanh(new + tl.sigmoid(reset) * recurrent) + kept * state
    inside = in_rows[:, None] & (unit < SIZE)[None, :]
    tl.store(next_ptr + row[:, None] * SIZE + unit[None, :], following.to(next_ptr.dtype.element_ty), mask=inside)


def rnn_step(tokens: Tensor, state: Tensor, embedding: Tensor, weight: Tensor, hidden: Tensor) -> RnnStep:
    step = RnnStep(torch.empty_like(state), torch.empty_like(state))
    grid, sizes = _tiles(state, state.shape[1])
    launch(
        _rnn_kernel, grid, tokens, state, embedding, weight, hidden, *step, len(state), len(embedding),
        SIZE=state.shape[1], STRIDE=weight.stride(0), **sizes,
    )  # fmt: skip
    return step


def gru_step(tokens: Tensor, state: Tensor, embedding: Tensor, weight_ih: Tensor, weight_hh: Tensor) -> Tensor:
    following = torch.empty_like(state)
    grid, sizes = _tiles(state, max(state.shape[1], embedding.shape[1]))
    launch(
        _gru_kernel, grid, tokens, state, embedding, weight_ih, weight_hh, following, len(state), len(embedding),
        SIZE=state.shape[1], WIDTH=embedding.shape[1], **sizes,
    )  # fmt: skip
    return following


def _tiles(state: Tensor, inputs: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid of a step, and its block sizes and warps."""
    (rows, size), config = state.shape, CONFIGS[current_chip(state)]
    block_j = min(max(triton.next_power_of_2(size), _MIN_DOT), config.state_units)
    block_k = min(max(triton.next_power_of_2(inputs), _MIN_DOT), config.state_block)
    sizes = dict(BLOCK_M=config.state_rows, BLOCK_J=block_j, BLOCK_K=block_k, num_warps=config.state_warps)
    return (triton.cdiv(rows, config.state_rows), triton.cdiv(size, block_j)), sizes
