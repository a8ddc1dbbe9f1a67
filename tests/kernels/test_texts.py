"""What the store of texts keeps, and which drafts it makes: small texts whose answer is plain to see, random sessions
against a shelf of lists, and thousands of requests at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from math import floor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_kernels as kernels
from specdec_kernels import TextDraft, TextStore, build_tree
from specdec_kernels.cases import Maker
from specdec_kernels.texts.cases import match_inputs
from specdec_kernels.texts.configs import CONFIGS
from specdec_kernels.texts.types import MAX_AGE

IMPLS = ("reference", "triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Path = tuple[int, ...]


@pytest.fixture(autouse=True)
def on_the_device_of_the_kernels() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def insert(store: TextStore, entries: Sequence[tuple[int, Sequence[int], int]], impl: str) -> None:
    """Each row of `entries` (row, text, start) writes its text from `start` on; the last token is its last token."""
    history = torch.zeros(len(entries), store.tokens.shape[1], dtype=torch.int64)
    for place, (_, text, _) in enumerate(entries):
        history[place, : len(text)] = torch.tensor(text, dtype=torch.int64)
    rows, start = torch.tensor([row for row, _, _ in entries]), torch.tensor([start for _, _, start in entries])
    counts = [len(text) - 1 - start for _, text, start in entries]
    kernels.insert_texts(
        store, history, rows, start, torch.tensor(counts, dtype=torch.int32), max(1, *counts), impl=impl
    )


def serve(store: TextStore, row: int, text: str, impl: str, start: int = 0) -> None:
    insert(store, [(row, ids(text), start)], impl)


def match(store: TextStore, row: int, text: Sequence[int], num_nodes: int, impl: str, **options: Any) -> TextDraft:
    history = torch.zeros(1, store.tokens.shape[1], dtype=torch.int64)
    history[0, : len(text)] = torch.tensor(text)
    given = torch.tensor([len(text) - 1]), torch.tensor([row]), num_nodes
    return kernels.match_texts(store, history, *given, **({"window": 16} | options), impl=impl)


def paths_of(draft: TextDraft) -> list[Path]:
    """The path to every draft, in the order of the nodes."""
    paths: dict[int, Path] = {0: ()}
    for node, (token, parent) in enumerate(zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True)):
        if parent >= 0:
            paths[node] = (*paths[parent], token)
    return [path for path in paths.values() if path]


def drafted(
    store: TextStore, row: int, text: str, impl: str, num_nodes: int = 8, order: str = "frequent", **options: Any
) -> list[str]:
    draft = match(store, row, ids(text), num_nodes, impl, order=order, **options)
    return ["".join(map(chr, path)) for path in paths_of(draft)]


def texts_of(store: TextStore) -> list[str]:
    """All texts, the oldest first."""
    order = sorted(range(len(store.lengths)), key=lambda text: int(store.stamps[text]))
    held = [store.tokens[text, : int(store.lengths[text])].tolist() for text in order]
    return ["".join(map(chr, tokens)) for tokens in held if tokens]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_match_has_a_vote_up_to_eight_tokens_behind_the_longest(impl: str) -> None:
    store = TextStore.create(1, 1, 60, DEVICE)
    text = "abcdefghijX-zijY-wjV-abcdefghij"
    serve(store, 0, text, impl)
    found = {path[0] for path in drafted(store, 0, text, impl, num_nodes=64)}
    assert found == {"X", "Y"}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("order", ["latest", "frequent"])
def test_a_draft_of_the_least_share_is_taken(order: str, impl: str) -> None:
    """Behind a match of one token the first draft holds with probability 1 / 2, the second with 1 / 3."""
    store = TextStore.create(1, 1, 20, DEVICE)
    serve(store, 0, "xa?!za", impl)
    for share, expected in ((0.5, ["?"]), (0.51, [])):
        assert drafted(store, 0, "xa?!za", impl, order=order, min_confidence=share) == expected


@pytest.mark.parametrize("order", ["latest", "frequent"])
@pytest.mark.parametrize("impl", IMPLS)
def test_what_followed_the_longest_match_is_drafted(impl: str, order: str) -> None:
    store = TextStore.create(1, 2, 40, DEVICE)
    text = "the cat sat. the dog ran. the cat"
    serve(store, 0, text, impl)
    assert drafted(store, 0, text, impl, num_nodes=5, order=order) == [" ", " s", " sa", " sat"]


@pytest.mark.parametrize("impl", IMPLS)
def test_suffix_drafting_prefers_what_is_frequent_and_ngrams_what_is_late(impl: str) -> None:
    store = TextStore.create(1, 2, 40, DEVICE)
    text = "ab1 ab1 ab2 ab"
    serve(store, 0, text, impl)
    assert drafted(store, 0, text, impl, num_nodes=2) == ["1"]
    assert drafted(store, 0, text, impl, num_nodes=2, order="latest") == ["2"]
    assert "2" in drafted(store, 0, text, impl, num_nodes=16)
    assert drafted(store, 0, text, impl, num_nodes=16, min_confidence=0.35) == ["1"]
    assert drafted(store, 0, text, impl, num_nodes=16, order="latest", min_confidence=0.51) == ["2", "1", "2 ", "1 "]


@pytest.mark.parametrize("impl", IMPLS)
def test_one_match_drafts_a_chain(impl: str) -> None:
    store = TextStore.create(1, 2, 40, DEVICE)
    text = "ab1 ab1 ab2 ab"
    serve(store, 0, text, impl)
    assert drafted(store, 0, text, impl, num_nodes=5, order="latest", matches=1) == ["2", "2 ", "2 a", "2 ab"]


@pytest.mark.parametrize("impl", IMPLS)
def test_the_longer_match_comes_before_the_later_one(impl: str) -> None:
    store = TextStore.create(1, 1, 40, DEVICE)
    text = "912 3 812 4 912"
    serve(store, 0, text, impl)
    serve(store, 0, text, impl)
    for order in ("latest", "frequent"):
        assert drafted(store, 0, text, impl, num_nodes=3, order=order) == [" ", " 3"]


@pytest.mark.parametrize("impl", IMPLS)
def test_own_text_first_then_the_latest(impl: str) -> None:
    store = TextStore.create(3, 1, 20, DEVICE)
    serve(store, 0, "xa1", impl)
    serve(store, 1, "xa2", impl)
    serve(store, 2, "xa3 xa", impl)
    latest = {"num_nodes": 4, "order": "latest", "window": 2, "min_confidence": 0.1}
    assert [path[:1] for path in drafted(store, 2, "xa3 xa", impl, **latest)][:3] == ["3", "2", "1"]
    assert [path[:1] for path in drafted(store, 0, "xa", impl, **latest)][:3] == ["1", "3", "2"]


@pytest.mark.parametrize("impl", IMPLS)
def test_texts_of_others_are_read_only_where_they_are_shared(impl: str) -> None:
    store = TextStore.create(2, 1, 40, DEVICE)
    serve(store, 0, "hello world", impl)
    serve(store, 1, "say hello", impl)
    assert " w" in drafted(store, 1, "say hello", impl)
    assert " w" not in drafted(store, 1, "say hello", impl, shared=False)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_request_that_has_written_nothing_has_no_text(impl: str) -> None:
    """Its row still has the text of the request before, which is that of another."""
    store = TextStore.create(2, 1, 20, DEVICE)
    serve(store, 0, "one one", impl)
    serve(store, 1, "o!", impl)
    assert drafted(store, 0, "o", impl, shared=False) == []
    assert drafted(store, 0, "o", impl, num_nodes=2, order="latest") == ["!"]


@pytest.mark.parametrize("impl", IMPLS)
def test_the_text_that_ended_first_makes_room(impl: str) -> None:
    """Three texts, two rows: row 1 runs on while row 0 serves one request after the other."""
    store = TextStore.create(2, 1, 20, DEVICE)
    serve(store, 1, "running", impl)
    for text in ("first", "second", "third"):
        serve(store, 0, text, impl)
    assert texts_of(store) == ["running", "second", "third"]
    serve(store, 1, "running on", impl, start=6)
    assert texts_of(store) == ["running on", "second", "third"]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_request_that_moves_takes_its_text_with_it(impl: str) -> None:
    store = TextStore.create(2, 1, 20, DEVICE)
    serve(store, 0, "one", impl)
    serve(store, 1, "two", impl)
    store.move_row(1, 0)
    serve(store, 0, "two more", impl, start=2)
    assert texts_of(store) == ["one", "two more"]
    serve(store, 1, "three", impl)
    serve(store, 0, "two more words", impl, start=7)
    serve(store, 1, "four", impl)
    assert texts_of(store) == ["two more words", "three", "four"]
    store.clear()
    assert texts_of(store) == [] and drafted(store, 0, "two", impl) == []


@pytest.mark.parametrize("impl", IMPLS)
def test_a_corpus_stays(impl: str) -> None:
    """However many requests come, and when everything else is forgotten. It is cut where a text is full."""
    corpus = "once upon a time there was"
    store = TextStore.create(1, 1, 10, DEVICE, ids(corpus))
    assert "".join(texts_of(store)) == corpus
    for text in ("abc", "def", "ghi"):
        serve(store, 0, text, impl)
    assert texts_of(store)[-2:] == ["def", "ghi"] and "".join(texts_of(store)[:-2]) == corpus
    assert drafted(store, 0, "upo", impl, num_nodes=3, order="latest") == ["n", "n "]
    store.clear()
    assert "".join(texts_of(store)) == corpus


class Shelf:
    """The definition in lists: texts of rows, and of requests that have ended."""

    def __init__(self, rows: int, kept: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.begun = [0] * rows
        self.kept: list[tuple[int, list[int]]] = [(0, [])] * kept
        self.clock = 0

    def write(self, row: int, text: Sequence[int], start: int) -> None:
        if start == 0:
            self.clock += 1
            self.kept = [*self.kept, (self.begun[row], self.rows[row])][1:]
            self.begun[row] = self.clock
        self.rows[row] = list(text)

    def move(self, source: int, target: int) -> None:
        for values in (self.rows, self.begun):
            values[source], values[target] = values[target], values[source]  # type: ignore[call-overload]

    def held(self) -> list[list[int]]:
        """By request, the oldest first."""
        both = sorted([*self.kept, *zip(self.begun, self.rows, strict=True)], key=lambda entry: entry[0])
        return [text for _, text in both if text]

    def draft(self, row: int, num_nodes: int, order: str, window: int, matches: int, shared: bool) -> dict[Path, float]:
        """Confidence of every draft by its path, in the order of the nodes."""
        own, begun = self.rows[row], self.begun[row]
        others = [*zip(self.begun, self.rows, strict=True), *self.kept] if shared else [(begun, own)]
        found = []
        for when, text in others:
            for place in range(len(text) - 1):
                size = 0
                while size < min(window, place + 1, len(own)) and text[place - size] == own[-1 - size]:
                    size += 1
                if size:
                    found.append((size, text is own, when, place, text[place + 1 :][: num_nodes - 1]))
        best = sorted(found, key=lambda entry: entry[:4], reverse=True)[:matches]
        ranks: dict[Path, int] = {}
        for number, entry in enumerate(best):
            for size in range(1, len(entry[4]) + 1):
                ranks.setdefault(tuple(entry[4][:size]), number)
        sure = {path: self._confidence(path, ranks, best, order) for path in ranks}
        chosen = sorted((p for p in sure if sure[p] > 0), key=lambda p: (-sure[p], len(p), ranks[p]))
        return {path: float(sure[path]) for path in chosen[: num_nodes - 1]}

    def _confidence(self, path: Path, ranks: dict[Path, int], best: list[Any], order: str) -> Fraction:
        if order == "frequent":
            votes = [Fraction(1, 4 ** (best[0][0] - e[0])) if best[0][0] - e[0] <= 8 else Fraction(0) for e in best]
            mine = [vote for vote, e in zip(votes, best, strict=True) if tuple(e[4][: len(path)]) == path]
            share, length = sum(mine, Fraction(0)) / sum(votes), best[0][0]
            whole = sum(votes) * 4**8
        else:
            share, length, whole = Fraction(1), best[ranks[path]][0], Fraction(1 << 16)
            for size in range(1, len(path) + 1):
                better = [
                    p for p in ranks
                    if len(p) == size and p[:-1] == path[: size - 1] and ranks[p] < ranks[path[:size]]
                ]  # fmt: skip
                for _ in better[:3]:
                    share = Fraction(floor(share * whole * 7 / 8), whole)
        return Fraction(floor(share * whole * length * 1024 / (length + len(path))), whole * 1024)


@st.composite
def sessions(draw: st.DrawFn) -> dict[str, Any]:
    """Requests in rows over a small alphabet, with what happens to them, and the sizes of a match."""
    rows, context = draw(st.integers(1, 3)), draw(st.integers(3, 16))
    token = st.integers(0, draw(st.sampled_from([0, 1, 2, 5])))
    return dict(
        rows=rows,
        context=context,
        kept=draw(st.integers(0, 3)),
        events=draw(st.lists(st.tuples(*[st.sampled_from(["begin", "go on", "idle", "move"])] * rows), max_size=6)),
        tokens=draw(st.lists(token, min_size=80, max_size=80)),
        num_nodes=draw(st.integers(2, 12)),
        match=dict(
            order=draw(st.sampled_from(["latest", "frequent"])),
            window=draw(st.integers(1, 6)),
            matches=draw(st.integers(1, 6)),
            shared=draw(st.booleans()),
        ),
    )


def follow(session: dict[str, Any], impl: str) -> None:
    """Step by step the store holds what is on the shelf, and drafts what the shelf drafts."""
    rows, context, tokens = session["rows"], session["context"], iter(session["tokens"] * 3)
    store, shelf = TextStore.create(rows, session["kept"], context, DEVICE), Shelf(rows, session["kept"])
    for events in session["events"]:
        entries = []
        for row, event in enumerate(events):
            before = [] if event == "begin" else shelf.rows[row]
            new = [next(tokens) for _ in range(min(2 + row + 2 * (event == "begin"), context - len(before)))]
            start = max(0, len(before) - 1)
            if event in ("begin", "go on") and len(before) + len(new) - 1 > start:
                entries.append((row, [*before, *new], start))
        if entries:
            insert(store, entries, impl)
        for row, text, start in entries:
            shelf.write(row, text, start)
        if "move" in events and rows > 1:
            store.move_row(rows - 1, events.index("move") % (rows - 1))
            shelf.move(rows - 1, events.index("move") % (rows - 1))
        held = [text[:size].tolist() for text, size in zip(store.tokens, store.lengths.tolist(), strict=True) if size]
        assert sorted(held) == sorted(shelf.held())
    for row in range(rows):
        if len(shelf.rows[row]) > 1:
            found = match(store, row, shelf.rows[row], session["num_nodes"], impl, **session["match"])
            expected = shelf.draft(row, session["num_nodes"], **session["match"])
            assert paths_of(found) == list(expected)
            assert found.confidence[0, 1 : len(expected) + 1].tolist() == pytest.approx(list(expected.values()))


@given(sessions())
@settings(max_examples=150)
def test_reference_is_the_shelf(session: dict[str, Any]) -> None:
    follow(session, "reference")


FEW, MANY = {"few": 1 << 16}, {"few": 0, "scan": 4, "select": 4, "parts": 4, "programs": 64}
"""Sizes of programs with which every request reads all hits, and with which it reads its own, both on any chip."""


@contextmanager
def sized(**sizes: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for chip, config in CONFIGS.items():
            patch.setitem(CONFIGS, chip, replace(config, **sizes))
        yield


@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])
@given(session=sessions())
@settings(max_examples=20)
def test_kernels_are_the_shelf(session: dict[str, Any], sizes: dict[str, int]) -> None:
    with sized(**sizes):
        follow(session, "triton")


@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("order", ["latest", "frequent"])
def test_requests_that_are_served_together_find_what_each_finds_alone(order: str, sizes: dict[str, int]) -> None:
    """Requests with the same last tokens and with others, two of them outside of the history and one that has written
    nothing, and a corpus: over few tokens there are more hits than a program compares at once."""
    options = dict(rows=7, length=24, ended=6, kept=4, alphabet=2, corpus=70, beyond=True, order=order, matches=5)
    with torch.device("cpu"):
        given = match_inputs(Maker.seeded(DEVICE), 10, window=9, **options)
    expected = kernels.match_texts(**given, impl="reference")
    with sized(**sizes):
        found = kernels.match_texts(**given, impl="triton")
    for one, other in zip(expected[:2], found[:2], strict=True):
        assert torch.equal(one, other)
    assert torch.allclose(expected.confidence, found.confidence, rtol=1e-6)
    assert int((found.parents >= 0).sum()) > 20


@pytest.mark.parametrize("sizes", [FEW, MANY | {"scan": 64}], ids=["few", "many"])
def test_every_cell_of_a_table_is_found(sizes: dict[str, int]) -> None:
    """As many requests as half of the cells, each with last tokens of its own: some are filed in the first cell, some
    in the last, and some behind others."""
    rows = 64
    texts = torch.arange(rows)[:, None] * 3 + torch.tensor([0, 1, 2, 0, 1])
    store = TextStore.create(rows, 0, 5, DEVICE)
    number, zeros = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    kernels.insert_texts(store, texts, number, zeros, (zeros + 4).int(), 4, impl="triton")
    with sized(**sizes):  # what is found stands in the text of another
        draft = kernels.match_texts(store, texts, zeros + 4, number.roll(1), 2, order="latest", window=2, impl="triton")
    assert torch.equal(draft.tokens[:, 1], texts[:, 2])


@pytest.mark.parametrize("sizes", [FEW, MANY | {"scan": 64}], ids=["few", "many"])
def test_places_of_one_token_stay_in_the_list_of_their_token(sizes: dict[str, int]) -> None:
    """Each last token stands in three places of the text of another, behind other tokens than in the request. The list
    holds one, and the lists of 64 tokens lie close together."""
    number = torch.arange(64)
    zeros = torch.zeros(64, dtype=torch.int64)
    texts = number[:, None] * 3 + torch.tensor([0, 1, 0, 2, 0, 1])
    store = TextStore.create(64, 0, 6, DEVICE)
    kernels.insert_texts(store, texts, number, zeros, (zeros + 5).int(), 5, impl="triton")
    asked = torch.stack([number + 1000, number * 3, *[zeros] * 4], 1)
    options: dict[str, Any] = dict(order="latest", window=2, matches=1, impl="triton")
    with sized(**sizes):
        draft = kernels.match_texts(store, asked, zeros + 1, number.roll(1), 2, **options)
    assert torch.equal(draft.tokens[:, 1], number * 3 + 1)


@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])
def test_every_place_of_a_text_is_read(sizes: dict[str, int]) -> None:
    """Programs read four places, from the first on and at the end: each letter but the last is followed by the next."""
    letters, store = "abcdefghijk", TextStore.create(2, 0, 16, DEVICE)
    serve(store, 0, letters, "triton")
    with sized(**sizes):
        found = [drafted(store, 1, "z" + letter, "triton", 2, "latest") for letter in letters]
    assert found == [*([letter] for letter in letters[1:]), []]


def test_every_text_is_with_one_row_or_kept() -> None:
    """After any number of exchanges and moves no text is lost, and none is with two."""
    store = TextStore.create(5, 3, 8, DEVICE)
    random = torch.Generator("cpu").manual_seed(2)
    for _ in range(60):
        rows = torch.randperm(5, generator=random, device="cpu")[
            : int(torch.randint(1, 6, (1,), generator=random, device="cpu"))
        ]
        insert(store, [(row, [row, 1, 2], 0) for row in rows.tolist()], "reference")
        store.move_row(*torch.randperm(5, generator=random, device="cpu")[:2].tolist())
        ring, first = len(store.queue), int(store.clock)
        kept = [int(store.queue[(first + place) % ring]) for place in range(store.num_kept)]
        assert sorted([*store.slots.tolist(), *kept]) == list(range(8))


@pytest.mark.parametrize(("rows", "width", "kept"), [(1, 1, 0), (256, 33, 64), (4096, 2048, 64)])
def test_insertion_and_matching_are_a_few_launches_at_every_size(
    monkeypatch: pytest.MonkeyPatch, rows: int, width: int, kept: int
) -> None:
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr("specdec_kernels.texts.kernel.launch", lambda _, grid, *__, **___: launched.append(grid))
    store, zeros = TextStore.create(rows, kept, 4, DEVICE), torch.zeros(rows, dtype=torch.int64)
    history = zeros[:, None].expand(rows, 4).contiguous()
    kernels.insert_texts(store, history, torch.arange(rows), zeros, zeros.int(), width, impl="triton")
    assert len(launched) == 2
    kernels.match_texts(store, history, zeros, torch.arange(rows), 16, order="latest", window=32, impl="triton")
    assert len(launched) <= 2 + 7


def test_4096_requests_fill_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows begin in every step, many more than texts are kept, others go on or idle: the kernels, in several programs,
    hold what the definition holds, and find in it what the definition finds."""
    rows, length, kept = 4096, 12, 200
    history = torch.randint(1 << 20, (rows, length), generator=torch.Generator("cpu").manual_seed(3), device="cpu")
    history = history.to(DEVICE)
    history[:, 5:8] = history[0, 5:8]
    if DEVICE == "cpu":
        monkeypatch.setitem(CONFIGS, "interpreter", replace(CONFIGS["interpreter"], copy=1 << 12))
    stores = {impl: TextStore.create(rows, kept, length, DEVICE) for impl in IMPLS}
    number, done = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    for step in range(3):
        counts = ((number * 7 + step) % 5).int()
        done = torch.where((number + step) % 3 == 0, 0, done)
        order = number.roll(step * 100)
        for impl, store in stores.items():
            given = (history[order].contiguous(), order, done[order].contiguous(), counts[order].contiguous())
            kernels.insert_texts(store, *given, 4, impl=impl)
        done = (done + counts).clamp(max=length - 1)
        for expected, found in zip(stores["reference"], stores["triton"], strict=True):
            assert torch.equal(found, expected), step
    assert int(stores["triton"].clock) > 4096 and int((stores["triton"].lengths > 0).sum()) > 4096
    some = torch.arange(0, rows, 128)
    place = (done[some], some, 8)
    for order in ("latest", "frequent"):
        drafts = [
            kernels.match_texts(stores["triton"], history[some], *place, order=order, window=4, impl=impl)
            for impl in IMPLS
        ]
        assert all(torch.equal(expected, found) for expected, found in zip(*drafts, strict=True))
        assert int((drafts[0].parents >= 0).sum()) > 16


@pytest.mark.parametrize("impl", IMPLS)
def test_every_age_is_read(impl: str) -> None:
    """Forty requests after one another, each with a word of its own, which is found."""
    store = TextStore.create(1, 40, 4, DEVICE)
    for number in range(40):
        insert(store, [(0, [100 + number, 200 + number, 1], 0)], impl)
    insert(store, [(0, [7, 8], 0)], impl)
    for number in range(22, 28):  # of ages around that at which one pass ends and the other begins
        with sized(**MANY):
            assert paths_of(match(store, 0, [7, 100 + number], 3, impl, order="latest"))[0] == (200 + number,)


@pytest.mark.parametrize("impl", IMPLS)
def test_very_old_texts_are_equally_old(impl: str) -> None:
    """Ages have 16 bits. Beyond, the text with the higher number comes first."""
    store = TextStore.create(3, 0, 20, DEVICE)
    serve(store, 0, "xa1", impl)
    serve(store, 1, "xa2", impl)
    serve(store, 2, "xa", impl)
    latest = {"num_nodes": 2, "order": "latest"}
    assert drafted(store, 2, "xa", impl, **latest) == ["2"]
    store.stamps[store.slots[0].long()] = 3
    assert drafted(store, 2, "xa", impl, **latest) == ["1"]
    store.clock.add_(MAX_AGE)
    assert drafted(store, 2, "xa", impl, **latest) == ["2" if store.slots[1] > store.slots[0] else "1"]


@pytest.mark.parametrize("order", ["latest", "frequent"])
@pytest.mark.parametrize("impl", IMPLS)
def test_padding_is_never_proposed(order: str, impl: str) -> None:
    """A text without token 0 has no draft of token 0 that anything links to, however few drafts there are."""
    store = TextStore.create(1, 0, 8, DEVICE)
    insert(store, [(0, [5, 6, 7, 5], 0)], impl)
    draft = match(store, 0, [5, 6, 7, 5], 12, impl, order=order)
    links = build_tree(draft.parents, torch.tensor([3]), impl="reference")
    linked = (set(links.first_child[0].tolist()) | set(links.next_sibling[0].tolist())) - {-1}
    assert len(linked) == 3 and all(draft.tokens[0, node] != 0 for node in linked)
    assert (draft.parents[0, 4:] == -2).all() and not draft.confidence[0, 4:].any()


def test_matching_changes_nothing() -> None:
    store = TextStore.create(2, 1, 12, DEVICE)
    serve(store, 0, "ababab", "reference")
    before = [tensor.clone() for tensor in store]
    for impl in IMPLS:
        drafted(store, 0, "ababab", impl)
    assert all(torch.equal(a, b) for a, b in zip(before, store, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_confidence_grows_with_the_match_and_falls_with_depth(impl: str) -> None:
    """A match of 3 tokens is trusted 3 / (3 + depth). One of 2 tokens has four times the votes of one of 1."""
    shared = [0.8 * 2 / 3, 0.8 * 2 / 4, 0.8 * 2 / 5, 0.2 * 2 / 3]
    for text, told in (("abcdefg. abc", [3 / 4, 3 / 5, 3 / 6]), ("xa xb x", shared)):
        store = TextStore.create(1, 2, 40, DEVICE)
        serve(store, 0, text, impl)
        draft = match(store, 0, ids(text), len(told) + 1, impl, order="frequent")
        assert draft.confidence[0].tolist() == pytest.approx([1, *told], abs=2e-3)
        assert float(draft.strength) == pytest.approx(sum(told), abs=5e-3)


@pytest.mark.parametrize("impl", IMPLS)
def test_better_siblings_take_an_eighth_away(impl: str) -> None:
    """Five continuations, the latest first: each is trusted less than the one before it, the last two alike."""
    store = TextStore.create(1, 0, 40, DEVICE)
    text = "xa1xa2xa3xa4xa5xa"
    serve(store, 0, text, impl)
    draft = match(store, 0, ids(text), 40, impl, order="latest", window=2)
    sure = dict(zip(paths_of(draft), draft.confidence[0, 1:].tolist(), strict=False))
    expected = [2 / 3 * (7 / 8) ** better for better in (3, 3, 2, 1, 0)]
    assert [sure[(ord(letter),)] for letter in "12345"] == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"window": 64}, "window: expected 1 to 63, got 64"),
        ({"num_nodes": 1}, "num_nodes: expected 2 to 256, got 1"),
        ({"num_nodes": 257}, "num_nodes: expected 2 to 256, got 257"),
        ({"matches": 65}, "matches: expected 1 to 64, got 65"),
        ({"min_confidence": 1.5}, "min_confidence: expected 0 to 1, got 1.5"),
        ({"order": "lru"}, "order: expected one of latest, frequent, got 'lru'"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, r"lengths: expected shape \[1\], got \[2\]"),
        ({"rows": torch.zeros(1, dtype=torch.int32)}, "rows: expected dtype torch.int64"),
        ({"history": torch.zeros(1, 9, dtype=torch.int64)}, "history: expected shape"),
        ({"history": torch.zeros(12, 2, dtype=torch.int64).t()[:1]}, "history: expected contiguous rows"),
        ({"impl": "cuda"}, "impl: expected one of"),
    ],
)
def test_bad_matches_are_refused(options: dict[str, Any], expected: str) -> None:
    store, zero = TextStore.create(1, 1, 12, "cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")
    given = {"history": zero.expand(1, 12).contiguous(), "lengths": zero, "rows": zero, "num_nodes": 4}
    with pytest.raises(ValueError, match=expected):
        kernels.match_texts(store, **(given | {"window": 3, "order": "latest"} | options))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"start": torch.zeros(3, dtype=torch.int64)}, r"start: expected shape \[2\], got \[3\]"),
        ({"counts": torch.zeros(2, dtype=torch.int64)}, "counts: expected dtype torch.int32"),
        ({"width": -1}, "width: expected at least 0, got -1"),
    ],
)
def test_bad_insertions_are_refused(change: dict[str, Any], expected: str) -> None:
    zeros = torch.zeros(2, dtype=torch.int64, device="cpu")
    given = {"history": torch.zeros(2, 4, dtype=torch.int64, device="cpu"), "rows": torch.arange(2, device="cpu")}
    given |= {"start": zeros, "counts": zeros.int(), "width": 4}
    with pytest.raises(ValueError, match=expected):
        kernels.insert_texts(TextStore.create(2, 1, 4, "cpu"), **(given | change))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((0, 4, 9), "got 0 rows, 4 kept texts and 0 texts of a corpus"),
        ((1, -1, 9), "got 1 rows, -1 kept texts"),
        ((60000, 6000, 9), "65536 texts in all at most, got 60000 rows"),
        ((1, 1, 0), "context: expected 1 to 16777215, got 0"),
        ((1, 1, 1 << 24), "context: expected 1 to 16777215, got 16777216"),
    ],
)
def test_bad_stores_are_refused(sizes: tuple[int, int, int], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        TextStore.create(*sizes, "cpu")


def test_as_many_texts_as_a_rank_can_name() -> None:
    assert len(TextStore.create(65000, 530, 1, "cpu", [7] * 6).lengths) == 65536


def test_the_last_piece_of_a_corpus_is_as_long_as_what_is_left() -> None:
    store = TextStore.create(1, 0, 8, DEVICE, ids("abcdefghij"))
    assert store.lengths.tolist() == [0, 8, 2]
    assert drafted(store, 0, "xi", "reference") == ["j"]
