"""The n-gram store, and the drafts that matching returns.

The store is a trie of n-grams with at most `max_depth` tokens, laid out in tensors of fixed size. A node is a number in
[0, capacity); the root of the trie is the number -1 and has no storage. A child is found through an open-addressed hash
table with linear probing whose key, (parent + 1) * 2^32 + token, names the child exactly: no two n-grams share a key.

The number of a node, and the cell of its key, may depend on the order in which concurrent programs run. What the store
holds does not: see `specdec_kernels.ngram`. Two stores are therefore compared by their `contents`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from specdec_kernels.launch import lanes

ROOT = -1
EMPTY = -1
MAX_TOKEN = (1 << 31) - 1

# Multipliers of the hash of a key.
HASH_FIRST = 0x9E3779B97F4A7C15
HASH_SECOND = 0xD6E8FEB86659FD93

# Rows of `NgramStore.ints` and `times`, planes of `lists`, entries of `counters`.
INT_ROWS = PARENT, TOKEN, COUNT, HEAD, NEXT, FREE, WORK = tuple(range(7))
TIME_ROWS = STAMP, USED = tuple(range(2))
LIST_PLANES = RECENT, FREQUENT = tuple(range(2))
COUNTERS = LIVE, EPOCH, CLOCK, BASE, CUT, NUM_WORK, FULL, NUM_FREED = tuple(range(8))

# Eviction counts nodes by the age of their last use, in bins of so many significant bits.
AGE_BITS, MAX_AGE_BITS = 11, 41
NUM_BINS = (MAX_AGE_BITS - AGE_BITS + 2) << (AGE_BITS - 1)


class NgramDraft(NamedTuple):
    """Draft trees of a batch: node 0 is the last token; unused nodes have parent -2 and must never be linked."""

    tokens: torch.Tensor
    """[B, N] int64."""
    parents: torch.Tensor
    """[B, N] int32; parents come before children."""


class NgramStore:
    """Device tensors of one store; `create` makes an empty one. They are changed in place and never replaced.

    keys: [cells] int64, key of the child in each cell, -1 where empty; cells is a power of two, at least 2 * capacity.
    nodes: [cells] int32, the node of each key.
    ints: [7, capacity] int32. Of a node: parent, token (-1: the node is free), count of occurrences. Of a node during
        an insertion: head of the chain of its changed children, next child in its parent's chain. Lists: free node
        numbers (from entry `live` on), parents with changed children.
    times: [2, capacity] int64: stamp of the last occurrence, and number of the last insertion that used the node.
    lists: [2, capacity, list_width] int32: a node's children by falling stamp, and by falling count (ties: lower token
        first), as many as there are, then -1.
    counters: [8] int64: live nodes, insertions, tokens, and for the running insertion its first stamp, the oldest
        insertion that survives it (0: nothing is evicted), length of the list of parents, whether the store is full
        (1), nodes freed.
    ages: [NUM_BINS] int32: nodes by age while nodes are evicted, else zeros.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        nodes: torch.Tensor,
        ints: torch.Tensor,
        times: torch.Tensor,
        lists: torch.Tensor,
        counters: torch.Tensor,
        ages: torch.Tensor,
        max_depth: int,
        max_breadth: int,
    ) -> None:
        self.keys, self.nodes, self.ints = keys, nodes, ints
        self.times, self.lists, self.counters, self.ages = times, lists, counters, ages
        self.max_depth, self.max_breadth = max_depth, max_breadth

    @classmethod
    def create(cls, capacity: int, max_depth: int, max_breadth: int, device: torch.device | str) -> NgramStore:
        """An empty store of `capacity` nodes for n-grams of up to `max_depth` tokens.

        `max_breadth` bounds the children that matching may take of one node. Memory: about
        70 + 8 * max_breadth bytes per node. Raises ValueError where a size is out of range.
        """
        if not 2 <= max_depth <= 256:
            raise ValueError(f"max_depth: expected 2 to 256, got {max_depth}")
        if not 1 <= max_breadth <= 32:
            raise ValueError(f"max_breadth: expected 1 to 32, got {max_breadth}")
        if not 2 * max_depth <= capacity <= 1 << 24:
            raise ValueError(f"capacity: expected 2 * max_depth = {2 * max_depth} to {1 << 24}, got {capacity}")
        cells, width = lanes(2 * capacity), lanes(max_breadth)
        ints = torch.full((7, capacity), -1, dtype=torch.int32, device=device)
        ints[COUNT] = 0
        ints[FREE] = torch.arange(capacity, dtype=torch.int32, device=device)
        return cls(
            torch.full((cells,), EMPTY, dtype=torch.int64, device=device),
            torch.full((cells,), -1, dtype=torch.int32, device=device),
            ints,
            torch.full((2, capacity), -1, dtype=torch.int64, device=device),
            torch.full((2, capacity, width), -1, dtype=torch.int32, device=device),
            torch.zeros(len(COUNTERS), dtype=torch.int64, device=device),
            torch.zeros(NUM_BINS, dtype=torch.int32, device=device),
            max_depth,
            max_breadth,
        )

    @property
    def capacity(self) -> int:
        return self.ints.shape[1]

    @property
    def insertion_limit(self) -> int:
        """Most tokens that one insertion enters: their n-grams fit the half of the store that eviction can free."""
        return self.capacity // 2 // self.max_depth

    @property
    def list_width(self) -> int:
        return self.lists.shape[2]

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.keys, self.nodes, self.ints, self.times, self.lists, self.counters, self.ages)

    def to(self, device: torch.device | str) -> NgramStore:
        """The store on `device`: a copy, or the same tensors where they are there already."""
        keys, nodes, ints, times, lists, counters, ages = (tensor.to(device) for tensor in self.tensors())
        return NgramStore(keys, nodes, ints, times, lists, counters, ages, self.max_depth, self.max_breadth)

    def contents(self) -> dict[str, torch.Tensor]:
        """What the store holds, independent of node numbers and of the layout of the hash table.

        With n live nodes, ordered by n-gram: `grams` [n, max_depth] (last token first, -1 padded), `counts`, `stamps`,
        `used` [n], `lists` [n, 2, list_width] (tokens of the listed children, -1 padded), `found` [n] (whether the hash
        table leads to the node), `totals` [3]: live nodes, insertions, tokens, and `spare` [capacity - n]: 0
        for each number that is rightly on the list of free ones, else -1. Reads back to the host.
        """
        live = (self.ints[TOKEN] >= 0).nonzero()[:, 0]
        node, columns = live.int(), []
        for _ in range(self.max_depth):
            columns.append(self._tokens_of(node))
            node = torch.where(node >= 0, self.ints[PARENT][node.clamp(min=0).long()], ROOT)
        grams = torch.stack(columns, 1)
        order = torch.arange(len(live), device=self.device)
        for column in reversed(columns):
            order = order[column[order].argsort(stable=True)]
        live = live[order]
        filled = self.keys != EMPTY
        at = torch.full((self.capacity,), -1, dtype=torch.int64, device=self.device)
        at[self.nodes[filled].long()] = self.keys[filled]
        wanted = ((self.ints[PARENT].long() + 1) << 32) | self.ints[TOKEN].long()
        return dict(
            grams=grams[order],
            counts=self.ints[COUNT][live],
            stamps=self.times[STAMP][live],
            used=self.times[USED][live],
            lists=self._tokens_of(self.lists[:, live].transpose(0, 1)),
            found=(at == wanted)[live],
            totals=self.counters[:3].clone(),
            spare=self._spare(),
        )

    def _spare(self) -> torch.Tensor:
        """[free nodes]: 0 for each number that is rightly on the list of free ones, else -1."""
        listed = self.ints[FREE][int(self.counters[LIVE]) :].long().sort().values
        free = (self.ints[TOKEN] < 0).nonzero()[:, 0]
        if len(listed) != len(free):
            return torch.full_like(free, -1)
        return torch.where(listed == free, 0, -1)

    def _tokens_of(self, nodes: torch.Tensor) -> torch.Tensor:
        return torch.where(nodes >= 0, self.ints[TOKEN][nodes.clamp(min=0).long()], -1)

    def _asdict(self) -> dict[str, torch.Tensor]:
        """The contents, for comparisons that look into named tuples."""
        return self.contents()

    def __iter__(self) -> Iterator[Any]:
        """The constructor's arguments."""
        return iter((*self.tensors(), self.max_depth, self.max_breadth))


def entered_counts(counts: Sequence[int], limit: int) -> list[int]:
    """How many tokens of each row one insertion of at most `limit` tokens enters: rows share it evenly, and the first
    of those that have more take what is left over."""
    if sum(counts) <= limit:
        return list(counts)
    low, high = 0, max(counts)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(min(count, middle) for count in counts) <= limit else (low, middle - 1)
    more = limit - sum(min(count, low) for count in counts)
    entered = []
    for count in counts:
        one_more = count > low and more > 0
        more -= one_more
        entered.append(min(count, low + one_more))
    return entered


def age_bin(age: int) -> int:
    """Ages below 2^11 have bins of their own; older ones share one where their first 11 bits are equal."""
    shift = max(0, min(age.bit_length(), MAX_AGE_BITS) - AGE_BITS)
    return min((shift << (AGE_BITS - 1)) + (age >> shift), NUM_BINS - 1)


def youngest_of(age_bin: int) -> int:
    """The lowest age of a bin."""
    shift = max(0, (age_bin >> (AGE_BITS - 1)) - 1)
    return (age_bin - (shift << (AGE_BITS - 1))) << shift


def breadth_at(depth: int, window: int, min_breadth: int, max_breadth: int) -> int:
    """Children that breadth-first matching takes of a node at `depth`: fewer the longer the n-gram, at least one."""
    return max(1, max(0, min_breadth * window + (window - depth) * (max_breadth - min_breadth)) // window)
