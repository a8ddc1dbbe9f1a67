# mypy: ignore-errors
"""Forbids, behind each node of a draft tree, the tokens whose bit is not set.

A program holds a tile of the vocabulary of one node's row (in the interpreter: of several). It reads no logit: it
writes -inf where the bit is 0. Rows of requests without a constraint are neither read nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.sampling.configs import PENALTY_TILE
from specdec_kernels.sampling.types import MASK_BITS


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


def mask_tokens(logits: torch.Tensor, bits: torch.Tensor, constrained: torch.Tensor) -> None:
    """See `specdec_kernels.sampling.mask_tokens`."""
    batch, num_nodes, vocab = logits.shape
    flat, rows, chip = logits.flatten(0, 1), batch * num_nodes, current_chip(logits)
    block_v = min(max(triton.next_power_of_2(vocab), 2), PENALTY_TILE[chip])
    block_r = triton.next_power_of_2(max(rows, 1)) if chip == "interpreter" else 1
    launch(
        _mask_kernel, (triton.cdiv(rows, block_r), triton.cdiv(vocab, block_v)), flat, bits, constrained, rows,
        flat.stride(0), num_warps=4, NODES=num_nodes, WORDS=bits.shape[-1], WORD_BITS=MASK_BITS, VOCAB=vocab,
        BLOCK_R=block_r, BLOCK_V=block_v,
    )  # fmt: skip
