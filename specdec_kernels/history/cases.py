"""Named inputs of the family."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.cases import Maker, case_of
from specdec_kernels.history.reference import insert_histories
from specdec_kernels.history.types import HistoryStore


def filled_store(
    make: Maker, history: Tensor, counts: list[int], kept: int, finished: int, corpus: int = 0
) -> HistoryStore:
    """A store in which slot b has written `counts[b]` tokens, after `finished` requests that were served in slot 0."""
    words = make.integers(0, 3, corpus).tolist()
    if not counts:
        return HistoryStore.create(1, 1, history.shape[1], make.device)
    store = HistoryStore.create(len(counts) + 1, kept, history.shape[1], "cpu", words)
    host, zero = history.cpu(), torch.zeros(1, dtype=torch.int64)
    for number in range(finished):
        source = number % len(counts)
        tokens = host[source : source + 1].roll(number + 1, 1).contiguous()
        size = torch.tensor([history.shape[1] - 2 - number % 3], dtype=torch.int32)
        insert_histories(store, tokens, zero, zero, size, history.shape[1])
    slots = torch.arange(len(counts))
    insert_histories(store, host, slots, torch.zeros_like(slots), torch.tensor(counts).int(), history.shape[1])
    return HistoryStore(*(tensor.to(make.device) for tensor in store))


def match_inputs(
    make: Maker,
    num_nodes: int,
    order: str = "frequent",
    requests: int = 2,
    length: int = 40,
    max_ngram: int = 6,
    alphabet: int = 3,
    kept: int = 3,
    finished: int = 4,
    corpus: int = 0,
    outside: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Requests at unequal lengths, over few tokens so that suffixes repeat. `outside`: two last tokens lie outside, and
    one request has written nothing."""
    history = make.integers(0, alphabet, requests, length)
    lengths = make.integers(length // 2, length - 1, requests)
    store = filled_store(make, history, lengths.tolist(), kept, finished, corpus)
    if outside:
        lengths[0], lengths[1], lengths[2] = 0, length, -1
    slots = torch.arange(requests, device=make.device)
    given = dict(store=store, history=history, lengths=lengths, slots=slots, num_nodes=num_nodes, order=order)
    return given | dict(max_ngram=max_ngram) | options


def insert_inputs(
    make: Maker,
    before: list[int],
    start: list[int],
    new: list[int],
    length: int = 24,
    width: int | None = None,
    kept: int = 2,
    finished: int = 3,
) -> dict[str, Any]:
    """Slots with `before` tokens in their histories, then `new` tokens from `start` on."""
    history = make.integers(0, 9, len(before), length)
    return dict(
        store=filled_store(make, history, before, kept, finished),
        history=history,
        slots=torch.arange(len(before), device=make.device).flip(0).contiguous(),
        start=make.tensor(start, torch.int64),
        counts=make.tensor(new, torch.int32),
        width=width or max(new, default=0),
    )


_match = partial(case_of, "match_histories", match_inputs)
_insert = partial(case_of, "insert_histories", insert_inputs)
_OLD: dict[str, Any] = dict(requests=1, kept=20, finished=20, length=6, alphabet=2, max_candidates=64)
_SHIPPED: dict[str, Any] = dict(gate=True, requests=1, num_nodes=16, max_ngram=32, kept=64, alphabet=1000)
_STEP: dict[str, Any] = dict(bench=True, tags=("large",), length=1024, alphabet=40, max_ngram=32, num_nodes=16, kept=64)

CASES = (
    _match("match_empty_batch", "launch on an empty grid", requests=0, num_nodes=4),
    _match("match_empty_store", "a match in an empty history", requests=1, length=3, num_nodes=4, kept=0, finished=0),
    _match("match_two_nodes", "one node too many", num_nodes=2),
    _match("match_tree", "order of equal shares", num_nodes=12),
    _match("match_latest", "shares of siblings", num_nodes=12, order="latest", max_candidates=9),
    _match("match_one_letter", "every position matches", num_nodes=20, alphabet=1, max_candidates=7),
    _match("match_rare", "no match at all", num_nodes=6, alphabet=1000),
    _match("match_own", "histories of other requests", num_nodes=9, shared=False),
    _match("match_unigrams", "hits of two tokens first", num_nodes=9, max_ngram=1, requests=3, finished=9),
    _match("match_few", "candidates past the last", num_nodes=16, max_candidates=3),
    _match("match_one", "a second candidate", num_nodes=8, max_candidates=1, order="latest"),
    _match("match_odd", "lanes past the last node", num_nodes=17, max_candidates=5, kept=6, finished=9),
    _match("match_old", "a history read twice", num_nodes=16, **_OLD),
    _match("match_corpus", "a corpus cut into histories", num_nodes=9, corpus=90, finished=1, order="latest"),
    _match("match_many_siblings", "siblings past the last that counts", num_nodes=30, alphabet=8, order="latest"),
    _match("match_sure", "a path below the least probability", num_nodes=24, min_path_prob=0.3),
    _match("match_sure_latest", "a path below the least", num_nodes=24, min_path_prob=0.4, order="latest"),
    _match("match_outside", "a last token outside", requests=3, num_nodes=6, outside=True),
    _match("match_shipped", "registers", **_SHIPPED),
    _match("match_shipped_latest", "registers", order="latest", **_SHIPPED),
    _match("match_shipped_many", "registers", **_SHIPPED | dict(requests=48, tags=("large",))),
    _match("match_shipped_own", "registers", shared=False, **_SHIPPED),
    _match("match_b1", "a step of one request", requests=1, finished=64, **_STEP),
    _match("match_b1_latest", "a step of one request", requests=1, finished=64, order="latest", **_STEP),
    _match("match_b32", "a step of 32 requests", requests=32, finished=64, **_STEP),
    _match("match_b256", "256 requests at once", requests=256, finished=64, order="latest", **_STEP),
    _insert("insert_empty_batch", "launch on an empty grid", before=[], start=[], new=[]),
    _insert("insert_step", "the last token left out", before=[5, 9, 3], start=[3, 9, 5], new=[2, 4, 1]),
    _insert("insert_idle", "padding slots write", before=[5, 9, 3], start=[0, 9, 5], new=[0, -3, 2]),
    _insert("insert_new", "two requests in one history", before=[5, 9, 3], start=[0, 0, 0], new=[7, 2, 4]),
    _insert("insert_all_new", "more new requests than kept", before=[5, 9, 3, 7], start=[0] * 4, new=[7, 2, 4, 1],
            kept=1),
    _insert("insert_past_end", "tokens beyond the history", before=[5, 9, 7], start=[20, 22, 24], new=[9, 1, 3]),
    _insert("insert_past_width", "counts beyond the width", before=[5, 9], start=[9, 5], new=[6, 2], width=3),
    _insert(
        "insert_no_room", "a history taken from a running slot", before=[5, 9], start=[0, 0], new=[3, 3], kept=0,
        finished=0,
    ),
    _insert("insert_shipped", "registers", gate=True, before=[9] * 2, start=[9, 9], new=[3, 2], width=16, kept=64),
    _insert(
        "insert_b256", "256 requests at once", bench=True, tags=("large",), length=1024, kept=64,
        before=[90] * 256, start=[90] * 256, new=[3] * 256, width=16,
    ),
)  # fmt: skip
