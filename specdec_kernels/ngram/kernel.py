"""Launches of the n-gram kernels; `kernel_evict`, `kernel_insert` and `kernel_match` say what they do."""

from __future__ import annotations

import torch
import triton

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.ngram.configs import CONFIGS, match_warps
from specdec_kernels.ngram.kernel_evict import make_room_kernel
from specdec_kernels.ngram.kernel_insert import find_beginnings_kernel, insert_kernel, list_children_kernel
from specdec_kernels.ngram.kernel_match import match_kernel
from specdec_kernels.ngram.types import NgramDraft, NgramStore


def ngram_insert(
    store: NgramStore, history: torch.Tensor, start: torch.Tensor, counts: torch.Tensor, width: int
) -> None:
    """One piece of `specdec_kernels.ngram_insert`."""
    config = CONFIGS[current_chip(history)]
    rows, context = history.shape
    depth = store.max_depth
    shape = dict(CAPACITY=store.capacity, DEPTH=depth, BITS=_bits(store))
    sizes = (rows, history.stride(0), width, context)
    stamps = torch.empty_like(start)
    beginnings = torch.empty(rows, depth - 1, dtype=torch.int32, device=history.device)
    launch(
        make_room_kernel,
        (1,),
        *(start, counts, stamps, *store.tensors(), rows, width, context),
        num_warps=8,
        **shape,
        LISTED=store.list_width,
        BLOCK=config.sweep,
    )
    launch(
        find_beginnings_kernel,
        (triton.cdiv(rows * (depth - 1), config.windows),),
        *(history, start, counts, beginnings, store.keys, store.nodes, store.times, store.counters, *sizes),
        num_warps=1,
        **shape,
        BLOCK=config.windows,
    )
    launch(
        insert_kernel,
        (triton.cdiv(rows * (depth - 1 + width), config.windows),),
        *(history, start, counts, stamps, beginnings),
        *(store.keys, store.nodes, store.ints, store.times, store.counters, *sizes),
        num_warps=1,
        **shape,
        BLOCK=config.windows,
    )
    launch(
        list_children_kernel,
        (config.list_programs,),
        *(store.ints, store.times, store.lists, store.counters),
        num_warps=1,
        CAPACITY=store.capacity,
        LISTED=store.list_width,
        PARENTS=max(2, config.pairs // store.list_width**2),
    )


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
    rows, context = history.shape
    tokens = torch.empty(rows, num_nodes, dtype=torch.int64, device=history.device)
    parents = torch.empty(rows, num_nodes, dtype=torch.int32, device=history.device)
    anchors, entries = lanes(window), lanes(num_nodes)
    launch(
        match_kernel,
        (rows,),
        *(history, lengths, tokens, parents, *store.tensors()[:-1], history.stride(0), context),
        num_warps=match_warps(anchors, entries),
        NODES=num_nodes,
        WINDOW=window,
        LEAST=min_breadth,
        MOST=max_breadth,
        BY_COUNT=mode == "prob",
        CAPACITY=store.capacity,
        LISTED=store.list_width,
        BITS=_bits(store),
        ANCHORS=anchors,
        ENTRIES=entries,
    )
    return NgramDraft(tokens, parents)


def _bits(store: NgramStore) -> int:
    """The hash table has 2^bits cells."""
    return len(store.keys).bit_length() - 1
