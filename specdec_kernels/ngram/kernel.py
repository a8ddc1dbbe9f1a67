"""Launches of the n-gram kernels; see `eviction`, `insertion` and `matching` for what they do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.ngram.eviction import make_room_kernel
from specdec_kernels.ngram.insertion import find_beginnings_kernel, insert_kernel, list_children_kernel
from specdec_kernels.ngram.matching import match_kernel
from specdec_kernels.ngram.types import NgramDraft, NgramStore


@dataclass(frozen=True)
class NgramConfig:
    """Lanes of a program that follows windows (few, because lanes wait for memory, not for arithmetic) and of one that
    passes over the store; pairs of children that one program compares at once, and how many programs do so."""

    windows: int
    sweep: int
    pairs: int
    list_programs: int


# 64 lanes are one warp on AMD: with fewer, threads would be copies of each other, which atomics do not forgive.
_GPU = NgramConfig(windows=64, sweep=1024, pairs=1024, list_programs=528)
# The interpreter pays by the program, not by the lane.
_CONFIGS = {
    "sm80": _GPU,
    "sm90": _GPU,
    "sm100": _GPU,
    # One swap a thread: with several, Triton 3.6 does not compile for this chip.
    "gfx942": replace(_GPU, sweep=512),
    "interpreter": NgramConfig(windows=1024, sweep=1 << 14, pairs=1 << 16, list_programs=1),
}
_MATCH_LANES_PER_WARP = 64


def ngram_insert(
    store: NgramStore, history: torch.Tensor, start: torch.Tensor, counts: torch.Tensor, width: int
) -> None:
    """See `specdec_kernels.ngram.ngram_insert`; one piece."""
    config = _CONFIGS[current_chip(history)]
    rows, context = history.shape
    shape = dict(CAPACITY=store.capacity, DEPTH=store.max_depth, BITS=_bits(store))
    sizes = (rows, history.stride(0), width, context)
    stamps = torch.empty_like(start)
    beginnings = torch.empty(rows, store.max_depth - 1, dtype=torch.int32, device=history.device)
    table = (store.keys, store.nodes)
    launch(
        make_room_kernel,
        (1,),
        start,
        counts,
        stamps,
        *store.tensors(),
        rows,
        width,
        context,
        num_warps=8,
        **shape,
        LISTED=store.list_width,
        BLOCK=config.sweep,
    )
    launch(
        find_beginnings_kernel,
        (triton.cdiv(beginnings.numel(), config.windows),),
        history,
        start,
        counts,
        beginnings,
        *table,
        store.times,
        store.counters,
        *sizes,
        num_warps=1,
        **shape,
        BLOCK=config.windows,
    )
    launch(
        insert_kernel,
        (triton.cdiv(rows * (store.max_depth - 1 + width), config.windows),),
        history,
        start,
        counts,
        stamps,
        beginnings,
        *table,
        store.ints,
        store.times,
        store.counters,
        *sizes,
        num_warps=1,
        **shape,
        BLOCK=config.windows,
    )
    launch(
        list_children_kernel,
        (config.list_programs,),
        store.ints,
        store.times,
        store.lists,
        store.counters,
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
    """See `specdec_kernels.ngram.ngram_match`."""
    rows, context = history.shape
    tokens = torch.empty(rows, num_nodes, dtype=torch.int64, device=history.device)
    parents = torch.empty(rows, num_nodes, dtype=torch.int32, device=history.device)
    anchors, entries = max(2, triton.next_power_of_2(window)), max(2, triton.next_power_of_2(num_nodes))
    launch(
        match_kernel,
        (rows,),
        history,
        lengths,
        tokens,
        parents,
        store.keys,
        store.nodes,
        store.ints,
        store.times,
        store.lists,
        history.stride(0),
        context,
        num_warps=min(8, max(1, anchors * entries // _MATCH_LANES_PER_WARP)),
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
