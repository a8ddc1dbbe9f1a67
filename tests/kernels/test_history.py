"""What the history store keeps, and which drafts it gives: worked examples, random sessions against a definition in
lists, and thousands of requests at once."""

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
from specdec_kernels import HistoryDraft, HistoryStore
from specdec_kernels.cases import Maker
from specdec_kernels.history.cases import match_inputs
from specdec_kernels.history.configs import CONFIGS
from specdec_kernels.history.types import MAX_AGE

IMPLS = ("reference", "triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Path = tuple[int, ...]


@pytest.fixture(autouse=True)
def on_the_device_of_the_kernels() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def insert(store: HistoryStore, entries: Sequence[tuple[int, Sequence[int], int]], impl: str) -> None:
    """Each slot of `entries` (slot, tokens, start) writes its tokens from `start` on."""
    history = torch.zeros(len(entries), store.tokens.shape[1], dtype=torch.int64)
    for place, (_, text, _) in enumerate(entries):
        history[place, : len(text)] = torch.tensor(text, dtype=torch.int64)
    slots, start = torch.tensor([slot for slot, _, _ in entries]), torch.tensor([start for _, _, start in entries])
    counts = [len(text) - 1 - start for _, text, start in entries]
    kernels.insert_histories(
        store, history, slots, start, torch.tensor(counts, dtype=torch.int32), max(1, *counts), impl=impl
    )


def serve(store: HistoryStore, slot: int, text: str, impl: str, start: int = 0) -> None:
    insert(store, [(slot, ids(text), start)], impl)


def match(
    store: HistoryStore, slot: int, text: Sequence[int], num_nodes: int, impl: str, **options: Any
) -> HistoryDraft:
    history = torch.zeros(1, store.tokens.shape[1], dtype=torch.int64)
    history[0, : len(text)] = torch.tensor(text)
    given = torch.tensor([len(text) - 1]), torch.tensor([slot]), num_nodes
    return kernels.match_histories(store, history, *given, **({"max_ngram": 16} | options), impl=impl)


def paths_of(draft: HistoryDraft) -> list[Path]:
    """The path to every draft, in the order of the nodes."""
    paths: dict[int, Path] = {0: ()}
    for node, (token, parent) in enumerate(zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True)):
        if parent >= 0:
            paths[node] = (*paths[parent], token)
    return [path for path in paths.values() if path]


def drafted(
    store: HistoryStore, slot: int, text: str, impl: str, num_nodes: int = 8, order: str = "frequent", **options: Any
) -> list[str]:
    draft = match(store, slot, ids(text), num_nodes, impl, order=order, **options)
    return ["".join(map(chr, path)) for path in paths_of(draft)]


def histories_of(store: HistoryStore) -> list[str]:
    """All histories, the oldest first."""
    order = sorted(range(len(store.lengths)), key=lambda text: int(store.stamps[text]))
    held = [store.tokens[text, : int(store.lengths[text])].tolist() for text in order]
    return ["".join(map(chr, tokens)) for tokens in held if tokens]


def test_a_match_votes_up_to_eight_tokens_below_the_longest(impl: str) -> None:
    store = HistoryStore.create(1, 1, 60, DEVICE)
    text = "abcdefghijX-zijY-wjV-abcdefghij"
    serve(store, 0, text, impl)
    found = {path[0] for path in drafted(store, 0, text, impl, num_nodes=64)}
    assert found == {"X", "Y"}


@pytest.mark.parametrize("order", ["latest", "frequent"])
def test_a_draft_of_the_least_path_probability_is_taken(order: str, impl: str) -> None:
    """After a match of one token the first draft holds with probability 1 / 2, the second with 1 / 3."""
    store = HistoryStore.create(1, 1, 20, DEVICE)
    serve(store, 0, "xa?!za", impl)
    for share, expected in ((0.5, ["?"]), (0.51, [])):
        assert drafted(store, 0, "xa?!za", impl, order=order, min_path_prob=share) == expected


def test_suffix_drafting_prefers_what_is_frequent_and_ngrams_what_is_late(impl: str) -> None:
    store = HistoryStore.create(1, 2, 40, DEVICE)
    text = "ab1 ab1 ab2 ab"
    serve(store, 0, text, impl)
    assert drafted(store, 0, text, impl, num_nodes=2) == ["1"]
    assert drafted(store, 0, text, impl, num_nodes=2, order="latest") == ["2"]
    assert "2" in drafted(store, 0, text, impl, num_nodes=16)
    assert drafted(store, 0, text, impl, num_nodes=16, min_path_prob=0.35) == ["1"]
    assert drafted(store, 0, text, impl, num_nodes=16, order="latest", min_path_prob=0.51) == ["2", "1", "2 ", "1 "]


def test_a_request_that_has_written_nothing_has_no_history(impl: str) -> None:
    """Its slot still has the history of an earlier request."""
    store = HistoryStore.create(2, 1, 20, DEVICE)
    serve(store, 0, "one one", impl)
    serve(store, 1, "o!", impl)
    assert drafted(store, 0, "o", impl, shared=False) == []
    assert drafted(store, 0, "o", impl, num_nodes=2, order="latest") == ["!"]


def test_a_corpus_stays(impl: str) -> None:
    """After any number of requests, and after `clear`. It is cut where a history is full."""
    corpus = "once upon a time there was"
    store = HistoryStore.create(1, 1, 10, DEVICE, ids(corpus))
    assert "".join(histories_of(store)) == corpus
    for text in ("abc", "def", "ghi"):
        serve(store, 0, text, impl)
    assert histories_of(store)[-2:] == ["def", "ghi"] and "".join(histories_of(store)[:-2]) == corpus
    assert drafted(store, 0, "upo", impl, num_nodes=3, order="latest") == ["n", "n "]
    store.clear()
    assert "".join(histories_of(store)) == corpus


class Shelf:
    """The definition in lists: histories of slots, and of finished requests."""

    def __init__(self, slots: int, kept: int) -> None:
        self.slots: list[list[int]] = [[] for _ in range(slots)]
        self.started = [0] * slots
        self.kept: list[tuple[int, list[int]]] = [(0, [])] * kept
        self.clock = 0

    def write(self, slot: int, text: Sequence[int], start: int) -> None:
        if start == 0:
            self.clock += 1
            self.kept = [*self.kept, (self.started[slot], self.slots[slot])][1:]
            self.started[slot] = self.clock
        self.slots[slot] = list(text)

    def move(self, source: int, target: int) -> None:
        for values in (self.slots, self.started):
            values[source], values[target] = values[target], values[source]  # type: ignore[call-overload]

    def held(self) -> list[list[int]]:
        """By request, the oldest first."""
        both = sorted([*self.kept, *zip(self.started, self.slots, strict=True)], key=lambda entry: entry[0])
        return [text for _, text in both if text]

    def draft(
        self, slot: int, num_nodes: int, order: str, max_ngram: int, max_candidates: int, shared: bool
    ) -> dict[Path, float]:
        """Path probability of every draft, in the order of the nodes."""
        own, started = self.slots[slot], self.started[slot]
        others = [*zip(self.started, self.slots, strict=True), *self.kept] if shared else [(started, own)]
        found = []
        for when, text in others:
            for place in range(len(text) - 1):
                size = 0
                while size < min(max_ngram, place + 1, len(own)) and text[place - size] == own[-1 - size]:
                    size += 1
                if size:
                    found.append((size, text is own, when, place, text[place + 1 :][: num_nodes - 1]))
        best = sorted(found, key=lambda entry: entry[:4], reverse=True)[:max_candidates]
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
    """Requests in slots over a small alphabet, with what happens to them, and the sizes of a match."""
    slots, context = draw(st.integers(1, 3)), draw(st.integers(3, 16))
    token = st.integers(0, draw(st.sampled_from([0, 1, 2, 5])))
    return dict(
        slots=slots,
        context=context,
        kept=draw(st.integers(0, 3)),
        events=draw(st.lists(st.tuples(*[st.sampled_from(["begin", "go on", "idle", "move"])] * slots), max_size=6)),
        tokens=draw(st.lists(token, min_size=80, max_size=80)),
        num_nodes=draw(st.integers(2, 12)),
        match=dict(
            order=draw(st.sampled_from(["latest", "frequent"])),
            max_ngram=draw(st.integers(1, 6)),
            max_candidates=draw(st.integers(1, 6)),
            shared=draw(st.booleans()),
        ),
    )


def follow(session: dict[str, Any], impl: str) -> None:
    """Step by step the store holds what is on the shelf, and drafts what the shelf drafts."""
    slots, context, tokens = session["slots"], session["context"], iter(session["tokens"] * 3)
    store, shelf = HistoryStore.create(slots, session["kept"], context, DEVICE), Shelf(slots, session["kept"])
    for events in session["events"]:
        entries = []
        for slot, event in enumerate(events):
            before = [] if event == "begin" else shelf.slots[slot]
            new = [next(tokens) for _ in range(min(2 + slot + 2 * (event == "begin"), context - len(before)))]
            start = max(0, len(before) - 1)
            if event in ("begin", "go on") and len(before) + len(new) - 1 > start:
                entries.append((slot, [*before, *new], start))
        if entries:
            insert(store, entries, impl)
        for slot, text, start in entries:
            shelf.write(slot, text, start)
        if "move" in events and slots > 1:
            store.move_slot(slots - 1, events.index("move") % (slots - 1))
            shelf.move(slots - 1, events.index("move") % (slots - 1))
        held = [text[:size].tolist() for text, size in zip(store.tokens, store.lengths.tolist(), strict=True) if size]
        assert sorted(held) == sorted(shelf.held())
    for slot in range(slots):
        if len(shelf.slots[slot]) > 1:
            found = match(store, slot, shelf.slots[slot], session["num_nodes"], impl, **session["match"])
            expected = shelf.draft(slot, session["num_nodes"], **session["match"])
            assert paths_of(found) == list(expected)
            assert found.path_probs[0, 1 : len(expected) + 1].tolist() == pytest.approx(list(expected.values()))


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
def test_requests_served_together_find_what_each_finds_alone(order: str, sizes: dict[str, int]) -> None:
    """Requests with the same last tokens and with others, two of them outside of the history and one that has written
    nothing, and a corpus: over few tokens there are more hits than a program compares at once."""
    options = dict(
        requests=7, length=24, finished=6, kept=4, alphabet=2, corpus=70, outside=True, order=order, max_candidates=5
    )
    with torch.device("cpu"):
        given = match_inputs(Maker.seeded(DEVICE), 10, max_ngram=9, **options)
    expected = kernels.match_histories(**given, impl="reference")
    with sized(**sizes):
        found = kernels.match_histories(**given, impl="triton")
    for one, other in zip(expected[:2], found[:2], strict=True):
        assert torch.equal(one, other)
    assert torch.allclose(expected.path_probs, found.path_probs, rtol=1e-6)
    assert int((found.parents >= 0).sum()) > 20


@pytest.mark.parametrize("sizes", [FEW, MANY | {"scan": 64}], ids=["few", "many"])
def test_every_bucket_of_a_table_is_found(sizes: dict[str, int]) -> None:
    """As many requests as half of the buckets, each with last tokens of its own: some are entered in the first bucket,
    some in the last, and some after others."""
    slots = 64
    texts = torch.arange(slots)[:, None] * 3 + torch.tensor([0, 1, 2, 0, 1])
    store = HistoryStore.create(slots, 0, 5, DEVICE)
    number, zeros = torch.arange(slots), torch.zeros(slots, dtype=torch.int64)
    kernels.insert_histories(store, texts, number, zeros, (zeros + 4).int(), 4, impl="triton")
    with sized(**sizes):  # the match is in the history of another request
        draft = kernels.match_histories(
            store, texts, zeros + 4, number.roll(1), 2, order="latest", max_ngram=2, impl="triton"
        )
    assert torch.equal(draft.tokens[:, 1], texts[:, 2])


@pytest.mark.parametrize("sizes", [FEW, MANY | {"scan": 64}], ids=["few", "many"])
def test_places_of_one_token_stay_in_the_list_of_their_token(sizes: dict[str, int]) -> None:
    """Each last token occurs in three places of another history, after other tokens than in the request. The list
    holds one, and the lists of 64 tokens are adjacent."""
    number = torch.arange(64)
    zeros = torch.zeros(64, dtype=torch.int64)
    texts = number[:, None] * 3 + torch.tensor([0, 1, 0, 2, 0, 1])
    store = HistoryStore.create(64, 0, 6, DEVICE)
    kernels.insert_histories(store, texts, number, zeros, (zeros + 5).int(), 5, impl="triton")
    asked = torch.stack([number + 1000, number * 3, *[zeros] * 4], 1)
    options: dict[str, Any] = dict(order="latest", max_ngram=2, max_candidates=1, impl="triton")
    with sized(**sizes):
        draft = kernels.match_histories(store, asked, zeros + 1, number.roll(1), 2, **options)
    assert torch.equal(draft.tokens[:, 1], number * 3 + 1)


@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])
def test_every_place_of_a_history_is_read(sizes: dict[str, int]) -> None:
    """Programs read four places: each letter but the last is followed by the next."""
    letters, store = "abcdefghijk", HistoryStore.create(2, 0, 16, DEVICE)
    serve(store, 0, letters, "triton")
    with sized(**sizes):
        found = [drafted(store, 1, "z" + letter, "triton", 2, "latest") for letter in letters]
    assert found == [*([letter] for letter in letters[1:]), []]


@pytest.mark.parametrize(("slots", "width", "kept"), [(1, 1, 0), (256, 33, 64), (4096, 2048, 64)])
def test_insertion_and_matching_are_a_few_launches_at_every_size(
    monkeypatch: pytest.MonkeyPatch, slots: int, width: int, kept: int
) -> None:
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr("specdec_kernels.history.kernel.launch", lambda _, grid, *__, **___: launched.append(grid))
    store, zeros = HistoryStore.create(slots, kept, 4, DEVICE), torch.zeros(slots, dtype=torch.int64)
    history = zeros[:, None].expand(slots, 4).contiguous()
    kernels.insert_histories(store, history, torch.arange(slots), zeros, zeros.int(), width, impl="triton")
    assert len(launched) == 2
    kernels.match_histories(store, history, zeros, torch.arange(slots), 16, order="latest", max_ngram=32, impl="triton")
    assert len(launched) <= 2 + 7


def test_4096_requests_fill_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots begin in every step, many more than histories are kept, others go on or idle: kernels in several programs
    hold and find what the definition holds and finds."""
    slots, length, kept = 4096, 12, 200
    history = torch.randint(1 << 20, (slots, length), generator=torch.Generator("cpu").manual_seed(3), device="cpu")
    history = history.to(DEVICE)
    history[:, 5:8] = history[0, 5:8]
    if DEVICE == "cpu":
        monkeypatch.setitem(CONFIGS, "interpreter", replace(CONFIGS["interpreter"], copy=1 << 12))
    stores = {impl: HistoryStore.create(slots, kept, length, DEVICE) for impl in IMPLS}
    number, done = torch.arange(slots), torch.zeros(slots, dtype=torch.int64)
    for step in range(3):
        counts = ((number * 7 + step) % 5).int()
        done = torch.where((number + step) % 3 == 0, 0, done)
        order = number.roll(step * 100)
        for impl, store in stores.items():
            given = (history[order].contiguous(), order, done[order].contiguous(), counts[order].contiguous())
            kernels.insert_histories(store, *given, 4, impl=impl)
        done = (done + counts).clamp(max=length - 1)
        for expected, found in zip(stores["reference"], stores["triton"], strict=True):
            assert torch.equal(found, expected), step
    assert int(stores["triton"].clock) > 4096 and int((stores["triton"].lengths > 0).sum()) > 4096
    some = torch.arange(0, slots, 128)
    place = (done[some], some, 8)
    for order in ("latest", "frequent"):
        drafts = [
            kernels.match_histories(stores["triton"], history[some], *place, order=order, max_ngram=4, impl=impl)
            for impl in IMPLS
        ]
        assert all(torch.equal(expected, found) for expected, found in zip(*drafts, strict=True))
        assert int((drafts[0].parents >= 0).sum()) > 16


def test_every_age_is_read(impl: str) -> None:
    """Forty requests after one another, each with a word of its own, which is found."""
    store = HistoryStore.create(1, 40, 4, DEVICE)
    for number in range(40):
        insert(store, [(0, [100 + number, 200 + number, 1], 0)], impl)
    insert(store, [(0, [7, 8], 0)], impl)
    for number in range(22, 28):  # of ages around that at which one pass ends and the other begins
        with sized(**MANY):
            assert paths_of(match(store, 0, [7, 100 + number], 3, impl, order="latest"))[0] == (200 + number,)


def test_very_old_histories_are_equally_old(impl: str) -> None:
    """Ages have 16 bits. Beyond, the history with the higher number comes first."""
    store = HistoryStore.create(3, 0, 20, DEVICE)
    serve(store, 0, "xa1", impl)
    serve(store, 1, "xa2", impl)
    serve(store, 2, "xa", impl)
    latest = {"num_nodes": 2, "order": "latest"}
    assert drafted(store, 2, "xa", impl, **latest) == ["2"]
    store.stamps[store.of_slot[0].long()] = 3
    assert drafted(store, 2, "xa", impl, **latest) == ["1"]
    store.clock.add_(MAX_AGE)
    assert drafted(store, 2, "xa", impl, **latest) == ["2" if store.of_slot[1] > store.of_slot[0] else "1"]


def test_the_last_part_of_a_corpus_is_shorter() -> None:
    store = HistoryStore.create(1, 0, 8, DEVICE, ids("abcdefghij"))
    assert store.lengths.tolist() == [0, 8, 2]
    assert drafted(store, 0, "xi", "reference") == ["j"]
