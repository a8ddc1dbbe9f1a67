"""Launches of the n-gram kernels; `kernel_evict`, `kernel_insert` and `kernel_match` say what they do."""

from __future__ import annotations

import torch
import triton

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.ngram.configs import CONFIGS, NgramConfig, match_warps
from specdec_kernels.ngram.kernel_evict import count_ages_kernel, drop_nodes_kernel, enter_nodes_kernel, plan_kernel
from specdec_kernels.ngram.kernel_insert import find_beginnings_kernel, insert_kernel, list_children_kernel
from specdec_kernels.ngram.kernel_match import match_kernel
from specdec_kernels.ngram.types import NgramDraft, NgramStore


def ngram_insert(
    store: NgramStore, history: torch.Tensor, start: torch.Tensor, counts: torch.Tensor, width: int
) -> None:
    """See `specdec_kernels.ngram_insert`, which has checked the arguments."""
    config = CONFIGS[current_chip(history)]
    (rows, context), depth = history.shape, store.max_depth
    begin, kept, stamps = torch.empty_like(start), torch.empty_like(counts), torch.empty_like(start)
    launch(
        plan_kernel,
        (1,),
        *(start, counts, begin, kept, stamps, store.counters, rows, width, context),
        num_warps=8,
        CAPACITY=store.capacity,
        DEPTH=depth,
        MOST=store.insertion_limit,
        BLOCK=config.sweep,
    )
    _make_room(store, config)
    beginnings = torch.empty(rows, depth - 1, dtype=torch.int32, device=history.device)
    entered, sizes = (history, begin, kept), (rows, history.stride(0))
    shape = dict(CAPACITY=store.capacity, DEPTH=depth, BITS=_bits(store), BLOCK=config.windows)
    launch(
        find_beginnings_kernel,
        (triton.cdiv(rows * (depth - 1), config.windows),),
        *(*entered, beginnings, store.keys, store.nodes, store.times, store.counters, *sizes),
        num_warps=1,
        **shape,
    )
    launch(
        insert_kernel,
        (triton.cdiv(rows * (depth - 1 + width), config.windows),),
        *(*entered, stamps, beginnings),
        *(store.keys, store.nodes, store.ints, store.times, store.counters, *sizes, width),
        num_warps=1,
        **shape,
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


def _make_room(store: NgramStore, config: NgramConfig) -> None:
    """Evict, if the plan of the insertion says that the store is full."""
    keys, nodes, ints, times, lists, counters, ages = store.tensors()
    grid = (min(triton.cdiv(store.capacity, config.sweep), config.sweep_programs),)
    shape = dict(CAPACITY=store.capacity, BLOCK=config.sweep)
    launch(count_ages_kernel, grid, times, ages, counters, num_warps=8, **shape)
    table = dict(shape, BITS=_bits(store))
    launch(
        drop_nodes_kernel,
        grid,
        *(keys, nodes, ints, times, lists, counters, ages),
        num_warps=8,
        LISTED=store.list_width,
        **table,
    )
    launch(enter_nodes_kernel, grid, keys, nodes, ints, counters, ages, num_warps=8, **table)


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
        *(history, lengths, tokens, parents, *store.tensors()[:-2], history.stride(0), context),
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
