# mypy: ignore-errors
"""Forbids, behind each node of a draft tree, the tokens that would complete a forbidden sequence.

A program holds one node (in the interpreter: several), the nodes of its tree, and a tile of the forbidden sequences of
its request after the other. It walks the node's text backwards, and keeps the sequences that agree with it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.sampling.configs import FORBID_TILE


@triton.jit
def _token_at(place, length, in_row, history_row, on_path, node_place, node_token):
    """[R] the token of each row's text at `place` [R]: on its path, or before it in the text; -2 before the text."""
    before = tl.load(history_row + place, mask=in_row & (place >= 0) & (place < length), other=-2)
    drafted = tl.sum(tl.where(on_path & (node_place == place[:, None]), node_token, 0), 1)
    return tl.where(place < length, before, drafted)


@triton.jit
def _first(last, live, word):
    """[R, W]: the first live sequence of those with one last token, so that one lane writes an address."""
    earlier = (last[:, :, None] == last[:, None, :]) & live[:, None, :] & (word[:, None, :] < word[:, :, None])
    return live & (tl.sum(earlier.to(tl.int32), 2) == 0)


@triton.jit(do_not_specialize=["rows", "history_stride"])
def _forbid_kernel(
    logits_ptr,  # [B * N, VOCAB], row stride row_stride; changed in place
    tokens_ptr,  # [B, N] int64
    mask_ptr,  # [B, N, MASK_WORDS] int64
    positions_ptr,  # [B, N] int64
    history_ptr,  # [B, C] int64, row stride history_stride
    lengths_ptr,  # [B] int64
    words_ptr,  # [B, COUNT, WIDTH] int64
    until_ptr,  # [B, COUNT] int64
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
    position = tl.load(positions_ptr + row, mask=in_row, other=0)
    length = tl.load(lengths_ptr + request, mask=in_row, other=0)
    node = tl.arange(0, BLOCK_N)[None, :]
    in_tree = in_row[:, None] & (node < NODES)
    bits = tl.load(mask_ptr + row[:, None] * MASK_WORDS + node // 64, mask=in_tree, other=0)
    on_path = in_tree & (((bits >> (node % 64)) & 1) != 0)
    node_place = tl.load(positions_ptr + request[:, None] * NODES + node, mask=on_path, other=-1)
    node_token = tl.load(tokens_ptr + request[:, None] * NODES + node, mask=on_path, other=0)
    for start in range(0, COUNT, BLOCK_W):
        word = start + tl.arange(0, BLOCK_W)[None, :]
        entry = request[:, None] * COUNT + word
        live = in_row[:, None] & (word < COUNT)
        last = tl.load(words_ptr + entry * WIDTH + WIDTH - 1, mask=live, other=-1)
        until = tl.load(until_ptr + entry, mask=live, other=0)
        live &= (last >= 0) & (last < VOCAB) & (position[:, None] + 1 < until)
        if tl.max(tl.max(live.to(tl.int32), 1), 0) > 0:
            for back in range(WIDTH - 1):
                token = _token_at(
                    position - back, length, in_row, history_ptr + request * history_stride,
                    on_path, node_place, node_token,
                )  # fmt: skip
                wanted = tl.load(words_ptr + entry * WIDTH + WIDTH - 2 - back, mask=live, other=-1)
                live &= (wanted < 0) | (wanted == token[:, None])
            tl.store(logits_ptr + row[:, None] * row_stride + last, float("-inf"), mask=_first(last, live, word))


def forbid_tokens(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor,
    lengths: torch.Tensor,
    words: torch.Tensor,
    until: torch.Tensor,
) -> None:
    """See `specdec_kernels.sampling.forbid_tokens`."""
    batch, num_nodes, vocab = logits.shape
    flat, rows, (count, width) = logits.flatten(0, 1), batch * num_nodes, words.shape[1:]
    block_r = triton.next_power_of_2(max(rows, 1)) if current_chip(logits) == "interpreter" else 1
    block_n, block_w = (max(triton.next_power_of_2(max(size, 1)), 2) for size in (num_nodes, min(count, FORBID_TILE)))
    launch(
        _forbid_kernel, (triton.cdiv(rows, block_r) if count else 0,), flat, tokens, mask, positions, history, lengths,
        words, until, rows, flat.stride(0), history.stride(0), num_warps=4, NODES=num_nodes,
        MASK_WORDS=mask.shape[-1], VOCAB=vocab, COUNT=count, WIDTH=width, BLOCK_R=block_r,
        BLOCK_N=block_n, BLOCK_W=block_w,
    )  # fmt: skip
