"""Launches of the suffix kernels; `kernel_insert` and `kernel_match` say what they do."""

from __future__ import annotations

import torch
import triton

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.suffix.configs import CONFIGS
from specdec_kernels.suffix.kernel_insert import new_texts_kernel, write_texts_kernel
from specdec_kernels.suffix.kernel_match import draft_kernel, scan_kernel
from specdec_kernels.suffix.types import CONFIDENCE_STEPS, WEIGHT_STEPS, SuffixDraft, SuffixStore


def suffix_insert(
    store: SuffixStore,
    history: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    counts: torch.Tensor,
    width: int,
) -> None:
    """See `specdec_kernels.suffix_insert`, which has checked the arguments."""
    config = CONFIGS[current_chip(history)]
    batch, context = history.shape
    size = len(store.lengths)
    launch(
        new_texts_kernel,
        (1,),
        *(rows, start, counts, store.stamps, store.owners, store.slots, store.clock, batch),
        num_warps=4,
        TEXTS=size,
        BLOCK=lanes(size),
    )
    launch(
        write_texts_kernel,
        (batch, triton.cdiv(width + 1, config.copy)),
        *(history, rows, start, counts, store.tokens, store.lengths, store.slots),
        *(history.stride(0), width, context),
        num_warps=1,
        BLOCK=config.copy,
    )


def suffix_match(
    store: SuffixStore,
    history: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    num_nodes: int,
    window: int,
    matches: int,
    per_text: int,
    per_token: int,
    least_share: int,
    shared: bool,
) -> SuffixDraft:
    """See `specdec_kernels.suffix_match`, which has checked the arguments."""
    config = CONFIGS[current_chip(history)]
    batch, context = history.shape
    read = len(store.lengths) if shared else 1
    kept = lanes(per_text)
    device = history.device
    ranks = torch.empty(batch, read, kept, dtype=torch.int64, device=device)
    tokens = torch.empty(batch, num_nodes, dtype=torch.int64, device=device)
    parents = torch.empty(batch, num_nodes, dtype=torch.int32, device=device)
    strength = torch.empty(batch, dtype=torch.float32, device=device)
    confidence = torch.empty(batch, num_nodes, dtype=torch.float32, device=device)
    launch(
        scan_kernel,
        (batch, read),
        *(history, lengths, rows, store.tokens, store.lengths, store.stamps, store.slots, ranks),
        *(history.stride(0), context),
        num_warps=4,
        WINDOW=window,
        SHARED=shared,
        MOST=per_text,
        KEPT=kept,
        BLOCK=config.scan,
    )
    launch(
        draft_kernel,
        (batch,),
        *(history, lengths, rows, store.tokens, store.lengths, store.slots, ranks),
        *(tokens, parents, strength, confidence, history.stride(0), context),
        num_warps=4,
        NODES=num_nodes,
        MATCHES=matches,
        PER_TOKEN=per_token,
        LEAST_SHARE=least_share,
        SHARED=shared,
        STEPS=WEIGHT_STEPS,
        PARTS=CONFIDENCE_STEPS,
        RANKS=read * kept,
        KEPT=kept,
        BLOCK_R=lanes(read * kept),
        BLOCK_M=lanes(matches),
        BLOCK_N=lanes(num_nodes),
    )
    return SuffixDraft(tokens, parents, strength, confidence)
