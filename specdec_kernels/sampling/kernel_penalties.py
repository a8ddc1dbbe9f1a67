# mypy: ignore-errors
"""Penalties applied in place, and the counts that they use.

A program holds a tile of the vocabulary of one node's row (in the interpreter: of several). The tokens of the node's
path are read from the draft, one after the other, and compared with the tile's columns, so that no count per node is
ever written. Rows without a penalty are neither read nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.sampling.configs import PENALTY_TILE


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
    logits_ptr,  # [B * N, VOCAB], row stride row_stride; changed in place
    tokens_ptr,  # [B, N] int64
    mask_ptr,  # [B, N, WORDS] int64
    output_counts_ptr,  # [B, VOCAB] int32
    prompt_seen_ptr,  # [B, VOCAB] bool, or None
    repetition_ptr,  # [B] float32
    presence_ptr,  # [B] float32
    frequency_ptr,  # [B] float32
    bias_ptr,  # [B, VOCAB] float32, or None
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
    repetition = tl.load(repetition_ptr + request, mask=in_row, other=1.0)
    presence = tl.load(presence_ptr + request, mask=in_row, other=0.0)
    frequency = tl.load(frequency_ptr + request, mask=in_row, other=0.0)
    asks = in_row & ((repetition != 1) | (presence != 0) | (frequency != 0))
    if bias_ptr is not None:
        asks = in_row
    if tl.max(asks.to(tl.int32), 0) > 0:
        column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
        live = asks[:, None] & (column < VOCAB)
        place = row.to(tl.int64)[:, None] * row_stride + column
        held = request.to(tl.int64)[:, None] * VOCAB + column
        counts = tl.load(output_counts_ptr + held, mask=live, other=0)
        counts += _path_counts(tokens_ptr, mask_ptr, row, asks, column, NODES, WORDS)
        seen = counts > 0
        if prompt_seen_ptr is not None:
            seen |= tl.load(prompt_seen_ptr + held, mask=live, other=0) != 0
        value = tl.load(logits_ptr + place, mask=live, other=0.0).to(tl.float32)
        factor = repetition[:, None]
        value = tl.where(seen, tl.where(value > 0, value / factor, value * factor), value)
        value -= frequency[:, None] * counts.to(tl.float32)
        value -= tl.where(counts > 0, presence[:, None], 0.0)
        if bias_ptr is not None:
            value += tl.load(bias_ptr + held, mask=live, other=0.0)
        tl.store(logits_ptr + place, value.to(logits_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["batch"])
def _count_kernel(
    counts_ptr,  # [B, VOCAB] int32, changed in place
    tokens_ptr,  # [B, WIDTH] int64
    num_ptr,  # [B] int32 or int64
    batch,
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


def apply_penalties(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_seen: torch.Tensor | None,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """See `specdec_kernels.sampling.apply_penalties`."""
    batch, num_nodes, vocab = logits.shape
    flat, rows, chip = logits.flatten(0, 1), batch * num_nodes, current_chip(logits)
    block_v = min(max(triton.next_power_of_2(vocab), 2), PENALTY_TILE[chip])
    block_r = triton.next_power_of_2(max(rows, 1)) if chip == "interpreter" else 1
    launch(
        _penalties_kernel, (triton.cdiv(rows, block_r), triton.cdiv(vocab, block_v)), flat, tokens, mask,
        output_counts, prompt_seen, repetition, presence, frequency, bias, rows, flat.stride(0), num_warps=4,
        NODES=num_nodes, WORDS=mask.shape[-1], VOCAB=vocab, BLOCK_R=block_r, BLOCK_V=block_v,
    )  # fmt: skip


def count_tokens(counts: torch.Tensor, tokens: torch.Tensor, num: torch.Tensor) -> None:
    """See `specdec_kernels.sampling.count_tokens`."""
    batch, width = tokens.shape
    launch(
        _count_kernel, (batch if width else 0,), counts, tokens, num, batch, num_warps=1, VOCAB=counts.shape[1],
        WIDTH=width, BLOCK_W=max(triton.next_power_of_2(max(width, 1)), 2),
    )  # fmt: skip
