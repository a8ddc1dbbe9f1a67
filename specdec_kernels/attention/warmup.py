"""Compile ahead what paged attention will launch, so that no step of a run and no graph capture compiles.

A kernel is compiled per shape class (head dimension, heads, page size, mode, mask words, types, which optional
arguments are there) and per row of the static table; batch, lengths, number of nodes within a row, table width
and scales are run-time arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch

from specdec_kernels.attention import paged_attention, plan_attention
from specdec_kernels.attention.configs import node_counts_of_the_table
from specdec_kernels.attention.validate import MODES


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
    ragged: Iterable[bool] = (False, True),
    planned: Iterable[bool] = (False, True),
    return_lse: bool = False,
    impl: str = "auto",
) -> int:
    """Call `paged_attention` once for every combination that compiles differently; returns the number of calls.

    Args:
        heads, kv_heads, head_dim, dtype, kv_dtype, page_size: of the model and its pool; kv_dtype default dtype.
        max_length: bound that the calls will have, or any that gives as many splits: one, up to four, or more.
        modes, node_counts: modes and N; default one N for every row of the table, prefill included. A tree of
            more mask words than these have needs its own entry.
        tree_width, window, sinks, soft_cap, head_scales, return_lse: as the calls have them.
        ragged: without, with `q_lens`. planned: without, with a plan.
    """
    counts = node_counts_of_the_table(heads // kv_heads) if node_counts is None else tuple(node_counts)
    calls = 0
    for mode, num_nodes, with_q_lens, with_plan in product(modes, counts, ragged, planned):
        width = tree_width if mode == "tree" else None
        slots = num_nodes if width is None else width
        arguments: dict[str, Any] = dict(
            q=torch.zeros(1, num_nodes, heads, head_dim, dtype=dtype, device=device),
            # One page stands for all: what is computed does not matter.
            kv=torch.zeros(2, 1, page_size, kv_heads, head_dim, device=device).to(kv_dtype or dtype),
            page_table=torch.zeros(1, -(-max_length // page_size), dtype=torch.int32, device=device),
            lengths=torch.zeros(1, dtype=torch.int64, device=device),
        )
        shape: dict[str, Any] = dict(mode=mode, tree_width=width, window=window, max_length=max_length)
        if with_q_lens:
            shape["q_lens"] = torch.ones(1, dtype=torch.int32, device=device)
        if with_plan:
            sizes: dict[str, Any] = dict(num_nodes=num_nodes, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
            stored = arguments["kv"].element_size()
            plan = plan_attention(arguments["lengths"], **sizes, **shape, kv_bytes=stored, impl=impl)
            arguments["plan"] = plan
        if mode == "tree":
            arguments["mask"] = torch.zeros(1, num_nodes, -(-slots // 64), dtype=torch.int64, device=device)
        if mode == "tree" and window is not None:
            arguments["depths"] = torch.zeros(1, slots, dtype=torch.int32, device=device)
            arguments["row_depths"] = torch.zeros(1, num_nodes, dtype=torch.int32, device=device)
        if sinks:
            arguments["sinks"] = torch.zeros(heads, device=device)
        if head_scales:
            arguments |= {name: torch.ones(kv_heads, device=device) for name in ("k_scale", "v_scale")}
        arguments |= dict(soft_cap=soft_cap, return_lse=return_lse, impl=impl)
        paged_attention(**arguments, **shape)
        calls += 1
    return calls
