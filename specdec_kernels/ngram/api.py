"""Public functions of the family: arguments are checked here, once for both implementations."""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import dispatch
from specdec_kernels.ngram.types import NgramDraft, NgramStore

MODES = ("bfs", "prob")


def ngram_insert(
    store: NgramStore,
    history: torch.Tensor,
    start: torch.Tensor,
    counts: torch.Tensor,
    width: int,
    impl: str = "auto",
) -> None:
    """Insert, in place, the n-grams that end at positions `start[b] … start[b] + counts[b] - 1` of each row.

    Tokens before `start[b]` are the beginnings of these n-grams. They are not counted again: earlier calls have
    inserted them, and an n-gram whose beginning the store does not hold is left out. A token outside [0, 2^31)
    belongs to no n-gram. Positions outside the history, and columns past `width`, are ignored.

    Of more than `store.insertion_limit` tokens only the last ones of each row are entered: as many of every row as fit,
    and one more of the first rows that have more.

    Args:
        store: changed in place.
        history: [B, context] int64, tokens by position; rows may be strided.
        start: [B] int64, contiguous.
        counts: [B] int32, contiguous; below 1 leaves a row out.
        width: host bound on `counts`, at least 0.
        impl: `auto`, `triton` or `reference` (plain Python; on a GPU store it reads back to the host).

    Raises:
        ValueError: wrong shape, dtype, strides or devices, `width` below 0, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    _expect_history(history)
    batch = history.shape[0]
    expect_shape("start", start, (batch,))
    expect_shape("counts", counts, (batch,))
    expect_dtype("start", start, torch.int64)
    expect_dtype("counts", counts, torch.int32)
    expect_contiguous(start=start, counts=counts)
    expect_same_device(store=store.keys, history=history, start=start, counts=counts)
    if width < 0:
        raise ValueError(f"width: expected at least 0, got {width}")
    if width == 0 or batch == 0:
        return
    dispatch("ngram_insert", __package__, impl, history)(store, history, start, counts, width)


def ngram_match(
    store: NgramStore,
    history: torch.Tensor,
    lengths: torch.Tensor,
    num_nodes: int,
    *,
    window: int,
    min_breadth: int = 1,
    max_breadth: int | None = None,
    mode: str = "bfs",
    impl: str = "auto",
) -> NgramDraft:
    """Draft trees behind the tokens at positions `lengths`, from what followed the suffixes that end there.

    Suffixes of 1 to `window` tokens are looked up; those that the store never saw continued give nothing. A path
    of the tree together with its suffix is an n-gram of the store, so no path is longer than `max_depth` - 1.

    Args:
        store: read only.
        history: [B, context] int64, tokens by position; rows may be strided.
        lengths: [B] int64, contiguous: position of the last token of each request, which is node 0 of its tree. Where
            it lies outside the history, node 0 is token 0 and there are no drafts.
        num_nodes: N, 1 to 256, node 0 included.
        window: longest suffix, 1 to `store.max_depth` - 1.
        min_breadth, max_breadth: children taken of one node; 1 <= min <= max <= `store.max_breadth`, which is the
            meaning of None. `bfs` would take max_breadth behind an empty match and min_breadth behind `window` tokens;
            it continues along this line for longer matches, down to one. `prob` takes max_breadth.
        mode: `bfs` (recency) or `prob` (frequency).
        impl: `auto`, `triton` or `reference` (plain Python; on a GPU store it reads back to the host).

    Returns:
        NgramDraft: tokens [B, N] int64 (0 at unused nodes), parents [B, N] int32 (-1 at node 0, -2 at unused nodes, so
            that `build_tree` never links them).

    Raises:
        ValueError: wrong shape, dtype, strides or devices, a size out of range, or an unknown `mode` or `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    _expect_history(history)
    expect_shape("lengths", lengths, (history.shape[0],))
    expect_dtype("lengths", lengths, torch.int64)
    expect_contiguous(lengths=lengths)
    expect_same_device(store=store.keys, history=history, lengths=lengths)
    most = store.max_breadth if max_breadth is None else max_breadth
    if not 1 <= num_nodes <= 256:
        raise ValueError(f"num_nodes: expected 1 to 256, got {num_nodes}")
    if not 1 <= window <= store.max_depth - 1:
        raise ValueError(f"window: expected 1 to max_depth - 1 = {store.max_depth - 1}, got {window}")
    if not 1 <= min_breadth <= most <= store.max_breadth:
        raise ValueError(f"breadth: expected 1 <= min <= max <= {store.max_breadth}, got min {min_breadth}, max {most}")
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    match = dispatch("ngram_match", __package__, impl, history)
    draft: NgramDraft = match(store, history, lengths, num_nodes, window, min_breadth, most, mode)
    return draft


def _expect_history(history: torch.Tensor) -> None:
    """Raise ValueError unless `history` is [B, context] int64 with contiguous rows."""
    expect_shape("history", history, (None, None))
    expect_dtype("history", history, torch.int64)
    if history.shape[1] > 1 and history.stride(1) != 1:
        raise ValueError(f"history: expected contiguous rows, got strides {history.stride()}")
