"""The n-gram store against a dictionary of n-grams, and what must hold when it is full."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels import NgramDraft, NgramStore, build_tree, ngram_insert, ngram_match
from specdec_kernels.ngram.configs import CONFIGS
from specdec_kernels.ngram.reference import Trie
from specdec_kernels.ngram.types import (
    CUT,
    EPOCH,
    FREE,
    LIVE,
    NUM_BINS,
    PARENT,
    TOKEN,
    age_bin,
    entered_counts,
    youngest_of,
)

IMPLS = ["reference", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Gram = tuple[int, ...]


class Book:
    """The definition in dictionaries: every n-gram with its count and the stamp of its last occurrence."""

    def __init__(self, depth: int, breadth: int) -> None:
        self.depth, self.breadth, self.clock = depth, breadth, 0
        self.counts: dict[Gram, int] = {}
        self.stamps: dict[Gram, int] = {}

    def insert(self, rows: list[list[int]], start: list[int], counts: list[int]) -> None:
        for row, first, count in zip(rows, start, counts, strict=True):
            for end in range(first, first + count):
                for size in range(1, min(self.depth, end + 1) + 1):
                    gram = tuple(row[end + 1 - size : end + 1])
                    self.counts[gram] = self.counts.get(gram, 0) + 1
                    self.stamps[gram] = self.clock
                self.clock += 1

    def children(self, gram: Gram, mode: str) -> list[Gram]:
        """Latest first, or most frequent first and then lowest token."""
        found = [g for g in self.counts if g[:-1] == gram and len(g) == len(gram) + 1]
        return sorted(found, key=lambda g: -self.stamps[g] if mode == "bfs" else (-self.counts[g], g[-1]))

    def draft(
        self, text: list[int], num_nodes: int, window: int, least: int, most: int, mode: str
    ) -> list[tuple[int, int]]:
        """(token, parent) of the nodes in the order in which they join the tree."""
        tree = [(text[-1], -1)]
        for size in range(min(window, len(text)), 0, -1):
            anchor = tuple(text[-size:])
            if anchor in self.counts and mode == "bfs":
                self._breadth_first(tree, anchor, num_nodes, window, least, most)
            elif anchor in self.counts:
                self._best_first(tree, anchor, num_nodes, most)
        return tree

    def _breadth_first(
        self, tree: list[tuple[int, int]], anchor: Gram, num_nodes: int, window: int, least: int, most: int
    ) -> None:
        scale = Fraction(most - least, window)
        queue = deque([(0, anchor, (window - len(anchor)) * scale + least)])
        while queue:
            place, gram, width = queue.popleft()
            for child in self.children(gram, "bfs")[: max(1, int(width))]:
                below = join(tree, place, child[-1], num_nodes)
                if below is not None:
                    queue.append((below, child, width - scale))

    def _best_first(self, tree: list[tuple[int, int]], anchor: Gram, num_nodes: int, most: int) -> None:
        heap: list[tuple[Any, int, int, Gram]] = []
        pushes = 0
        expanding: tuple[int, Gram, Any] | None = (0, anchor, np.float32(1))
        while expanding:
            place, gram, probability = expanding
            best = self.children(gram, "prob")[:most]
            total = np.float32(sum(self.counts[g] for g in best))
            for child in best:
                heapq.heappush(heap, (-(probability * np.float32(self.counts[child]) / total), pushes, place, child))
                pushes += 1
            expanding = None
            while heap and expanding is None:
                negative, _, place, child = heapq.heappop(heap)
                below = join(tree, place, child[-1], num_nodes)
                if below is not None:
                    expanding = (below, child, -negative)


def join(tree: list[tuple[int, int]], parent: int, token: int, num_nodes: int) -> int | None:
    if (token, parent) in tree[1:]:
        return tree.index((token, parent), 1)
    if len(tree) == num_nodes:
        return None
    tree.append((token, parent))
    return len(tree) - 1


def grams_of(contents: dict[str, torch.Tensor]) -> list[Gram]:
    return [tuple(t for t in reversed(row) if t >= 0) for row in contents["grams"].tolist()]


def assert_holds(store: NgramStore, book: Book) -> None:
    """The store holds the book: n-grams, counts, stamps, the lists of best children, a table that leads to all."""
    contents = store.contents()
    grams = grams_of(contents)
    assert dict(zip(grams, contents["counts"].tolist(), strict=True)) == book.counts
    assert dict(zip(grams, contents["stamps"].tolist(), strict=True)) == book.stamps
    assert contents["found"].all()
    for gram, lists in zip(grams, contents["lists"].tolist(), strict=True):
        for mode, listed in zip(("bfs", "prob"), lists, strict=True):
            best = [g[-1] for g in book.children(gram, mode)][: store.list_width]
            assert listed == best + [-1] * (store.list_width - len(best)), (gram, mode)


def assert_drafts(draft: NgramDraft, trees: list[list[tuple[int, int]]]) -> None:
    for tokens, parents, tree in zip(draft.tokens.tolist(), draft.parents.tolist(), trees, strict=True):
        unused = len(tokens) - len(tree)
        assert list(zip(tokens, parents, strict=True)) == tree + [(0, -2)] * unused


def tensor(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def insert(store: NgramStore, rows: list[list[int]], start: list[int], counts: list[int], impl: str) -> None:
    width = max(counts, default=0)
    ngram_insert(store, tensor(rows), tensor(start), tensor(counts, torch.int32), width, impl=impl)


@st.composite
def sessions(draw: st.DrawFn) -> dict[str, Any]:
    """Rows over a small alphabet, the steps in which their tokens are committed, and the sizes of a match."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    alphabet = draw(st.sampled_from([1, 2, 3, 6]))
    depth, breadth = draw(st.integers(2, 7)), draw(st.integers(1, 6))
    token = st.integers(0, alphabet - 1)
    texts = [draw(st.lists(token, min_size=length, max_size=length)) for _ in range(rows)]
    steps, done = [], [0] * rows
    while any(n < length for n in done) and len(steps) < 5:
        steps.append([draw(st.integers(0, min(9, length - n))) for n in done])
        done = [n + new for n, new in zip(done, steps[-1], strict=True)]
    most = draw(st.integers(1, breadth))
    match = dict(
        num_nodes=draw(st.integers(1, 12)),
        window=draw(st.integers(1, depth - 1)),
        min_breadth=draw(st.integers(1, most)),
        max_breadth=most,
        mode=draw(st.sampled_from(["bfs", "prob"])),
    )
    return dict(texts=texts, steps=steps, depth=depth, breadth=breadth, match=match)


def follow(session: dict[str, Any], impl: str) -> None:
    """Insert step by step; after each, the store holds the book and drafts what the book drafts."""
    texts, match = session["texts"], session["match"]
    store = NgramStore.create(1 << 14, session["depth"], session["breadth"], DEVICE)
    book, done = Book(session["depth"], session["breadth"]), [0] * len(texts)
    for counts in session["steps"]:
        insert(store, texts, done, counts, impl)
        book.insert(texts, done, counts)
        done = [n + new for n, new in zip(done, counts, strict=True)]
        last_tokens = [min(n, len(text) - 1) for n, text in zip(done, texts, strict=True)]
        draft = ngram_match(store, tensor(texts), tensor(last_tokens), **match, impl=impl)
        sizes = (match["num_nodes"], match["window"], match["min_breadth"], match["max_breadth"], match["mode"])
        assert_drafts(draft, [book.draft(text[: at + 1], *sizes) for text, at in zip(texts, last_tokens, strict=True)])
    assert_holds(store, book)


@given(sessions())
@settings(max_examples=120)
def test_reference_is_the_book(session: dict[str, Any]) -> None:
    follow(session, "reference")


@given(sessions())
@settings(max_examples=3)
def test_kernels_are_the_book(session: dict[str, Any]) -> None:
    follow(session, "triton")


@pytest.mark.parametrize("impl", IMPLS)
def test_one_implementation_goes_on_with_the_others_store(impl: str) -> None:
    texts = [[0, 1, 2, 0, 1, 2, 0, 1], [1, 2, 0, 2, 1, 0, 0, 1]]
    store, book = NgramStore.create(1024, 4, 3, DEVICE), Book(4, 3)
    other = next(name for name in IMPLS if name != impl)
    for start, count, who in ((0, 3, other), (3, 2, impl), (5, 3, other)):
        insert(store, texts, [start] * 2, [count] * 2, who)
        book.insert(texts, [start] * 2, [count] * 2)
    assert_holds(store, book)


def test_a_text_counts_the_same_in_steps_and_at_once() -> None:
    text = [[1, 2, 1, 2, 3, 1, 2, 1, 2, 3, 3, 3]]
    whole, stepped = (NgramStore.create(1024, 5, 4, DEVICE) for _ in range(2))
    insert(whole, text, [0], [12], "reference")
    for start in range(0, 12, 3):
        insert(stepped, text, [start], [3], "reference")
    a, b = whole.contents(), stepped.contents()
    assert all(torch.equal(a[name], b[name]) for name in ("grams", "counts", "stamps", "lists"))


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's programs run in an order that a test can choose")
def test_order_of_work_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of 1024, 16 or 2 lanes, first to last and last to first, meet the same n-grams in other orders: nodes
    get other numbers, the contents are the same."""
    texts = [[(i * j) % 3 for i in range(14)] for j in range(1, 5)]
    stores = []
    for lanes, backwards in ((1024, False), (16, False), (4, True)):
        config = replace(CONFIGS["interpreter"], windows=lanes, pairs=lanes)
        store = NgramStore.create(512, 4, 3, DEVICE)
        with monkeypatch.context() as patch:
            patch.setitem(CONFIGS, "interpreter", config)
            if backwards:
                run_backwards(patch)
            insert(store, texts, [0] * 4, [6] * 4, "triton")
        stores.append(store)
    first, *others = (store.contents() for store in stores)
    for name, expected in first.items():
        assert all(torch.equal(expected, other[name]) for other in others), name
    assert not torch.equal(stores[0].ints, stores[2].ints)


def run_backwards(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter run the programs of a launch from the last to the first."""
    builder = interpreter.interpreter_builder
    ahead = builder.set_grid_idx
    patch.setattr(builder, "set_grid_idx", lambda x, y, z: ahead(builder.grid_dim[0] - 1 - x, y, z))


@given(st.lists(st.lists(st.integers(0, 3), min_size=16, max_size=16), min_size=1, max_size=3), st.integers(12, 60))
@settings(max_examples=60)
def test_a_full_store_stays_whole(texts: list[list[int]], capacity: int) -> None:
    """Under eviction: never more nodes than fit, no n-gram without its beginnings, lists and table of what is left, no
    count above the truth, and what the last insertion touched is there."""
    store, book = NgramStore.create(capacity, 4, 3, DEVICE), Book(4, 3)
    for step in range(4):
        start, counts = [4 * step] * len(texts), [4] * len(texts)
        insert(store, texts, start, counts, "reference")
        book.insert(texts, start, counts)
        contents = store.contents()
        grams = grams_of(contents)
        held = dict(zip(grams, contents["counts"].tolist(), strict=True))
        assert int(contents["totals"][0]) == len(grams) <= capacity
        assert contents["found"].all() and (contents["spare"] == 0).all()
        assert all(gram[:-1] in held for gram in grams if len(gram) > 1)
        assert all(0 < count <= book.counts[gram] for gram, count in held.items())
        left = Book(4, 3)
        left.counts, left.stamps = held, dict(zip(grams, contents["stamps"].tolist(), strict=True))
        assert_holds(store, left)
        assert all((text[4 * step + 3],) in held for text in texts[: store.insertion_limit])


def test_eviction_keeps_what_was_used_last() -> None:
    """Three texts of disjoint tokens fill a store for two: the first goes, unless it was read again meanwhile."""
    texts = [[10 * n + i for i in range(5)] for n in range(3)]
    size = len(grams_of(filled([texts[0]], 4, 1024).contents()))
    for again, kept, gone in ((None, 1, 0), (0, 0, 1)):
        store = NgramStore.create(2 * size + 12, 4, 2, DEVICE)
        for n in (0, 1) if again is None else (0, 1, again):
            insert(store, [texts[n]], [0], [5], "reference")
        insert(store, [texts[2]], [0], [5], "reference")
        tokens = {gram[0] for gram in grams_of(store.contents())}
        assert texts[kept][0] in tokens and texts[2][0] in tokens and texts[gone][0] not in tokens


def filled(texts: list[list[int]], depth: int, capacity: int, impl: str = "reference") -> NgramStore:
    store = NgramStore.create(capacity, depth, 4, DEVICE)
    insert(store, texts, [0] * len(texts), [len(text) for text in texts], impl)
    return store


@given(st.lists(st.integers(0, 40), max_size=9), st.integers(0, 120))
def test_rows_share_what_one_insertion_enters(counts: list[int], limit: int) -> None:
    """All of it is used, and no row lacks tokens while another has two more."""
    entered = entered_counts(counts, limit)
    assert sum(entered) == min(limit, sum(counts))
    assert all(0 <= got <= count for got, count in zip(entered, counts, strict=True))
    short = [got for got, count in zip(entered, counts, strict=True) if got < count]
    assert all(got <= least + 1 for got in entered for least in short)
    assert short == sorted(short, reverse=True)[: len(short)] or max(short) - min(short) <= 1


@given(st.integers(0, 1 << 45))
def test_bins_of_ages(age: int) -> None:
    """Neighbouring ages are in one bin or in neighbouring ones, exact below 2,048, within 2^-10 of the age behind."""
    number = age_bin(age)
    assert 0 <= number < NUM_BINS and number <= age_bin(age + 1) <= number + 1
    assert number == age or age >= 2048
    if age < 1 << 41:
        assert youngest_of(number) <= age < youngest_of(number) + max(1, age >> 10)
        assert age_bin(youngest_of(number)) == number


@pytest.mark.parametrize(("rows", "width", "capacity"), [(1, 1, 32), (256, 33, 1 << 18), (4096, 2048, 1 << 18)])
def test_an_insertion_is_a_few_launches_at_every_size(
    monkeypatch: pytest.MonkeyPatch, rows: int, width: int, capacity: int
) -> None:
    launched: list[int] = []
    monkeypatch.setattr("specdec_kernels.ngram.kernel.launch", lambda *_, **__: launched.append(1))
    store, zeros = NgramStore.create(capacity, 16, 8, DEVICE), torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    ngram_insert(store, zeros[:, None].expand(rows, 4).contiguous(), zeros, zeros.int(), width, impl="triton")
    assert len(launched) <= 8


def crowd(rows: int, length: int, alphabet: int) -> torch.Tensor:
    """[rows, length] tokens, half of them drawn anew in every row, half shared by all."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(alphabet, (1, length), generator=generator)
    own = torch.randint(alphabet, (rows, length), generator=generator)
    return torch.where(torch.rand(rows, length, generator=generator) < 0.5, shared, own).to(DEVICE)


@pytest.mark.parametrize(("capacity", "sweep"), [(600, 512), (500, 1 << 14)])
def test_4096_requests_fill_one_store(monkeypatch: pytest.MonkeyPatch, capacity: int, sweep: int) -> None:
    """Far more tokens than fit, from rows of unequal counts, with evictions: the kernels, in several programs or in
    one, hold what the definition holds."""
    rows, length = 4096, 12
    texts = crowd(rows, length, 1 << 20)
    if DEVICE == "cpu":
        monkeypatch.setitem(CONFIGS, "interpreter", replace(CONFIGS["interpreter"], sweep=sweep, windows=1 << 14))
    stores = {impl: NgramStore.create(capacity, 4, 4, DEVICE) for impl in IMPLS}
    done, evictions = torch.zeros(rows, dtype=torch.int64, device=DEVICE), 0
    for step in range(8):
        counts = ((torch.arange(rows, device=DEVICE) * 7 + step) % 5).to(torch.int32)
        for impl, store in stores.items():
            ngram_insert(store, texts, done, counts, 4, impl=impl)
        done += counts.clamp(max=2)
        evictions += int(stores["triton"].counters[CUT]) > 0
        expected, found = (stores[impl].contents() for impl in IMPLS)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (step, name)
        assert 0 < int(expected["totals"][0]) <= capacity and expected["found"].all()
        assert not stores["triton"].ages.any()
    assert evictions >= 2


def test_old_insertions_go_first() -> None:
    """Thousands of insertions ago, where ages share bins: the oldest n-grams make room, by both implementations."""
    found = {}
    for impl in IMPLS:
        store = NgramStore.create(64, 2, 2, DEVICE)
        for token in range(24):
            insert(store, [[token, token]], [0], [2], "reference")
            store.counters[EPOCH] += 500
        insert(store, [[90 + i for i in range(16)]], [0], [16], impl)
        found[impl] = store.contents()
    kept = {gram[0] for gram in grams_of(found["reference"]) if gram[0] < 24}
    assert kept == set(range(24 - len(kept), 24)) and 8 <= len(kept) <= 16
    assert all(torch.equal(value, found["triton"][name]) for name, value in found["reference"].items())


@pytest.mark.parametrize("mode", ["bfs", "prob"])
@pytest.mark.parametrize("impl", IMPLS)
def test_padding_is_never_proposed(mode: str, impl: str) -> None:
    """A text without token 0 has no draft of token 0 that anything links to, however few drafts there are."""
    text = [[5, 6, 7, 5, 6, 7, 5]]
    store = filled(text, 4, 256)
    draft = ngram_match(store, tensor(text), tensor([6]), 12, window=2, mode=mode, impl=impl)
    links = build_tree(draft.parents, tensor([6]), impl="reference")
    linked = set(links.first_child[0].tolist()) | set(links.next_sibling[0].tolist()) - {-1}
    assert linked and all(draft.tokens[0, node] != 0 for node in linked if node > 0)
    assert (draft.parents[0] == -2).any()
    assert not any((draft.parents[0] == -2)[node] for node in linked if node > 0)


def renumbered(store: NgramStore) -> NgramStore:
    """The same contents with the live nodes numbered the other way round: what was made last is node 0."""
    live = int(store.counters[LIVE])

    def flip(numbers: torch.Tensor) -> torch.Tensor:
        return torch.where((numbers >= 0) & (numbers < live), live - 1 - numbers, numbers)

    place = flip(torch.arange(store.capacity, device=DEVICE))
    ints = store.ints[:, place]
    ints[PARENT], ints[FREE] = flip(ints[PARENT]), store.ints[FREE]
    made = NgramStore.create(store.capacity, store.max_depth, store.max_breadth, "cpu")
    times, lists = store.times[:, place], flip(store.lists[:, place])
    parts = (made.keys, made.nodes, ints, times, lists, store.counters, store.ages)
    for kept, value in zip(made.tensors(), parts, strict=True):
        kept.copy_(value)
    for node in range(live):
        Trie(made)._enter(node)
    return made.to(DEVICE)


@pytest.mark.parametrize("mode", ["bfs", "prob"])
@pytest.mark.parametrize("impl", IMPLS)
def test_node_0_may_be_a_child(mode: str, impl: str) -> None:
    """The longest match was seen once; its only continuation is node 0. Shorter matches mostly went on otherwise."""
    text = [[9, 2, 4, 5, 9, 2, 4, 5, 1, 2, 4, 1]]
    store = filled(text, 4, 256)
    other = renumbered(store)
    before, after = store.contents(), other.contents()
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert int(other.ints[TOKEN, 0]) == 1 and int(other.ints[PARENT, 0]) >= 0
    for each in (store, other):
        draft = ngram_match(each, tensor(text), tensor([10]), 2, window=3, mode=mode, impl=impl)
        assert draft.tokens.tolist() == [[4, 1]]


def test_matching_changes_nothing() -> None:
    store = filled([[1, 2, 1, 2, 1, 2]], 4, 64)
    before = [t.clone() for t in store.tensors()]
    for impl in IMPLS:
        ngram_match(store, tensor([[1, 2, 1, 2, 1, 2]]), tensor([5]), 6, window=3, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(before, store.tensors(), strict=True))


def test_longer_matches_come_first() -> None:
    """After `9 1 2` came 3, after `8 1 2` later came 4: behind `9 1 2` the older but longer match leads."""
    text = [[9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2]]
    store = NgramStore.create(256, 5, 4, DEVICE)
    insert(store, text, [0], [8], "reference")
    draft = ngram_match(store, tensor(text), tensor([10]), 3, window=3, max_breadth=1)
    assert draft.tokens[0].tolist()[:2] == [2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_nodes=0), "num_nodes: expected 1 to 256, got 0"),
        (dict(num_nodes=257), "num_nodes: expected 1 to 256, got 257"),
        (dict(window=4), "window: expected 1 to max_depth - 1 = 3, got 4"),
        (dict(min_breadth=3, max_breadth=2), "got min 3, max 2"),
        (dict(max_breadth=5), "expected 1 <= min <= max <= 4"),
        (dict(mode="lru"), "mode: expected one of bfs, prob, got 'lru'"),
        (dict(lengths=torch.zeros(2, dtype=torch.int64)), r"lengths: expected shape \[1\], got \[2\]"),
        (dict(lengths=torch.zeros(1, dtype=torch.int32)), "lengths: expected dtype torch.int64"),
        (dict(history=torch.zeros(1, 4, dtype=torch.int32)), "history: expected dtype torch.int64"),
        (dict(history=torch.zeros(4, 2, dtype=torch.int64).t()[:1]), "history: expected contiguous rows"),
        (dict(impl="cuda"), "impl must be one of"),
    ],
)
def test_bad_matches_are_refused(change: dict[str, Any], message: str) -> None:
    good = dict(history=torch.zeros(1, 4, dtype=torch.int64), lengths=torch.zeros(1, dtype=torch.int64))
    arguments = dict(good, num_nodes=4, window=2) | change
    with pytest.raises(ValueError, match=message):
        ngram_match(NgramStore.create(64, 4, 4, "cpu"), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(start=torch.zeros(3, dtype=torch.int64)), r"start: expected shape \[2\], got \[3\]"),
        (dict(counts=torch.zeros(2, dtype=torch.int64)), "counts: expected dtype torch.int32"),
        (dict(width=-1), "width: expected at least 0, got -1"),
    ],
)
def test_bad_insertions_are_refused(change: dict[str, Any], message: str) -> None:
    good = dict(
        history=torch.zeros(2, 4, dtype=torch.int64),
        start=torch.zeros(2, dtype=torch.int64),
        counts=torch.zeros(2, dtype=torch.int32),
        width=4,
    )
    with pytest.raises(ValueError, match=message):
        ngram_insert(NgramStore.create(64, 4, 4, "cpu"), **(good | change))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((64, 1, 4), "max_depth: expected 2 to 256, got 1"),
        ((64, 4, 0), "max_breadth: expected 1 to 32, got 0"),
        ((7, 4, 4), "capacity: expected 2 \\* max_depth = 8 to 16777216, got 7"),
    ],
)
def test_bad_stores_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NgramStore.create(*sizes, "cpu")
