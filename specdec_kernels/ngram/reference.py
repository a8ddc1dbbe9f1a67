"""Definition of the n-gram store in plain Python, on the same tensors: one implementation can go on with the other's.

The code follows the definition in the package's docstring, without vectorisation. numpy shares the memory of the
tensors on the CPU.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
from collections import Counter, deque

import torch

from specdec_kernels.ngram.types import (
    BASE,
    CLOCK,
    COUNT,
    CUT,
    EMPTY,
    EPOCH,
    FREE,
    FREQUENT,
    HASH_FIRST,
    HASH_SECOND,
    LIVE,
    MAX_TOKEN,
    PARENT,
    RECENT,
    ROOT,
    STAMP,
    TOKEN,
    USED,
    NgramDraft,
    NgramStore,
    age_bin,
    breadth_at,
    entered_counts,
    youngest_of,
)

_WORD = (1 << 64) - 1


class Trie:
    """The store's tensors as a trie of numbered nodes; the root is -1."""

    def __init__(self, store: NgramStore) -> None:
        self.keys, self.nodes, self.ints, self.times, self.lists, self.counters, _ = (
            tensor.numpy() for tensor in store.tensors()
        )
        self.capacity, self.depth, self.breadth = store.capacity, store.max_depth, store.max_breadth
        self._bits = len(self.keys).bit_length() - 1

    def _cell(self, parent: int, token: int) -> tuple[int, int]:
        """The cell of a child, or the empty one where it would go, and its key."""
        key = ((parent + 1) << 32) | token
        mixed = (key * HASH_FIRST) & _WORD
        mixed = ((mixed ^ (mixed >> 32)) * HASH_SECOND) & _WORD
        cell = mixed >> (64 - self._bits)
        while self.keys[cell] not in (key, EMPTY):
            cell = (cell + 1) % len(self.keys)
        return cell, key

    def child(self, parent: int, token: int) -> int | None:
        if not 0 <= token <= MAX_TOKEN:
            return None
        cell, key = self._cell(parent, token)
        return int(self.nodes[cell]) if self.keys[cell] == key else None

    def find(self, gram: list[int], epoch: int | None = None) -> int | None:
        """The node of an n-gram; with `epoch`, every node on the way is marked as used by it."""
        node = ROOT
        for token in gram:
            found = self.child(node, token)
            if found is None:
                return None
            node = found
            if epoch is not None:
                self.times[USED, node] = epoch
        return node

    def occurs(self, parent: int, token: int, stamp: int) -> int:
        """Count one occurrence of a child, which is created if need be."""
        node = self.child(parent, token)
        if node is None:
            node = int(self.ints[FREE, self.counters[LIVE]])
            self.counters[LIVE] += 1
            self.ints[PARENT, node], self.ints[TOKEN, node] = parent, token
            self._enter(node)
        self.ints[COUNT, node] += 1
        self.times[STAMP, node], self.times[USED, node] = stamp, self.counters[EPOCH]
        return node

    def _enter(self, node: int) -> None:
        cell, key = self._cell(int(self.ints[PARENT, node]), int(self.ints[TOKEN, node]))
        self.keys[cell], self.nodes[cell] = key, node

    def make_room(self, tokens: int) -> None:
        """Begin an insertion of so many tokens: number it, and evict if it might not fit."""
        self.counters[BASE] = self.counters[CLOCK]
        self.counters[EPOCH] += 1
        self.counters[CLOCK] += tokens
        self.counters[CUT] = 0
        if self.counters[LIVE] + tokens * self.depth > self.capacity:
            self.counters[CUT] = self._oldest_kept()
            self._evict(int(self.counters[CUT]))

    def _oldest_kept(self) -> int:
        """The first insertion from which on the nodes used last fit half of the capacity, at the end of a bin."""
        epoch, used = int(self.counters[EPOCH]), self.times[USED]
        numbers = Counter(age_bin(epoch - last) for last in used[used >= 0].tolist())
        kept, fitting = 0, 0
        while kept + numbers[fitting] <= self.capacity // 2:
            kept += numbers[fitting]
            fitting += 1
        return epoch - youngest_of(fitting) + 1

    def _evict(self, cut: int) -> None:
        keep = self.times[USED] >= cut
        self.ints[TOKEN, ~keep], self.ints[COUNT, ~keep], self.times[:, ~keep] = -1, 0, -1
        kept, dead = keep.nonzero()[0], (~keep).nonzero()[0]
        self.counters[LIVE] = len(kept)
        self.ints[FREE, len(kept) :] = dead
        self.keys[:], self.nodes[:], self.lists[:] = EMPTY, -1, -1
        children: dict[int, set[int]] = {}
        for node in kept.tolist():
            self._enter(node)
            children.setdefault(int(self.ints[PARENT, node]), set()).add(node)
        self.relist(children)

    def relist(self, changed: dict[int, set[int]]) -> None:
        """Bring the lists of parents up to date with their changed children."""
        width = self.lists.shape[2]
        for parent, children in changed.items():
            if parent == ROOT:
                continue
            for plane, score in ((RECENT, self._recency), (FREQUENT, self._frequency)):
                listed = [node for node in self.lists[plane, parent].tolist() if node >= 0]
                best = sorted(children.union(listed), key=score, reverse=True)[:width]
                self.lists[plane, parent] = best + [-1] * (width - len(best))

    def _recency(self, node: int) -> int:
        return int(self.times[STAMP, node])

    def _frequency(self, node: int) -> tuple[int, int]:
        return int(self.ints[COUNT, node]), -int(self.ints[TOKEN, node])

    def children(self, node: int, plane: int, breadth: int) -> list[int]:
        return [child for child in self.lists[plane, node, :breadth].tolist() if child >= 0]


class Tree:
    """A draft tree under construction; nodes with one parent and one token are one node."""

    def __init__(self, last_token: int, num_nodes: int) -> None:
        self.tokens, self.parents = [last_token], [-1]
        self._num_nodes = num_nodes
        self._known: dict[tuple[int, int], int] = {}

    @property
    def full(self) -> bool:
        return len(self.tokens) == self._num_nodes

    def place(self, parent: int, token: int) -> int | None:
        """The child of `parent` with `token`, created while nodes are left."""
        if (parent, token) not in self._known:
            if self.full:
                return None
            self._known[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return self._known[parent, token]


def ngram_insert(
    store: NgramStore, history: torch.Tensor, start: torch.Tensor, counts: torch.Tensor, width: int
) -> None:
    """See `specdec_kernels.ngram_insert`, which has checked the arguments."""
    host = store.to("cpu")
    trie, context = Trie(host), history.shape[1]
    begin = start.tolist()
    usable = [max(0, min(c, width, context - s)) if s >= 0 else 0 for c, s in zip(counts.tolist(), begin, strict=True)]
    count = entered_counts(usable, store.insertion_limit)
    begin = [s + whole - c for s, whole, c in zip(begin, usable, count, strict=True)]
    trie.make_room(sum(count))
    epoch, stamp = int(trie.counters[EPOCH]), int(trie.counters[BASE])
    texts = [row[max(0, s - trie.depth) : s + c].tolist() for row, s, c in zip(history, begin, count, strict=True)]
    known = [_beginnings(trie, t[: len(t) - c], epoch) if c else {} for t, c in zip(texts, count, strict=True)]
    changed: dict[int, set[int]] = {}
    for text, windows, new in zip(texts, known, count, strict=True):
        for token in text[len(text) - new :]:
            windows = _extend(trie, windows, token, stamp, changed)
            stamp += 1
    trie.relist(changed)
    for mine, theirs in zip(store.tensors(), host.tensors(), strict=True):
        mine.copy_(theirs)


def _beginnings(trie: Trie, text: list[int], epoch: int) -> dict[int, int]:
    """Length to node of the suffixes of `text` that the store holds; windows continue from them."""
    found = {n: trie.find(text[-n:], epoch) for n in range(1, min(trie.depth - 1, len(text)) + 1)}
    return {length: node for length, node in found.items() if node is not None}


def _extend(
    trie: Trie, windows: dict[int, int], token: int, stamp: int, changed: dict[int, set[int]]
) -> dict[int, int]:
    """All windows extended by `token`, and the one that begins with it."""
    if not 0 <= token <= MAX_TOKEN:
        return {}
    longer = {}
    for length, node in {0: ROOT, **windows}.items():
        child = trie.occurs(node, token, stamp)
        changed.setdefault(node, set()).add(child)
        if length + 1 < trie.depth:
            longer[length + 1] = child
    return longer


def ngram_match(
    store: NgramStore,
    history: torch.Tensor,
    lengths: torch.Tensor,
    num_nodes: int,
    window: int,
    min_breadth: int,
    max_breadth: int,
    mode: str,
) -> NgramDraft:
    """See `specdec_kernels.ngram_match`, which has checked the arguments."""
    trie, context = Trie(store.to("cpu")), history.shape[1]
    tokens = torch.zeros(len(lengths), num_nodes, dtype=torch.int64)
    parents = torch.full((len(lengths), num_nodes), -2, dtype=torch.int32)
    parents[:, 0] = -1
    breadths = [breadth_at(depth, window, min_breadth, max_breadth) for depth in range(trie.depth + 1)]
    for row, length in enumerate(lengths.tolist()):
        if not 0 <= length < context:
            continue
        text = history[row, max(0, length + 1 - window) : length + 1].tolist()
        tree = Tree(text[-1], num_nodes)
        for size in range(len(text), 0, -1):
            anchor = trie.find(text[-size:])
            if anchor is not None and mode == "bfs":
                _draft_recent(trie, tree, anchor, size, breadths)
            elif anchor is not None:
                _draft_frequent(trie, tree, anchor, max_breadth)
        tokens[row, : len(tree.tokens)] = torch.tensor(tree.tokens)
        parents[row, : len(tree.parents)] = torch.tensor(tree.parents, dtype=torch.int32)
    return NgramDraft(tokens.to(history.device), parents.to(history.device))


def _draft_recent(trie: Trie, tree: Tree, anchor: int, depth: int, breadths: list[int]) -> None:
    """Breadth first below `anchor`, the latest children first."""
    queue = deque([(0, anchor, depth)])
    while queue and not tree.full:
        place, node, depth = queue.popleft()
        for child in trie.children(node, RECENT, breadths[depth]):
            below = tree.place(place, int(trie.ints[TOKEN, child]))
            if below is not None:
                queue.append((below, child, depth + 1))


def _draft_frequent(trie: Trie, tree: Tree, anchor: int, breadth: int) -> None:
    """Best first below `anchor` in float32, equal probabilities in the order in which they were pushed."""
    heap: list[tuple[float, int, int, int]] = []
    pushes = itertools.count()

    def push_children(place: int, node: int, probability: float) -> None:
        children = trie.children(node, FREQUENT, breadth)
        counts = [int(trie.ints[COUNT, child]) for child in children]
        for child, count in zip(children, counts, strict=True):
            share = _single(_single(probability * _single(count)) / _single(sum(counts)))
            heapq.heappush(heap, (-share, next(pushes), place, child))

    push_children(0, anchor, 1.0)
    while heap and not tree.full:
        negative, _, place, node = heapq.heappop(heap)
        below = tree.place(place, int(trie.ints[TOKEN, node]))
        if below is not None:
            push_children(below, node, -negative)


def _single(number: float) -> float:
    """`number` rounded to float32; products and quotients of such numbers are rounded as float32 rounds them."""
    return ctypes.c_float(number).value
