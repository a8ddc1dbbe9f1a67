"""Named inputs of the n-gram family."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Maker, case_of
from specdec_kernels.ngram.reference import ngram_insert
from specdec_kernels.ngram.types import NgramStore


def texts(make: Maker, rows: int, length: int, alphabet: int) -> torch.Tensor:
    """[rows, length] int64 over few tokens, so that n-grams repeat within and between rows."""
    return make.integers(0, alphabet, rows, length)


def filled_store(
    make: Maker, history: torch.Tensor, counts: list[int], capacity: int, depth: int, breadth: int
) -> NgramStore:
    """A store that holds the first `counts[b]` tokens of each row."""
    store = NgramStore.create(capacity, depth, breadth, "cpu")
    rows = history.cpu()
    number = torch.tensor(counts, dtype=torch.int32)
    ngram_insert(store, rows, torch.zeros(len(counts), dtype=torch.int64), number, rows.shape[1])
    return store.to(make.device)


def match_inputs(
    make: Maker,
    num_nodes: int,
    rows: int = 2,
    length: int = 40,
    window: int = 3,
    mode: str = "bfs",
    alphabet: int = 3,
    depth: int = 6,
    breadth: tuple[int, int] = (1, 4),
    capacity: int = 4096,
    beyond: bool = False,
) -> dict[str, Any]:
    """Last tokens spread over rows; the store holds all but three tokens of each. `beyond`: two lie outside."""
    history = texts(make, rows, length, alphabet)
    lengths = make.integers(0, length, rows)
    if beyond:
        lengths[0], lengths[1] = -1, length
        history[2, length // 2] = -5
    store = filled_store(make, history, [max(0, length - 3)] * rows, capacity, depth, breadth[1])
    return dict(
        store=store,
        history=history,
        lengths=lengths,
        num_nodes=num_nodes,
        window=window,
        min_breadth=breadth[0],
        max_breadth=breadth[1],
        mode=mode,
    )


def insert_inputs(
    make: Maker,
    before: list[int],
    new: list[int],
    length: int = 24,
    width: int | None = None,
    alphabet: int = 3,
    depth: int = 5,
    breadth: int = 3,
    capacity: int = 1024,
    hostile: bool = False,
) -> dict[str, Any]:
    """Rows with `before` tokens in the store and `new` tokens to insert."""
    history = texts(make, len(before), length, alphabet)
    store = filled_store(make, history, before, capacity, depth, breadth)
    start = make.tensor(before, torch.int64)
    if hostile:
        history[0, before[0] + 1] = -1
        history[1, before[1]], history[1, before[1] + 1] = (1 << 31) - 1, 1 << 31
        start[2] = -3
    counts = make.tensor(new, torch.int32)
    return dict(store=store, history=history, start=start, counts=counts, width=width or max(new, default=0))


_match = partial(case_of, "ngram_match", match_inputs)
_insert = partial(case_of, "ngram_insert", insert_inputs)

_SHIPPED: dict[str, Any] = dict(gate=True, rows=1, length=40, depth=16, breadth=(1, 8), alphabet=1000)
_STEP: dict[str, Any] = dict(bench=True, tags=("large",), length=160, alphabet=40, depth=16, capacity=1 << 18)
_SEVEN_TOKENS: dict[str, Any] = dict(rows=1, length=60, num_nodes=12, alphabet=7, breadth=(1, 3))

CASES = (
    _match("match_empty_batch", "launch on an empty grid", rows=0, length=8, num_nodes=4, window=2),
    _match("match_empty_store", "an anchor from nothing", length=3, num_nodes=4, window=2),
    _match("match_root_only", "a draft where none was asked for", length=20, num_nodes=1, window=2),
    _match("match_two_nodes", "one budgeted node too many", length=20, num_nodes=2, window=1),
    _match("match_recent", "order of children and breadth by depth", num_nodes=9, window=4),
    _match("match_wide", "children past the breadth", rows=1, length=60, num_nodes=12, alphabet=6, breadth=(2, 5)),
    _match("match_narrow", "a breadth below one", rows=1, length=60, num_nodes=10, window=5, breadth=(1, 1)),
    _match("match_frequent", "weights of anchors and ties between them", num_nodes=8, mode="prob"),
    _match("match_frequent_wide", "the sum over listed children only", mode="prob", **_SEVEN_TOKENS),
    _match("match_outside", "a last token outside", rows=3, length=20, num_nodes=6, beyond=True),
    _match("match_shipped", "registers", num_nodes=16, window=8, **_SHIPPED),
    _match("match_shipped_frequent", "registers", num_nodes=16, window=8, mode="prob", **_SHIPPED),
    _match("match_shipped_64", "registers of a wide tree", num_nodes=64, window=15, **_SHIPPED),
    _match("match_b64", "a step of 64 requests", rows=64, num_nodes=16, window=8, breadth=(1, 8), **_STEP),
    _insert("insert_empty_batch", "launch on an empty grid", before=[], new=[]),
    _insert("insert_first", "windows before the text", before=[0, 0], new=[9, 4]),
    _insert("insert_step", "overlaps counted twice", before=[7, 12, 3], new=[1, 3, 2]),
    _insert("insert_idle_rows", "padding rows inserted", before=[7, 12, 3, 5], new=[0, 2, -4, 1]),
    _insert("insert_past_width", "counts beyond the width", before=[2, 3], new=[9, 2], width=4),
    _insert("insert_past_end", "counts beyond the history", before=[20, 22], new=[9, 5], length=24),
    _insert("insert_same_text", "one n-gram from many rows", before=[0] * 6, new=[8] * 6, alphabet=1),
    _insert("insert_crowded_lists", "the worst child kept", before=[12, 0], new=[8, 20], alphabet=9, breadth=2),
    _insert("insert_hostile", "tokens and starts that are none", before=[4, 4, 4], new=[3, 3, 3], hostile=True),
    _insert("insert_evicting", "a parent evicted before its child", before=[20, 0], new=[2, 9], capacity=96),
    _insert("insert_too_many", "more new n-grams than the store holds", before=[3, 2, 4], new=[9, 11, 1], capacity=40),
    _insert("insert_shipped", "registers", gate=True, before=[20] * 2, new=[9, 3], width=16, depth=16, breadth=8),
    _insert("insert_b64", "a step of 64 requests", before=[150] * 64, new=[3] * 64, width=16, breadth=8, **_STEP),
    _insert("insert_b256", "256 requests at once", before=[90] * 256, new=[33] * 256, width=33, breadth=8, **_STEP),
)
