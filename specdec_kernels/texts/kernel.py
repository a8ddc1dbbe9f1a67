"""Launches of the kernels over texts; `kernel_insert` and `kernel_match` say what they do."""

from __future__ import annotations

import torch
import triton

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.texts.configs import CONFIGS, NEW_TEXTS, draft_warps
from specdec_kernels.texts.kernel_insert import exchange_texts_kernel, write_texts_kernel
from specdec_kernels.texts.kernel_match import draft_kernel, file_requests_kernel, scan_kernel
from specdec_kernels.texts.types import MAX_AGE, TextDraft, TextStore


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
    size, device = len(store.lengths), history.device
    bits = max(6, (2 * batch - 1).bit_length())
    cells = 1 << bits
    # Nothing is filed and nothing is found at first.
    parts = (batch * matches, cells * matches, size, cells, cells, cells, batch, batch)
    buffer = torch.full((sum(parts),), -1, dtype=torch.int64, device=device)
    ranks, latest, owners, filed, pairs, heads, others, homes = buffer.split(parts)
    tokens = torch.empty(batch, num_nodes, dtype=torch.int64, device=device)
    parents = torch.empty(batch, num_nodes, dtype=torch.int32, device=device)
    strength = torch.empty(batch, dtype=torch.float32, device=device)
    confidence = torch.empty(batch, num_nodes, dtype=torch.float32, device=device)
    launch(
        file_requests_kernel,
        (triton.cdiv(batch, config.file),),
        *(history, lengths, rows, store.slots, owners, filed, pairs, heads, others, homes),
        *(batch, history.stride(0), context),
        num_warps=4,
        BITS=bits,
        BLOCK=config.file,
    )
    for youngest, oldest in ((0, NEW_TEXTS - 1), (NEW_TEXTS, MAX_AGE)) if shared else ((0, MAX_AGE),):
        launch(
            scan_kernel,
            (triton.cdiv(store.tokens.numel(), config.scan),),
            *(history, lengths, store.tokens, store.lengths, store.stamps, store.clock),
            *(owners, filed, pairs, heads, others, ranks, latest, history.stride(0), context),
            num_warps=4,
            WINDOW=window,
            TEXTS=size,
            SHARED=shared,
            YOUNGEST=youngest,
            OLDEST=oldest,
            MATCHES=matches,
            BITS=bits,
            BLOCK=config.scan,
        )
    launch(
        draft_kernel,
        (batch,),
        *(history, lengths, store.tokens, store.lengths, ranks, latest, homes),
        *(tokens, parents, strength, confidence, history.stride(0), context),
        num_warps=draft_warps(lanes(matches), lanes(num_nodes)),
        NODES=num_nodes,
        MATCHES=matches,
        LEAST=least,
        FREQUENT=order == "frequent",
        BLOCK_M=lanes(matches),
        BLOCK_N=lanes(num_nodes),
    )
    return TextDraft(tokens, parents, strength, confidence)
