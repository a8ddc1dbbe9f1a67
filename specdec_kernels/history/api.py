"""Public functions of the family. The reference is plain Python, which reads back to the host."""

import math

import torch
from torch import Tensor

from specdec_kernels.checks import expect_at_least, expect_between, expect_choice, expect_strided, expect_tensors
from specdec_kernels.history.types import MAX_NGRAM, MIN_PROB_UNIT, ORDERS, HistoryDraft, HistoryStore, MatchOptions
from specdec_kernels.launch import dispatch


def insert_histories(
    store: HistoryStore, history: Tensor, slots: Tensor, start: Tensor, counts: Tensor, width: int, impl: str = "auto"
) -> None:
    """Write the tokens at positions `start[b]` to `start[b] + counts[b]` into the history of each batch slot, in place.

    These are `counts[b]` tokens and the one after them, the last token of the request. A slot that starts at 0 begins a
    new request: its history joins the kept ones, and it gets the oldest of these, emptied. Slots do so in order.
    Positions outside the history are ignored.

    Args:
        history: [B, context] int64, tokens by position; rows may be strided.
        slots: [B] int64, contiguous, different where `counts` is above 0: batch slot, below the store's.
        start: [B] int64, contiguous.
        counts: [B] int32, contiguous; below 1 leaves a request out.
        width: host bound on `counts`, at least 0.
    """
    _expect_history(store, history)
    batch = history.shape[0]
    expect_tensors(
        {"store": store.tokens, "history": history},
        slots=(slots, (batch,), torch.int64),
        start=(start, (batch,), torch.int64),
        counts=(counts, (batch,), torch.int32),
    )
    expect_at_least("width", width, 0)
    if width and batch:
        dispatch("insert_histories", __package__, impl, history)(store, history, slots, start, counts, width)


def match_histories(
    store: HistoryStore,
    history: Tensor,
    lengths: Tensor,
    slots: Tensor,
    num_nodes: int,
    *,
    order: str,
    max_ngram: int,
    max_candidates: int = 16,
    min_path_prob: float = 0.0,
    shared: bool = True,
    impl: str = "auto",
) -> HistoryDraft:
    """Draft trees after the tokens at positions `lengths`, from what followed the longest matches of their histories.

    Args:
        history: [B, context] int64, tokens by position; rows may be strided.
        lengths: [B] int64, contiguous: position of the last token of each request, which is node 0 of its tree. Where
            it lies outside the history, node 0 is token 0 and there are no drafts.
        slots: [B] int64, contiguous: batch slot, whose history is the request's own.
        num_nodes: N, 2 to 256, node 0 included; no path is longer than N - 1.
        order: `latest` (n-gram drafting) or `frequent` (suffix drafting).
        max_ngram: longest suffix that is compared, 1 to 63.
        max_candidates: matches that are followed and that vote, 1 to 64: the longest, of equal ones the latest. One
            gives a chain.
        min_path_prob: least path probability of a draft, 0 to 1, rounded up to a multiple of 1 / 1024.
        shared: whether all histories are read, or the request's own only.
    """
    _expect_history(store, history)
    expect_tensors(
        {"store": store.tokens, "history": history},
        lengths=(lengths, (history.shape[0],), torch.int64),
        slots=(slots, (history.shape[0],), torch.int64),
    )
    expect_choice("order", order, ORDERS)
    expect_between("num_nodes", num_nodes, 2, 256)
    expect_between("max_ngram", max_ngram, 1, MAX_NGRAM)
    expect_between("max_candidates", max_candidates, 1, 64)
    expect_between("min_path_prob", min_path_prob, 0, 1)
    least = math.ceil(min_path_prob * MIN_PROB_UNIT)
    options = MatchOptions(num_nodes, order, max_ngram, max_candidates, least, shared)
    return dispatch("match_histories", __package__, impl, history)(store, history, lengths, slots, options)


def _expect_history(store: HistoryStore, history: Tensor) -> None:
    """Raise ValueError unless `history` is [B, context] int64, of the store's context; rows may be strided."""
    expect_strided(history=(history, (None, store.tokens.shape[1]), torch.int64))
