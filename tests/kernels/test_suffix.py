"""What the store of texts keeps, and which drafts it makes: small texts whose answer is plain to see."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import specdec_kernels as kernels
from specdec_kernels import SuffixStore

IMPLS = ("reference", "triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def on_the_device_of_the_kernels() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def serve(store: SuffixStore, row: int, text: str, impl: str, start: int = 0) -> torch.Tensor:
    """Row `row` writes the tokens of `text` from `start` on, the last of which is its last token."""
    history = torch.zeros(1, store.tokens.shape[1], dtype=torch.int64)
    history[0, : len(text)] = torch.tensor(ids(text))
    count = len(text) - 1 - start
    place = torch.tensor([start]), torch.tensor([count], dtype=torch.int32)
    kernels.suffix_insert(store, history, torch.tensor([row]), *place, max(1, count), impl=impl)
    return history


def drafted(store: SuffixStore, row: int, text: str, impl: str, num_nodes: int = 8, **options: object) -> set[str]:
    """Every path of the tree behind `text`."""
    history = torch.zeros(1, store.tokens.shape[1], dtype=torch.int64)
    history[0, : len(text)] = torch.tensor(ids(text))
    given = (torch.tensor([len(text) - 1]), torch.tensor([row]), num_nodes)
    draft = kernels.suffix_match(store, history, *given, window=16, impl=impl, **options)  # type: ignore[arg-type]
    paths = {0: ""}
    for node, (token, parent) in enumerate(zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True)):
        if parent >= 0:
            paths[node] = paths[parent] + chr(token)
    return {path for path in paths.values() if path}


def texts_of(store: SuffixStore) -> list[str]:
    """All texts, the oldest first."""
    order = sorted(range(len(store.lengths)), key=lambda slot: int(store.stamps[slot]))
    held = [store.tokens[slot, : int(store.lengths[slot])].tolist() for slot in order if int(store.stamps[slot])]
    return ["".join(map(chr, tokens)) for tokens in held]


@pytest.mark.parametrize("impl", IMPLS)
def test_what_followed_the_longest_match_is_drafted(impl: str) -> None:
    store = SuffixStore.create(1, 2, 40, DEVICE)
    text = "the cat sat. the dog ran. the cat"
    serve(store, 0, text, impl)
    assert drafted(store, 0, text, impl, num_nodes=5) == {" ", " s", " sa", " sat"}


@pytest.mark.parametrize("impl", IMPLS)
def test_the_more_frequent_continuation_comes_first(impl: str) -> None:
    store = SuffixStore.create(1, 2, 40, DEVICE)
    text = "ab1 ab2 ab2 ab"
    serve(store, 0, text, impl)
    assert drafted(store, 0, text, impl, num_nodes=2) == {"2"}
    assert drafted(store, 0, text, impl, num_nodes=4) == {"2", "2 ", "2 a"}
    assert "1" in drafted(store, 0, text, impl, num_nodes=16)
    assert drafted(store, 0, text, impl, num_nodes=16, min_share=0.6) == {"2", "2 ", "2 a", "2 ab"}


@pytest.mark.parametrize("impl", IMPLS)
def test_short_matches_draft_short_paths(impl: str) -> None:
    store = SuffixStore.create(1, 2, 40, DEVICE)
    serve(store, 0, "xabcdefgh-x", impl)
    assert max(map(len, drafted(store, 0, "xabcdefgh-x", impl, num_nodes=8, factor=3.0))) == 3


@pytest.mark.parametrize("impl", IMPLS)
def test_texts_of_others_are_read_only_where_they_are_shared(impl: str) -> None:
    store = SuffixStore.create(2, 1, 40, DEVICE)
    serve(store, 0, "hello world", impl)
    serve(store, 1, "say hello", impl)
    assert " w" in drafted(store, 1, "say hello", impl)
    assert " w" not in drafted(store, 1, "say hello", impl, shared=False)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_oldest_text_without_a_row_makes_room(impl: str) -> None:
    """Three slots, two rows: row 1 runs on while row 0 serves one request after the other."""
    store = SuffixStore.create(2, 1, 20, DEVICE)
    serve(store, 1, "running", impl)
    for text in ("first", "second", "third"):
        serve(store, 0, text, impl)
    assert texts_of(store) == ["running", "second", "third"]
    serve(store, 1, "running on", impl, start=6)
    assert texts_of(store) == ["running on", "second", "third"]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_request_that_moves_takes_its_text_with_it(impl: str) -> None:
    store = SuffixStore.create(2, 1, 20, DEVICE)
    serve(store, 0, "one", impl)
    serve(store, 1, "two", impl)
    store.move_row(1, 0)
    serve(store, 0, "two more", impl, start=2)
    assert texts_of(store) == ["one", "two more"]
    serve(store, 1, "three", impl)
    serve(store, 0, "two more words", impl, start=7)
    serve(store, 1, "four", impl)  # the text of request one is the oldest that no row writes into
    assert texts_of(store) == ["two more words", "three", "four"]
    store.clear()
    assert texts_of(store) == [] and drafted(store, 0, "two", impl) == set()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"window": 64}, "window: expected 1 to 63, got 64"),
        ({"num_nodes": 1}, "num_nodes: expected 2 to 256, got 1"),
        ({"matches": 65}, "matches: expected 1 to 64, got 65"),
        ({"per_text": 0}, "per_text: expected 1 to 16, got 0"),
        ({"factor": 0.0}, "factor: expected above 0"),
        ({"min_share": 1.5}, "min_share: expected 0 to 1, got 1.5"),
        ({"rows": torch.zeros(1, dtype=torch.int32)}, "rows"),
        ({"history": torch.zeros(1, 9, dtype=torch.int64)}, "history"),
    ],
)
def test_wrong_inputs(options: dict[str, object], expected: str) -> None:
    store = SuffixStore.create(1, 1, 12, DEVICE)
    zero = torch.zeros(1, dtype=torch.int64)
    history = torch.zeros(1, 12, dtype=torch.int64)
    given = {"history": history, "lengths": zero, "rows": zero, "num_nodes": 4, "window": 3}
    with pytest.raises(ValueError, match=expected):
        kernels.suffix_match(store, **(given | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "texts", "context"), [(0, 4, 9), (1, -1, 9), (300, 300, 9), (1, 1, 0), (1, 1, 1 << 24)]
)
def test_sizes_of_a_store(rows: int, texts: int, context: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to"):
        SuffixStore.create(rows, texts, context, DEVICE)


@pytest.mark.parametrize("impl", IMPLS)
def test_confidence_grows_with_the_match_and_falls_with_depth(impl: str) -> None:
    """A match of 3 tokens is trusted 3 / (3 + depth). One of 2 tokens has four times the votes of one of 1."""
    store = SuffixStore.create(1, 2, 40, DEVICE)
    shared = [0.8 * 2 / 3, 0.8 * 2 / 4, 0.8 * 2 / 5, 0.2 * 2 / 3]
    for text, told in (("abcdefg. abc", [3 / 4, 3 / 5, 3 / 6]), ("xa xb x", shared)):
        history = serve(store, 0, text, impl)
        place = torch.tensor([len(text) - 1]), torch.tensor([0])
        draft = kernels.suffix_match(store, history, *place, len(told) + 1, window=16, impl=impl)
        assert draft.confidence[0].tolist() == pytest.approx([1, *told], abs=2e-3)
        assert float(draft.strength) == pytest.approx(sum(told), abs=5e-3)
