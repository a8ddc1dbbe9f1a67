"""Device functions that every n-gram kernel shares: keys, probing, and the walk from the root along a text."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.ngram import kernel_layout as layout


@triton.jit
def is_token(token):
    return (token >= 0) & (token <= layout.MAX_TOKEN)


@triton.jit
def child_key(parent, token):
    """The exact name of a child, int64 >= 0; `token` must be one."""
    return ((parent.to(tl.int64) + 1) << 32) | token


@triton.jit
def first_cell(key, BITS: tl.constexpr):
    """Where probing for `key` begins in a table of 2^BITS cells."""
    mixed = key.to(tl.uint64) * layout.HASH_FIRST
    mixed = (mixed ^ (mixed >> 32)) * layout.HASH_SECOND
    return (mixed >> (64 - BITS)).to(tl.int64)


@triton.jit
def find_child(keys_ptr, nodes_ptr, parent, token, active, BITS: tl.constexpr):
    """Node of the child, -1 where there is none; nothing may be inserting at the same time."""
    searching = active & is_token(token)
    key = tl.where(searching, child_key(parent, token), 0)
    cell = first_cell(key, BITS)
    hit = searching & (token < 0)
    while tl.max(searching.to(tl.int32), 0) > 0:
        seen = tl.load(keys_ptr + cell, mask=searching, other=layout.EMPTY)
        hit |= searching & (seen == key)
        searching = searching & (seen != key) & (seen != layout.EMPTY)
        cell = tl.where(searching, (cell + 1) & ((1 << BITS) - 1), cell)
    return tl.load(nodes_ptr + cell, mask=hit, other=layout.ROOT)


@triton.jit
def find_suffix(
    keys_ptr,
    nodes_ptr,
    times_ptr,
    text_ptr,  # a pointer a lane: the token at position 0 of its row
    end,
    size,
    live,
    epoch,
    CAPACITY: tl.constexpr,
    BITS: tl.constexpr,
    TOUCH: tl.constexpr,
):
    """Node of the `size` tokens that end before position `end`, -1 where the store has none or the text is shorter.

    With TOUCH every node on the way is marked as used by insertion `epoch`.
    """
    position = end - size
    walking = live & (position >= 0) & (size > 0)
    node = tl.where(walking, layout.ROOT, layout.ROOT)
    while tl.max(walking.to(tl.int32), 0) > 0:
        token = tl.load(text_ptr + position, mask=walking, other=-1)
        found = find_child(keys_ptr, nodes_ptr, node, token, walking, BITS)
        node = tl.where(walking, found, node)
        position += 1
        walking = walking & (found >= 0)
        if TOUCH:
            tl.atomic_max(times_ptr + layout.USED * CAPACITY + node, epoch, mask=walking, sem="relaxed")
        walking = walking & (position < end)
    return node
