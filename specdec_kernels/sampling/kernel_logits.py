# mypy: ignore-errors
"""Kernels that change logits in place before tokens are chosen, and the counts that penalties use.

A program holds a tile of the vocabulary of one node's row, or one node of `_forbid_kernel` (in the interpreter:
several). Rows of requests without a penalty or constraint are neither read nor written.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.sampling.configs import FORBID_TILE, PENALTY_TILE
from specdec_kernels.sampling.types import MASK_BITS, Forbidden, Penalties


@triton.jit
def _path_counts(tokens_ptr, mask_ptr, row, asks, column, NODES: tl.constexpr, WORDS: tl.constexpr):
    """How often each column is drafted on the path of `row`, the root left out."""
    counts = tl.zeros((row.shape[0], column.shape[1]), tl.int32)
    request = row // NODES
    for node in range(1, NODES):
        word = tl.load(mask_ptr + row.to(tl.int64) * WORDS + node // 64, mask=asks, other=0)
        on_path = ((word >> (node % 64)) & 1) != 0
        token = tl.load(tokens_ptr + request.to(tl.int64) * NODES + node, mask=asks & on_path, other=-1)
        counts += (column == token[:, None]).to(tl.int32)
    return counts


@triton.jit(do_not_specialize=["rows"])
def _penalties_kernel(
    call,  # Penalties; logits have row stride row_stride
    rows,  # B * N
    row_stride,
    NODES: tl.constexpr,
    WORDS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    request = row // NODES
    in_row = row < rows
    repetition = tl.load(call.repetition + request, mask=in_row, other=1.0)
    presence = tl.load(call.presence + request, mask=in_row, other=0.0)
    frequency = tl.load(call.frequency + request, mask=in_row, other=0.0)
    asks = in_row & ((repetition != 1) | (presence != 0) | (frequency != 0))
    if call.bias is not None:
        asks = in_row
    if tl.max(asks.to(tl.int32), 0) > 0:
        column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
        live = asks[:, None] & (column < VOCAB)
        place = row.to(tl.int64)[:, None] * row_stride + column
        held = request.to(tl.int64)[:, None] * VOCAB + column
        counts = tl.load(call.output_counts + held, mask=live, other=0)
        counts += _path_counts(call.tokens, call.mask, row, asks, column, NODES, WORDS)
        seen = counts > 0
        if call.prompt_seen is not None:
            seen |= tl.load(call.prompt_seen + held, mask=live, other=0) != 0
        value = tl.load(call.logits + place, mask=live, other=0.0).to(tl.float32)
        factor = repetition[:, None]
        value = tl.where(seen, tl.where(value > 0, value / factor, value * factor), value)
        value -= frequency[:, None] * counts.to(tl.float32)
        value -= tl.where(counts > 0, presence[:, None], 0.0)
        if call.bias is not None:
            value += tl.load(call.bias + held, mask=live, other=0.0)
        tl.store(call.logits + place, value.to(call.logits.dtype.element_ty), mask=live)


@triton.jit
def _count_kernel(
    counts_ptr,  # [B, VOCAB] int32, changed in place
    tokens_ptr,  # [B, WIDTH] int64
    num_ptr,  # [B] int32 or int64
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_W)
    num = tl.load(num_ptr + request)
    live = (column < WIDTH) & (column < num)
    token = tl.load(tokens_ptr + request * WIDTH + column, mask=live, other=-1)
    live &= (token >= 0) & (token < VOCAB)
    same = (token[:, None] == token[None, :]) & live[:, None] & live[None, :]
    times = tl.sum(same.to(tl.int32), 1)
    # The first of equal tokens writes for all of them: one address, one lane.
    earlier = tl.sum((same & (column[None, :] < column[:, None])).to(tl.int32), 1)
    first = live & (earlier == 0)
    place = counts_ptr + request * VOCAB + token
    before = tl.load(place, mask=first, other=0)
    tl.store(place, before + times, mask=first)


def apply_penalties(call: Penalties) -> None:
    _launch_tiles(_penalties_kernel, call.logits, (call,), WORDS=call.mask.shape[-1])


def count_tokens(counts: Tensor, tokens: Tensor, num: Tensor) -> None:
    batch, width = tokens.shape
    launch(
        _count_kernel, (batch if width else 0,), counts, tokens, num, num_warps=1, VOCAB=counts.shape[1],
        WIDTH=width, BLOCK_W=max(triton.next_power_of_2(max(width, 1)), 2),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "history_stride"])
def _forbid_kernel(
    call,  # Forbidden; logits have row stride row_stride, the history history_stride
    rows,  # B * N
    row_stride,
    history_stride,
    NODES: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    VOCAB: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    request = row // NODES
    in_row = row < rows
    position = tl.load(call.positions + row, mask=in_row, other=0)
    length = tl.load(call.lengths + request, mask=in_row, other=0)
    node = tl.arange(0, BLOCK_N)[None, :]
    in_tree = in_row[:, None] & (node < NODES)
    bits = tl.load(call.mask + row[:, None] * MASK_WORDS + node // 64, mask=in_tree, other=0)
    on_path = in_tree & (((bits >> (node % 64)) & 1) != 0)
    node_place = tl.load(call.positions + request[:, None] * NODES + node, mask=on_path, other=-1)
    node_token = tl.load(call.tokens + request[:, None] * NODES + node, mask=on_path, other=0)
    for start in range(0, COUNT, BLOCK_W):
        word = start + tl.arange(0, BLOCK_W)[None, :]
        entry = request[:, None] * COUNT + word
        live = in_row[:, None] & (word < COUNT)
        last = tl.load(call.words + entry * WIDTH + WIDTH - 1, mask=live, other=-1)
        until = tl.load(call.until + entry, mask=live, other=0)
        live &= (last >= 0) & (last < VOCAB) & (position[:, None] + 1 < until)
        if tl.max(tl.max(live.to(tl.int32), 1), 0) > 0:
            for back in range(WIDTH - 1):
                place = position - back
                committed = in_row & (place >= 0) & (place < length)
                token = tl.load(call.history + request * history_stride + place, mask=committed, other=-2)
                drafted = tl.sum(tl.where(on_path & (node_place == place[:, None]), node_token, 0), 1)
                token = tl.where(place < length, token, drafted)
                wanted = tl.load(call.words + entry * WIDTH + WIDTH - 2 - back, mask=live, other=-1)
                live &= (wanted < 0) | (wanted == token[:, None])
            # The first of the sequences with one last token, so that one lane writes an address.
            earlier = (last[:, :, None] == last[:, None, :]) & live[:, None, :] & (word[:, None, :] < word[:, :, None])
            first = live & (tl.sum(earlier.to(tl.int32), 2) == 0)
            tl.store(call.logits + row[:, None] * row_stride + last, float("-inf"), mask=first)


def forbid_tokens(call: Forbidden) -> None:
    (batch, num_nodes, vocab), (count, width) = call.logits.shape, call.words.shape[1:]
    flat, rows = call.logits.flatten(0, 1), batch * num_nodes
    block_r = _rows_of_program(flat)
    block_n, block_w = (max(triton.next_power_of_2(max(size, 1)), 2) for size in (num_nodes, min(count, FORBID_TILE)))
    launch(
        _forbid_kernel, (triton.cdiv(rows, block_r) if count else 0,), call, rows, flat.stride(0),
        call.history.stride(0), num_warps=4, NODES=num_nodes, MASK_WORDS=call.mask.shape[-1], VOCAB=vocab, COUNT=count,
        WIDTH=width, BLOCK_R=block_r, BLOCK_N=block_n, BLOCK_W=block_w,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _mask_kernel(
    logits_ptr,  # [B * N, VOCAB], row stride row_stride; changed in place
    bits_ptr,  # [B, N, WORDS] int32
    constrained_ptr,  # [B] int32
    rows,  # B * N
    row_stride,
    NODES: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_BITS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    in_row = row < rows
    asks = in_row & (tl.load(constrained_ptr + row // NODES, mask=in_row, other=0) != 0)
    if tl.max(asks.to(tl.int32), 0) > 0:
        column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
        live = asks[:, None] & (column < VOCAB)
        word = tl.load(bits_ptr + row[:, None] * WORDS + column // WORD_BITS, mask=live, other=-1)
        forbidden = ((word >> (column % WORD_BITS)) & 1) == 0
        tl.store(logits_ptr + row[:, None] * row_stride + column, float("-inf"), mask=live & forbidden)


def mask_tokens(logits: Tensor, bits: Tensor, constrained: Tensor) -> None:
    _launch_tiles(_mask_kernel, logits, (logits, bits, constrained), WORDS=bits.shape[-1], WORD_BITS=MASK_BITS)


def _rows_of_program(flat: Tensor) -> int:
    """Rows of each program; the interpreter takes all at once."""
    return triton.next_power_of_2(max(len(flat), 1)) if current_chip(flat) == "interpreter" else 1


def _launch_tiles(kernel: Any, logits: Tensor, arguments: tuple[Any, ...], **sizes: int) -> None:
    """Launch `kernel` over the tiles of `logits` [B, N, V]."""
    (_, num_nodes, vocab), flat = logits.shape, logits.flatten(0, 1)
    block_v = min(max(triton.next_power_of_2(vocab), 2), PENALTY_TILE[current_chip(logits)])
    block_r = _rows_of_program(flat)
    launch(
        kernel, (triton.cdiv(len(flat), block_r), triton.cdiv(vocab, block_v)), *arguments, len(flat),
        flat.stride(0), num_warps=4, NODES=num_nodes, VOCAB=vocab, BLOCK_R=block_r, BLOCK_V=block_v, **sizes,
    )  # fmt: skip
