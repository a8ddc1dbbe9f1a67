"""Launches of the kernels over texts; `kernel_insert`, `kernel_find`, `kernel_select` and `kernel_draft` say
what they do."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton

from specdec_kernels.launch import current_chip, lanes, launch, num_processors
from specdec_kernels.texts.configs import CONFIGS, draft_warps
from specdec_kernels.texts.kernel_draft import draft_kernel
from specdec_kernels.texts.kernel_find import divide_kernel, file_requests_kernel, find_kernel, sort_kernel
from specdec_kernels.texts.kernel_insert import exchange_texts_kernel, write_texts_kernel
from specdec_kernels.texts.kernel_select import select_kernel
from specdec_kernels.texts.types import TextDraft, TextStore

_MAX_RANKS = 512
"""Ranks among which a program chooses the best."""


def insert_texts(
    store: TextStore,
    history: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    counts: torch.Tensor,
    width: int,
) -> None:
    """See `specdec_kernels.insert_texts`, which has checked the arguments."""
    config = CONFIGS[current_chip(history)]
    batch, context = history.shape
    launch(
        exchange_texts_kernel,
        (1,),
        *(rows, start, counts, store.lengths, store.stamps, store.slots, store.queue, store.clock, batch),
        num_warps=4,
        KEPT=store.num_kept,
        RING=len(store.queue),
        BLOCK=min(lanes(batch), 1024),
    )
    launch(
        write_texts_kernel,
        (triton.cdiv(batch * (width + 1), config.copy),),
        *(history, rows, start, counts, store.tokens, store.lengths, store.slots),
        *(batch, history.stride(0), width, context),
        num_warps=4,
        BLOCK=config.copy,
    )


def match_texts(
    store: TextStore,
    history: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    num_nodes: int,
    order: str,
    window: int,
    matches: int,
    least: int,
    shared: bool,
) -> TextDraft:
    """See `specdec_kernels.match_texts`, which has checked the arguments. `least` counts in parts of `LEAST_STEPS`."""
    config = CONFIGS[current_chip(history)]
    batch, context = history.shape
    kept = lanes(matches)
    parts = lanes(max(1, min(config.parts, config.programs // max(batch, 1), _MAX_RANKS // kept)))
    found = _find(store, history, lengths, matches) if shared else _nothing(history)
    new = partial(torch.empty, device=history.device)
    ranks = new(batch, parts * kept, dtype=torch.int64)
    tokens, parents = new(batch, num_nodes, dtype=torch.int64), new(batch, num_nodes, dtype=torch.int32)
    strength, confidence = new(batch, dtype=torch.float32), new(batch, num_nodes, dtype=torch.float32)
    launch(
        select_kernel,
        (batch, parts),
        *(history, lengths, rows, store.slots, store.tokens, store.lengths, store.stamps, store.clock),
        *(found.cells, found.hits, found.counts, found.ends, ranks, history.stride(0), context),
        num_warps=4,
        WINDOW=window,
        SHARED=shared,
        SORTED=found.pairs,
        MATCHES=matches,
        KEPT=kept,
        BLOCK=config.select,
    )
    launch(
        draft_kernel,
        (batch,),
        *(history, lengths, store.tokens, store.lengths, ranks, found.latest, found.homes),
        *(tokens, parents, strength, confidence, history.stride(0), context),
        num_warps=draft_warps(kept, lanes(num_nodes), batch),
        NODES=num_nodes,
        MATCHES=matches,
        LEAST=least,
        FREQUENT=order == "frequent",
        LATEST=found.pairs,
        RANKS=parts * kept,
        BLOCK_M=kept,
        BLOCK_N=lanes(num_nodes),
    )
    return TextDraft(tokens, parents, strength, confidence)


class _Found(NamedTuple):
    """What reading the texts found; shapes and meanings as `select_kernel` and `draft_kernel` name them."""

    pairs: bool
    """Whether hits are places of the last two tokens, sorted by cell, and `latest` has those of the last one."""
    cells: torch.Tensor
    hits: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor
    latest: torch.Tensor
    homes: torch.Tensor


def _nothing(history: torch.Tensor) -> _Found:
    """For a match in the requests' own texts, which reads none of this."""
    empty = torch.empty(0, dtype=torch.int64, device=history.device)
    return _Found(False, *[empty] * 6)


def _find(store: TextStore, history: torch.Tensor, lengths: torch.Tensor, matches: int) -> _Found:
    """Read all texts for all requests."""
    config = CONFIGS[current_chip(history)]
    batch, context = history.shape
    pairs = batch > config.few
    bits = max(6, (2 * batch - 1).bit_length())
    cells = 1 << bits
    new = partial(torch.empty, dtype=torch.int64, device=history.device)
    # Nothing is filed and nothing is found at first.
    sizes = (cells, cells * pairs, cells * pairs, cells * pairs * matches, 1, 1)
    blank = torch.full((sum(sizes),), -1, dtype=torch.int64, device=history.device)
    filed, filed_pairs, counts, latest, total, divided = blank.split(sizes)
    homes, ends = new(batch), new(cells * pairs)
    of_pairs = new(batch) if pairs else homes
    hits = new(store.tokens.numel())
    launch(
        file_requests_kernel,
        (triton.cdiv(batch, config.file),),
        *(history, lengths, filed, filed_pairs, homes, of_pairs, batch, history.stride(0), context),
        num_warps=4,
        PAIRS=pairs,
        BITS=bits,
        BLOCK=config.file,
    )
    width = lanes(context, config.scan)
    texts = triton.cdiv(len(store.lengths), config.scan // width)
    for newest in (True, False) if pairs else (False,):
        launch(
            find_kernel,
            (texts, 1 if newest else triton.cdiv(context, width)),
            *(store.tokens, store.lengths, store.stamps, store.clock, filed, filed_pairs, latest),
            *(hits, total, counts, context),
            num_warps=4,
            TEXTS=len(store.lengths),
            PAIRS=pairs,
            NEWEST=newest,
            MATCHES=matches,
            BITS=bits,
            WIDTH=width,
            BLOCK=config.scan,
        )
    if not pairs:
        return _Found(pairs, homes, hits, total, ends, latest, homes)
    ordered = torch.empty_like(hits)
    launch(divide_kernel, (triton.cdiv(cells, 1024),), counts, divided, ends, num_warps=4, BLOCK=min(cells, 1024))
    programs = min(2 * num_processors(history), triton.cdiv(len(hits), config.select))
    launch(sort_kernel, (programs,), hits, total, ends, ordered, num_warps=4, BLOCK=config.select)
    return _Found(pairs, of_pairs, ordered, counts, ends, latest, homes)
