"""Named inputs of the family."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Maker, case_of
from specdec_kernels.texts.reference import insert_texts
from specdec_kernels.texts.types import TextStore


def filled_store(
    make: Maker, history: torch.Tensor, counts: list[int], kept: int, ended: int, corpus: int = 0
) -> TextStore:
    """A store in which row b has written `counts[b]` tokens, after `ended` requests that were served in row 0."""
    words = make.integers(0, 3, corpus).tolist()
    if not counts:
        return TextStore.create(1, 1, history.shape[1], make.device)
    store = TextStore.create(len(counts) + 1, kept, history.shape[1], "cpu", words)
    host, zero = history.cpu(), torch.zeros(1, dtype=torch.int64)
    for number in range(ended):
        source = number % len(counts)
        text = host[source : source + 1].roll(number + 1, 1).contiguous()
        size = torch.tensor([history.shape[1] - 2 - number % 3], dtype=torch.int32)
        insert_texts(store, text, zero, zero, size, history.shape[1])
    rows = torch.arange(len(counts))
    insert_texts(store, host, rows, torch.zeros_like(rows), torch.tensor(counts).int(), history.shape[1])
    return TextStore(*(tensor.to(make.device) for tensor in store))


def match_inputs(
    make: Maker,
    num_nodes: int,
    order: str = "frequent",
    rows: int = 2,
    length: int = 40,
    window: int = 6,
    alphabet: int = 3,
    kept: int = 3,
    ended: int = 4,
    corpus: int = 0,
    beyond: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Requests at unequal lengths, over few tokens so that suffixes repeat. `beyond`: two last tokens lie outside, and
    one request has written nothing."""
    history = make.integers(0, alphabet, rows, length)
    lengths = make.integers(length // 2, length - 1, rows)
    store = filled_store(make, history, lengths.tolist(), kept, ended, corpus)
    if beyond:
        lengths[0], lengths[1], lengths[2] = 0, length, -1
    numbers = torch.arange(rows, device=make.device)
    given = dict(store=store, history=history, lengths=lengths, rows=numbers, num_nodes=num_nodes, order=order)
    return given | dict(window=window) | options


def insert_inputs(
    make: Maker,
    before: list[int],
    start: list[int],
    new: list[int],
    length: int = 24,
    width: int | None = None,
    kept: int = 2,
    ended: int = 3,
) -> dict[str, Any]:
    """Rows with `before` tokens in their texts, then `new` tokens from `start` on."""
    history = make.integers(0, 9, len(before), length)
    store = filled_store(make, history, before, kept, ended)
    rows = torch.arange(len(before), device=make.device).flip(0).contiguous()
    return dict(
        store=store,
        history=history,
        rows=rows,
        start=make.tensor(start, torch.int64),
        counts=make.tensor(new, torch.int32),
        width=width or max(new, default=0),
    )


_match = partial(case_of, "match_texts", match_inputs)
_insert = partial(case_of, "insert_texts", insert_inputs)
_NO_ROOM: dict[str, Any] = dict(before=[5, 9], start=[0, 0], new=[3, 3], kept=0, ended=0)
_ALL_NEW: dict[str, Any] = dict(before=[5, 9, 3, 7], start=[0, 0, 0, 0], new=[7, 2, 4, 1], kept=1)
_SHIPPED: dict[str, Any] = dict(gate=True, rows=1, num_nodes=16, window=32, kept=64, alphabet=1000)
_STEP: dict[str, Any] = dict(bench=True, tags=("large",), length=1024, alphabet=40, window=32, num_nodes=16)

CASES = (
    _match("match_empty_batch", "launch on an empty grid", rows=0, num_nodes=4),
    _match("match_empty_store", "a match in an empty text", rows=1, length=3, num_nodes=4, kept=0, ended=0),
    _match("match_two_nodes", "one budgeted node too many", num_nodes=2),
    _match("match_tree", "order of equal shares", num_nodes=12),
    _match("match_latest", "shares of siblings", num_nodes=12, order="latest", matches=9),
    _match("match_one_letter", "every position matches", num_nodes=20, alphabet=1, matches=7),
    _match("match_rare", "no match at all", num_nodes=6, alphabet=1000),
    _match("match_own", "texts of other requests", num_nodes=9, shared=False),
    _match("match_own_latest", "texts of other requests", num_nodes=9, shared=False, order="latest"),
    _match("match_window_1", "hits of two tokens before later ones of one", num_nodes=9, window=1, rows=3, ended=9),
    _match("match_few", "matches past the budget", num_nodes=16, matches=3),
    _match("match_one", "a second way", num_nodes=8, matches=1, order="latest"),
    _match("match_odd", "lanes past the budget", num_nodes=17, matches=5, kept=6, ended=9),
    _match("match_old", "a text read twice", rows=1, num_nodes=16, kept=20, ended=20, length=6, alphabet=2, matches=64),
    _match("match_corpus", "a corpus cut into texts", num_nodes=9, corpus=90, ended=1, order="latest"),
    _match("match_many_siblings", "siblings past the last that counts", num_nodes=30, alphabet=8, order="latest"),
    _match("match_sure", "a confidence below the least", num_nodes=24, min_confidence=0.3),
    _match("match_sure_latest", "a confidence below the least", num_nodes=24, min_confidence=0.4, order="latest"),
    _match("match_outside", "a last token outside", rows=3, num_nodes=6, beyond=True),
    _match("match_shipped", "registers", **_SHIPPED),
    _match("match_shipped_latest", "registers", order="latest", **_SHIPPED),
    _match("match_shipped_many", "registers", **_SHIPPED | dict(rows=48)),
    _match("match_shipped_own", "registers", shared=False, **_SHIPPED),
    _match("match_b1", "a step of one request", rows=1, kept=64, ended=64, **_STEP),
    _match("match_b1_latest", "a step of one request", rows=1, kept=64, ended=64, order="latest", **_STEP),
    _match("match_b32", "a step of 32 requests", rows=32, kept=64, ended=64, **_STEP),
    _match("match_b256", "256 requests at once", rows=256, kept=64, ended=64, order="latest", **_STEP),
    _insert("insert_empty_batch", "launch on an empty grid", before=[], start=[], new=[]),
    _insert("insert_step", "the last token left out", before=[5, 9, 3], start=[3, 9, 5], new=[2, 4, 1]),
    _insert("insert_idle", "padding rows write", before=[5, 9, 3], start=[0, 9, 5], new=[0, -3, 2]),
    _insert("insert_new", "two requests in one text", before=[5, 9, 3], start=[0, 0, 0], new=[7, 2, 4]),
    _insert("insert_all_new", "more new requests than texts are kept", **_ALL_NEW),
    _insert("insert_past_end", "tokens beyond the history", before=[5, 9, 7], start=[20, 22, 24], new=[9, 1, 3]),
    _insert("insert_past_width", "counts beyond the width", before=[5, 9], start=[9, 5], new=[6, 2], width=3),
    _insert("insert_no_room", "a text taken from a running row", **_NO_ROOM),
    _insert("insert_shipped", "registers", gate=True, before=[9] * 2, start=[9, 9], new=[3, 2], width=16, kept=64),
    _insert(
        "insert_b256", "256 requests at once", bench=True, tags=("large",), length=1024, kept=64,
        before=[90] * 256, start=[90] * 256, new=[3] * 256, width=16,
    ),
)  # fmt: skip
