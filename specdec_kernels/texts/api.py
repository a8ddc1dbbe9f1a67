"""Public functions of the family: arguments are checked here, once for both implementations."""

from __future__ import annotations

import math

import torch

from specdec_kernels.checks import (
    expect_at_least,
    expect_between,
    expect_choice,
    expect_contiguous,
    expect_dtype,
    expect_same_device,
    expect_shape,
)
from specdec_kernels.launch import dispatch
from specdec_kernels.texts.types import LEAST_STEPS, MAX_WINDOW, ORDERS, TextDraft, TextStore


def insert_texts(
    store: TextStore,
    history: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    counts: torch.Tensor,
    width: int,
    impl: str = "auto",
) -> None:
    """Write the tokens at positions `start[b] … start[b] + counts[b]` of each row into its text, in place.

    These are `counts[b]` tokens and the one behind them, the last token of the request. A row that starts at 0 begins a
    new request: its text joins the kept ones, and it gets the oldest of these, emptied. Rows do so in order. Positions
    outside the history are ignored.

    Args:
        store: changed in place.
        history: [B, context] int64, tokens by position; rows may be strided.
        rows: [B] int64, contiguous, different where `counts` is above 0: row of the engine, below the store's.
        start: [B] int64, contiguous.
        counts: [B] int32, contiguous; below 1 leaves a row out.
        width: host bound on `counts`, at least 0.
        impl: `auto`, `triton` or `reference` (plain Python; on a GPU store it reads back to the host).

    Raises:
        ValueError: wrong shape, dtype, strides or devices, `width` below 0, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    _expect_history(store, history)
    batch = history.shape[0]
    given = {"rows": (rows, torch.int64), "start": (start, torch.int64), "counts": (counts, torch.int32)}
    for name, (tensor, dtype) in given.items():
        expect_shape(name, tensor, (batch,))
        expect_dtype(name, tensor, dtype)
    expect_contiguous(rows=rows, start=start, counts=counts)
    expect_same_device(store=store.tokens, history=history, rows=rows, start=start, counts=counts)
    expect_at_least("width", width, 0)
    if width and batch:
        dispatch("insert_texts", __package__, impl, history)(store, history, rows, start, counts, width)


def match_texts(
    store: TextStore,
    history: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    num_nodes: int,
    *,
    order: str,
    window: int,
    matches: int = 16,
    min_confidence: float = 0.0,
    shared: bool = True,
    impl: str = "auto",
) -> TextDraft:
    """Draft trees behind the tokens at positions `lengths`, from what followed the longest matches of their texts.

    Args:
        store: read only.
        history: [B, context] int64, tokens by position; rows may be strided.
        lengths: [B] int64, contiguous: position of the last token of each request, which is node 0 of its tree. Where
            it lies outside the history, node 0 is token 0 and there are no drafts.
        rows: [B] int64, contiguous: row of the engine, whose text is the request's own.
        num_nodes: N, 2 to 256, node 0 included; no path is longer than N - 1.
        order: `latest` (n-gram drafting) or `frequent` (suffix drafting).
        window: longest suffix that is compared, 1 to 63.
        matches: matches that are followed, 1 to 64. One gives a chain.
        min_confidence: least confidence of a draft, 0 to 1, rounded up to a multiple of 1 / 1024.
        shared: whether all texts are read, or the request's own only.
        impl: `auto`, `triton` or `reference` (plain Python; on a GPU store it reads back to the host).

    Returns:
        TextDraft: tokens [B, N] int64, parents [B, N] int32 (-1 at node 0, -2 at unused nodes), strength [B] float32,
            confidence [B, N] float32.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, a size out of range, or an unknown `order` or `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    _expect_history(store, history)
    for name, tensor in (("lengths", lengths), ("rows", rows)):
        expect_shape(name, tensor, (history.shape[0],))
        expect_dtype(name, tensor, torch.int64)
    expect_contiguous(lengths=lengths, rows=rows)
    expect_same_device(store=store.tokens, history=history, lengths=lengths, rows=rows)
    expect_choice("order", order, ORDERS)
    expect_between("num_nodes", num_nodes, 2, 256)
    expect_between("window", window, 1, MAX_WINDOW)
    expect_between("matches", matches, 1, 64)
    expect_between("min_confidence", min_confidence, 0, 1)
    match = dispatch("match_texts", __package__, impl, history)
    sure = math.ceil(min_confidence * LEAST_STEPS)
    draft: TextDraft = match(store, history, lengths, rows, num_nodes, order, window, matches, sure, shared)
    return draft


def _expect_history(store: TextStore, history: torch.Tensor) -> None:
    """Raise ValueError unless `history` is [B, context] int64 with contiguous rows, of the store's context."""
    expect_shape("history", history, (None, store.tokens.shape[1]))
    expect_dtype("history", history, torch.int64)
    if history.shape[1] > 1 and history.stride(1) != 1:
        raise ValueError(f"history: expected contiguous rows, got strides {history.stride()}")
