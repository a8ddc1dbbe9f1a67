"""A device-resident store of n-grams that drafts: what followed the last tokens before, is proposed again.

The store is a trie of every n-gram of at most D = `max_depth` tokens in the texts inserted. Each node, an n-gram, knows
how often it occurred and the stamp of its last occurrence: the running number, over all tokens ever inserted, of the
last of its tokens. After each step the newly committed tokens are inserted: for a token at position e, the n-grams of 1
to D tokens that end at e, each once. So a text inserted step by step counts as if inserted whole, at any length.

Matching takes the suffixes of a request's text, the longest first, and merges what followed them into one tree until
its nodes are used up. With `bfs` a suffix's continuations are walked breadth first, of each node its latest
`types.breadth_at(depth)` children: fewer the longer the match. With `prob` they are walked best first by the product
over the path of count / (sum of the counts of the `max_breadth` most frequent siblings), ties to what was seen first.
These are the rules of SGLang's n-gram drafter; three of its habits are left behind: it counts the last D tokens anew in
each step, never indexes more of a prompt than these, and pads its trees with drafts of token 0.

Order of execution cannot change what the store holds. In one insertion every (row, window, length) is an occurrence of
one n-gram, found or created by compare-and-swap on its exact key; counts are sums and stamps maxima of numbers fixed
beforehand (row after row, each row in order). The lists of best children are written after that, in a launch of their
own, each by one program, and are the top of a set under a strict order. Only the numbers of nodes depend on who came
first.

Capacity: an insertion of T tokens that might not fit (live nodes + T * D > capacity) first evicts. Every node knows the
last insertion whose windows went through it, which for a parent is never earlier than for its children. The nodes used
by the latest insertions are kept, as many insertions as fit half of the capacity. An insertion that could need more
than the other half is carried out in pieces (`types.insertion_pieces`), each with its own eviction, so the store never
overflows. A window whose beginning has been evicted is not continued.
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import use_triton
from specdec_kernels.ngram import reference
from specdec_kernels.ngram.types import NgramDraft, NgramStore, insertion_pieces

__all__ = ["NgramDraft", "NgramStore", "ngram_insert", "ngram_match"]

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

    Tokens before `start[b]` are the beginnings of these n-grams and are not counted again; they count as
    inserted by earlier calls, and an n-gram whose beginning the store does not hold is left out. A token outside
    [0, 2^31) belongs to no n-gram. Positions outside the history, and columns past `width`, are ignored.

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
    expect_history(store, history)
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
    pieces = insertion_pieces(store.capacity, store.max_depth, batch, width)
    insert = reference.ngram_insert
    if use_triton(impl, history):
        import specdec_kernels.ngram.kernel as kernel

        insert = kernel.ngram_insert
    for rows, first, columns in pieces:
        insert(store, history[rows], start[rows] + first, counts[rows] - first, columns)


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
        lengths: [B] int64, contiguous: position of each root. A row whose root lies outside the history gets a root 0
            and no drafts.
        num_nodes: N, 1 to 256, the root included.
        window: longest suffix, 1 to `store.max_depth` - 1.
        min_breadth, max_breadth: children taken of one node; 1 <= min <= max <= `store.max_breadth`, which is what None
            means. `bfs` would take max_breadth behind an empty match, min_breadth behind `window` tokens, and goes on
            along this line beyond, to no less than one; `prob` takes max_breadth.
        mode: `bfs` (recency) or `prob` (frequency).
        impl: `auto`, `triton` or `reference` (plain Python; on a GPU store it reads back to the host).

    Returns:
        NgramDraft: tokens [B, N] int64 (node 0 the root; 0 at unused nodes), parents [B, N] int32 (-1 at the root, -2
            at unused nodes, so that `build_tree` never links them).

    Raises:
        ValueError: wrong shape, dtype, strides or devices, a size out of range, or an unknown `mode` or `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_history(store, history)
    expect_shape("lengths", lengths, (history.shape[0],))
    expect_dtype("lengths", lengths, torch.int64)
    expect_contiguous(lengths=lengths)
    expect_same_device(store=store.keys, history=history, lengths=lengths)
    breadth = store.max_breadth if max_breadth is None else max_breadth
    expect_sizes(store, num_nodes, window, min_breadth, breadth)
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    match = reference.ngram_match
    if use_triton(impl, history):
        import specdec_kernels.ngram.kernel as kernel

        match = kernel.ngram_match
    return match(store, history, lengths, num_nodes, window, min_breadth, breadth, mode)


def expect_history(store: NgramStore, history: torch.Tensor) -> None:
    """Raise ValueError unless `history` is [B, context] int64 with contiguous rows."""
    expect_shape("history", history, (None, None))
    expect_dtype("history", history, torch.int64)
    if history.shape[1] > 1 and history.stride(1) != 1:
        raise ValueError(f"history: expected contiguous rows, got strides {history.stride()}")


def expect_sizes(store: NgramStore, num_nodes: int, window: int, min_breadth: int, max_breadth: int) -> None:
    """Raise ValueError unless the sizes of a match fit each other and the store."""
    if not 1 <= num_nodes <= 256:
        raise ValueError(f"num_nodes: expected 1 to 256, got {num_nodes}")
    if not 1 <= window <= store.max_depth - 1:
        raise ValueError(f"window: expected 1 to max_depth - 1 = {store.max_depth - 1}, got {window}")
    if not 1 <= min_breadth <= max_breadth <= store.max_breadth:
        raise ValueError(
            f"breadth: expected 1 <= min <= max <= {store.max_breadth}, got min {min_breadth}, max {max_breadth}"
        )
