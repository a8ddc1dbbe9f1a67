"""Compile ahead what paged attention will launch, so that no step of a run and no graph capture compiles.

A kernel is compiled per row of the static table and per shape class: head dimension, heads, page size, mode, mask
words, types, and which optional arguments are given. Batch, lengths, number of nodes within a row, table width and
scales are run-time arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch

from specdec_kernels.attention.api import paged_attention, paged_attention_with_lse, plan_attention
from specdec_kernels.attention.configs import node_counts_of_the_table
from specdec_kernels.attention.types import MODES, AttentionMetadata, AttentionShape


def warmup(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    page_size: int = 16,
    max_length: int = 4096,
    modes: Iterable[str] = MODES,
    node_counts: Sequence[int] | None = None,
    tree_width: int | None = None,
    window: int | None = None,
    sinks: bool = False,
    soft_cap: float | None = None,
    head_scales: bool = False,
    batches: Iterable[int] = (1,),
    ragged: Iterable[bool] = (False, True),
    planned: Iterable[bool] = (False, True),
    with_lse: bool = False,
    impl: str = "auto",
) -> int:
    """Call `paged_attention` once for every combination that compiles differently; returns the number of calls.

    Args:
        heads, kv_heads, head_dim, dtype, kv_dtype, page_size: of the model and its pool; kv_dtype default dtype.
        max_length: bound that the calls will have, or any other that gives as many splits: one, up to four, or more.
        modes, node_counts: modes and N; default one N for every row of the table, prefill included. A tree of
            more mask words than these have needs its own entry.
        tree_width, window, sinks, soft_cap, head_scales, with_lse: as the calls have them.
        batches: numbers of requests; over a window, one of calls that fill the chip without splits is compiled apart.
        ragged: without, with `q_lens`. planned: without, with a work list.
    """
    counts = node_counts_of_the_table(heads // kv_heads) if node_counts is None else tuple(node_counts)
    kv = torch.zeros(2, 1, page_size, kv_heads, head_dim, device=device).to(kv_dtype or dtype)
    options: dict[str, Any] = dict(sinks=torch.zeros(heads, device=device)) if sinks else {}
    if head_scales:
        options |= {name: torch.ones(kv_heads, device=device) for name in ("k_scale", "v_scale")}
    function = paged_attention_with_lse if with_lse else paged_attention
    calls = 0
    for batch, mode, num_nodes, with_q_lens, with_list in product(batches, modes, counts, ragged, planned):
        q = torch.zeros(batch, num_nodes, heads, head_dim, dtype=dtype, device=device)
        told = AttentionMetadata(
            # One page stands for all: what is computed does not matter.
            page_table=torch.zeros(batch, -(-max_length // page_size), dtype=torch.int32, device=device),
            lengths=torch.zeros(batch, dtype=torch.int64, device=device),
            mode=mode,
            q_lens=torch.ones(batch, dtype=torch.int32, device=device) if with_q_lens else None,
            max_length=max_length,
            window=window,
            soft_cap=soft_cap,
        )
        if mode == "tree":
            told = told._replace(tree_width=tree_width, **_tree(q, tree_width or num_nodes, window is not None))
        work_list = plan_attention(told, AttentionShape.of(q, kv), impl=impl) if with_list else None
        function(q, kv, told, work_list=work_list, impl=impl, **options)
        calls += 1
    return calls


def _tree(q: torch.Tensor, slots: int, windowed: bool) -> dict[str, Any]:
    """Mask and, with a window, depths of a tree of `slots` slots."""
    tree = dict(mask=torch.zeros(*q.shape[:2], -(-slots // 64), dtype=torch.int64, device=q.device))
    if windowed:
        sizes = dict(depths=slots, row_depths=q.shape[1])
        tree |= {name: torch.zeros(len(q), size, dtype=torch.int32, device=q.device) for name, size in sizes.items()}
    return tree
