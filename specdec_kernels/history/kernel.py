"""Launches of the kernels over histories, which the modules `kernel_*` describe."""

from functools import partial

import torch
import triton
from torch import Tensor

from specdec_kernels.history.configs import CONFIGS, draft_warps
from specdec_kernels.history.kernel_draft import draft_kernel
from specdec_kernels.history.kernel_insert import Written, replace_histories_kernel, write_histories_kernel
from specdec_kernels.history.kernel_scan import (
    bucket_offsets_kernel,
    hash_requests_kernel,
    scan_kernel,
    sort_hits_kernel,
)
from specdec_kernels.history.kernel_select import Scan, select_kernel
from specdec_kernels.history.types import HistoryDraft, HistoryStore, MatchOptions
from specdec_kernels.launch import current_chip, lanes, launch, num_processors

_MAX_RANKS = 512
"""Ranks among which a program chooses the best."""


def insert_histories(
    store: HistoryStore, history: Tensor, slots: Tensor, start: Tensor, counts: Tensor, width: int
) -> None:
    config, written = CONFIGS[current_chip(history)], Written(slots, start, counts)
    batch, context = history.shape
    launch(
        replace_histories_kernel,
        (1,),
        *(written, store, batch),
        KEPT=store.num_kept,
        RING=len(store.ring),
        BLOCK=min(lanes(batch), 1024),
    )
    launch(
        write_histories_kernel,
        (triton.cdiv(batch * (width + 1), config.copy),),
        *(history, written, store, batch, history.stride(0), width, context),
        BLOCK=config.copy,
    )


def match_histories(
    store: HistoryStore, history: Tensor, lengths: Tensor, slots: Tensor, options: MatchOptions
) -> HistoryDraft:
    num_nodes, order, max_ngram, max_candidates, least, shared = options
    config = CONFIGS[current_chip(history)]
    batch, context = history.shape
    kept = lanes(max_candidates)
    parts = lanes(max(1, min(config.parts, config.programs // max(batch, 1), _MAX_RANKS // kept)))
    # With many requests hits are places of the last two tokens, by bucket, and `latest` has those of the last one.
    bigrams = shared and batch > config.few
    nothing = torch.empty(0, dtype=torch.int64, device=history.device)
    scan = _scan(store, history, lengths, max_candidates, bigrams) if shared else Scan(*[nothing] * 6)
    new = partial(torch.empty, device=history.device)
    ranks = new(batch, parts * kept, dtype=torch.int64)
    draft = HistoryDraft(
        tokens=new(batch, num_nodes, dtype=torch.int64),
        parents=new(batch, num_nodes, dtype=torch.int32),
        expected_accepted=new(batch, dtype=torch.float32),
        path_probs=new(batch, num_nodes, dtype=torch.float32),
    )
    launch(
        select_kernel,
        (batch, parts),
        *(history, lengths, slots, store, scan, ranks, history.stride(0), context),
        MAX_NGRAM=max_ngram,
        SHARED=shared,
        SORTED=bigrams,
        CANDIDATES=max_candidates,
        KEPT=kept,
        BLOCK=config.select,
    )
    launch(
        draft_kernel,
        (batch,),
        *(history, lengths, store, ranks, scan, draft, history.stride(0), context),
        num_warps=draft_warps(kept, lanes(num_nodes), batch),
        NODES=num_nodes,
        CANDIDATES=max_candidates,
        LEAST=least,
        FREQUENT=order == "frequent",
        LATEST=bigrams,
        RANKS=parts * kept,
        BLOCK_M=kept,
        BLOCK_N=lanes(num_nodes),
    )
    return draft


def _scan(store: HistoryStore, history: Tensor, lengths: Tensor, max_candidates: int, bigrams: bool) -> Scan:
    """Read all histories for all requests."""
    config = CONFIGS[current_chip(history)]
    batch, context = history.shape
    bits = max(6, (2 * batch - 1).bit_length())  # at most half of the buckets are in use
    buckets = 1 << bits
    new = partial(torch.empty, dtype=torch.int64, device=history.device)
    # One fill: tables and lists begin empty, counters at -1.
    sizes = (buckets, buckets * bigrams, buckets * bigrams, buckets * bigrams * max_candidates, 1, 1)
    blank = torch.full((sum(sizes),), -1, dtype=torch.int64, device=history.device)
    last_tokens, last_bigrams, counts, latest, total, divided = blank.split(sizes)
    token_buckets, ends = new(batch), new(buckets * bigrams)
    bigram_buckets = new(batch) if bigrams else token_buckets
    hits = new(store.tokens.numel())
    launch(
        hash_requests_kernel,
        (triton.cdiv(batch, config.hash),),
        *(history, lengths, last_tokens, last_bigrams, token_buckets, bigram_buckets),
        *(batch, history.stride(0), context),
        BIGRAMS=bigrams,
        BITS=bits,
        BLOCK=config.hash,
    )
    width = lanes(context, config.scan)
    programs = triton.cdiv(len(store.lengths), config.scan // width)
    for newest in (True, False) if bigrams else (False,):
        launch(
            scan_kernel,
            (programs, 1 if newest else triton.cdiv(context, width)),
            *(store, last_tokens, last_bigrams, latest, hits, total, counts, context),
            HISTORIES=len(store.lengths),
            BIGRAMS=bigrams,
            NEWEST=newest,
            CANDIDATES=max_candidates,
            BITS=bits,
            WIDTH=width,
            BLOCK=config.scan,
        )
    if not bigrams:
        return Scan(token_buckets, hits, total, ends, latest, token_buckets)
    ordered = torch.empty_like(hits)
    offset_block = min(buckets, 1024)
    launch(bucket_offsets_kernel, (buckets // offset_block,), counts, divided, ends, num_warps=4, BLOCK=offset_block)
    programs = min(2 * num_processors(history), triton.cdiv(len(hits), config.select))
    launch(sort_hits_kernel, (programs,), hits, total, ends, ordered, num_warps=4, BLOCK=config.select)
    return Scan(bigram_buckets, ordered, counts, ends, latest, token_buckets)
