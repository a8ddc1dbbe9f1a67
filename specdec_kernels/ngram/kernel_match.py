"""Draft trees from the store: one program per request does the three parts.

Anchors. A lane for each suffix length walks from the root of the trie to the node of its suffix.
Walks. What an anchor adds on its own does not depend on the other anchors, and only its first N - 1 nodes can matter,
because the nodes of one walk are distinct nodes of the tree. So all anchors walk at once: a row of the tile [anchors,
entries] holds the nodes taken so far, entry 0 the anchor, each with a cursor to its next child and the weight of that
child. In every row each round takes the entry of largest weight, ties to the lowest entry, appends its next child as a
new entry and moves the cursor. With frequencies as weights this is best first. With equal weights the lowest entry with
children left is the head of a queue, which is breadth first.
Merge. Anchors in order, the longest first, and each walk in its order: a node joins the tree unless its parent has a
child with that token already.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.ngram import kernel_layout as layout
from specdec_kernels.ngram.kernel_lookup import find_suffix


@triton.jit
def _breadth(depth, WINDOW: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, BY_COUNT: tl.constexpr):
    """See `types.breadth_at`; matching by frequency always takes MOST."""
    if BY_COUNT:
        return depth * 0 + MOST
    taken = tl.maximum(LEAST * WINDOW + (WINDOW - depth) * (MOST - LEAST), 0) // WINDOW
    return tl.maximum(taken, 1)


@triton.jit
def _counts(ints_ptr, node, mask, CAPACITY: tl.constexpr):
    return tl.load(ints_ptr + layout.COUNT * CAPACITY + node, mask=mask, other=0)


@triton.jit
def _open(ints_ptr, list_ptr, node, breadth, CAPACITY: tl.constexpr, LISTED: tl.constexpr, BY_COUNT: tl.constexpr):
    """Of `node` [A]: its first listed child (-1: none), that child's count, and the counts of all it may take."""
    place = tl.arange(0, LISTED)[None, :]
    taken = (node >= 0)[:, None] & (place < breadth[:, None])
    child = tl.load(list_ptr + node.to(tl.int64)[:, None] * LISTED + place, mask=taken, other=-1)
    first = tl.sum(tl.where(place == 0, child, 0), 1)
    if BY_COUNT:
        counts = _counts(ints_ptr, child, child >= 0, CAPACITY)
        return first, tl.sum(tl.where(place == 0, counts, 0), 1), tl.sum(counts, 1)
    else:
        return first, first * 0 + 1, first * 0 + 1


@triton.jit
def _weight(probability, count, total, child, BY_COUNT: tl.constexpr):
    """What a child is worth, -1 where there is none; rounded as the reference rounds."""
    if BY_COUNT:
        share = tl.div_rn(probability * count.to(tl.float32), tl.maximum(total, 1).to(tl.float32))
        return tl.where(child >= 0, share, -1.0)
    else:
        return tl.where(child >= 0, probability, -1.0)


@triton.jit
def _walk(
    ints_ptr,
    list_ptr,
    anchor,  # [ANCHORS], -1: none
    size,  # [ANCHORS]: tokens of the suffix
    NODES: tl.constexpr,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BY_COUNT: tl.constexpr,
    CAPACITY: tl.constexpr,
    LISTED: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The first nodes below each anchor: token and parent entry, [ANCHORS, ENTRIES]; parent -1 where nothing is."""
    entry = tl.arange(0, ENTRIES)[None, :]
    blank = anchor[:, None] * 0 + entry * 0
    breadth = _breadth(size, WINDOW, LEAST, MOST, BY_COUNT)
    first, count, total_of = _open(ints_ptr, list_ptr, anchor, breadth, CAPACITY, LISTED, BY_COUNT)
    at_anchor = entry == 0
    token, parent = blank, blank - 1
    child = tl.where(at_anchor, first[:, None], -1)
    cursor = tl.where(at_anchor, anchor[:, None], 0).to(tl.int64) * LISTED
    stop = tl.where(at_anchor, cursor + breadth[:, None], 0)
    depth = tl.where(at_anchor, size[:, None], 0)
    total = tl.where(at_anchor, total_of[:, None], 0)
    probability = blank.to(tl.float32) + 1.0
    weight = _weight(probability, tl.where(at_anchor, count[:, None], 0), total, child, BY_COUNT)
    taken = 1
    while (taken < NODES) & (tl.max(tl.max(weight, 1), 0) >= 0):
        best = tl.max(weight, 1)
        chosen = tl.min(tl.where(weight == best[:, None], entry, ENTRIES), 1)
        going = best >= 0
        source = (entry == chosen[:, None]) & going[:, None]
        node = tl.where(going, tl.sum(tl.where(source, child, 0), 1), -1)
        below = tl.sum(tl.where(source, depth, 0), 1) + 1

        cursor += source.to(tl.int64)
        child = tl.where(source, tl.load(list_ptr + cursor, mask=source & (cursor < stop), other=-1), child)
        count_after = _counts(ints_ptr, child, source & (child >= 0), CAPACITY) if BY_COUNT else blank
        weight = tl.where(source, _weight(probability, count_after, total, child, BY_COUNT), weight)

        breadth = _breadth(below, WINDOW, LEAST, MOST, BY_COUNT)
        first, count, total_of = _open(ints_ptr, list_ptr, node, breadth, CAPACITY, LISTED, BY_COUNT)
        value = tl.load(ints_ptr + layout.TOKEN * CAPACITY + node, mask=going, other=0)
        here = (entry == taken) & going[:, None]
        token = tl.where(here, value[:, None], token)
        parent = tl.where(here, chosen[:, None], parent)
        child = tl.where(here, first[:, None], child)
        cursor = tl.where(here, node.to(tl.int64)[:, None] * LISTED, cursor)
        stop = tl.where(here, cursor + breadth[:, None], stop)
        depth = tl.where(here, below[:, None], depth)
        total = tl.where(here, total_of[:, None], total)
        probability = tl.where(here, best[:, None], probability)
        weight = tl.where(here, _weight(best[:, None], count[:, None], total, child, BY_COUNT), weight)
        taken += 1
    return token, parent


@triton.jit
def _merge(
    token, parent, last_token, NODES: tl.constexpr, WINDOW: tl.constexpr, ANCHORS: tl.constexpr, ENTRIES: tl.constexpr
):
    """One tree of all walks: tokens and parents [ENTRIES]."""
    lane = tl.arange(0, ANCHORS)[:, None]
    entry = tl.arange(0, ENTRIES)
    tree_token = tl.where(entry == 0, last_token, last_token * 0)
    tree_parent = tl.where(entry == 0, -1, -2)
    count = 1
    anchor = 0
    while (anchor < WINDOW) & (count < NODES):
        walk_token = tl.sum(tl.where(lane == anchor, token, 0), 0)
        walk_parent = tl.sum(tl.where(lane == anchor, parent, 0), 0)
        size = tl.sum((walk_parent >= 0).to(tl.int32), 0)
        placed = entry * 0
        taken = 1
        while (taken <= size) & (count < NODES):
            value = tl.sum(tl.where(entry == taken, walk_token, 0), 0)
            source = tl.sum(tl.where(entry == taken, walk_parent, 0), 0)
            above = tl.sum(tl.where(entry == source, placed, 0), 0)
            same = (tree_parent == above) & (tree_token == value)
            place = tl.minimum(tl.min(tl.where(same, entry, ENTRIES), 0), count)
            new = (entry == count) & (place == count)
            tree_token = tl.where(new, value, tree_token)
            tree_parent = tl.where(new, above, tree_parent)
            placed = tl.where(entry == taken, place, placed)
            count += (place == count).to(tl.int32)
            taken += 1
        anchor += 1
    return tree_token, tree_parent


@triton.jit(do_not_specialize=["row_stride", "context"])
def match_kernel(
    history_ptr,  # [B, context] int64
    lengths_ptr,  # [B] int64
    tokens_ptr,  # [B, NODES] int64, out
    parents_ptr,  # [B, NODES] int32, out
    keys_ptr,  # [2^BITS] int64
    nodes_ptr,  # [2^BITS] int32
    ints_ptr,  # [7, CAPACITY] int32
    times_ptr,  # [2, CAPACITY] int64
    lists_ptr,  # [2, CAPACITY, LISTED] int32
    row_stride,
    context,
    NODES: tl.constexpr,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BY_COUNT: tl.constexpr,
    CAPACITY: tl.constexpr,
    LISTED: tl.constexpr,
    BITS: tl.constexpr,
    ANCHORS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    inside = (length >= 0) & (length < context)
    lane = tl.arange(0, ANCHORS)
    size = tl.maximum(WINDOW - lane, 0)
    text_ptr = history_ptr + row * row_stride + lane * 0
    live = (size > 0) & inside
    anchor = find_suffix(
        keys_ptr, nodes_ptr, times_ptr, text_ptr, length + 1, size, live, 0, CAPACITY, BITS, TOUCH=False
    )
    list_ptr = lists_ptr + (layout.FREQUENT if BY_COUNT else layout.RECENT) * CAPACITY * LISTED
    token, parent = _walk(
        ints_ptr, list_ptr, anchor, size, NODES, WINDOW, LEAST, MOST, BY_COUNT, CAPACITY, LISTED, ENTRIES
    )
    last_token = tl.load(history_ptr + row * row_stride + length, mask=inside, other=0)
    tree_token, tree_parent = _merge(token, parent, last_token, NODES, WINDOW, ANCHORS, ENTRIES)
    node = tl.arange(0, ENTRIES)
    tl.store(tokens_ptr + row * NODES + node, tree_token, mask=node < NODES)
    tl.store(parents_ptr + row * NODES + node, tree_parent, mask=node < NODES)
