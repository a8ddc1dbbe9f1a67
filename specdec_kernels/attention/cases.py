"""Named inputs of paged attention.

Every pool slot that no row may see is NaN, and every table entry past a request's last page names no page, so
a stray read shows in any case. Cases tagged `large` are for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Case, Maker
from specdec_kernels.tree import build_tree
from specdec_kernels.tree.cases import random_parents

_NO_PAGE = 1 << 30


def attention_inputs(
    make: Maker,
    mode: str,
    num_nodes: int,
    lengths: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    page_size: int = 16,
    q_lens: Sequence[int] | None = None,
    capacity: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of `paged_attention`: `lengths` committed tokens a request, `heads` = (H, H_kv), a random
    tree for `mode="tree"`, a page table for `capacity` tokens a request (default: the longest request)."""
    used = list(q_lens) if q_lens is not None else [num_nodes] * len(lengths)
    kv, page_table = _pool(make, lengths, used, num_nodes, heads[1], head_dim, page_size, capacity)
    committed = make.tensor(list(lengths), torch.int64)
    mask = None
    if mode == "tree":
        parents = random_parents(make, len(lengths), num_nodes)
        mask = build_tree(parents, committed, impl="reference").mask
    return dict(
        q=make.normal(len(lengths), num_nodes, heads[0], head_dim),
        kv=kv,
        page_table=page_table,
        lengths=committed,
        mode=mode,
        mask=mask,
        q_lens=None if q_lens is None else make.tensor(used, torch.int32),
        **options,
    )


def _pool(
    make: Maker,
    lengths: Sequence[int],
    used: Sequence[int],
    num_nodes: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    capacity: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with NaN wherever nothing is stored, and a page table over shuffled pages."""
    held = [-(-(length + num_nodes) // page_size) for length in lengths]
    columns = max([1, *held]) if capacity is None else -(-capacity // page_size)
    order = torch.randperm(sum(held) + 2, generator=make.generator)
    kv = make.normal(2, sum(held) + 2, page_size, kv_heads, head_dim)
    stored = torch.zeros(sum(held) + 2, page_size, dtype=torch.bool)
    table = torch.full((len(lengths), columns), _NO_PAGE, dtype=torch.int32)
    taken = 0
    for row, (length, nodes, pages) in enumerate(zip(lengths, used, held, strict=True)):
        mine = order[taken : taken + pages]
        table[row, :pages] = mine
        stored[mine] = (torch.arange(pages * page_size) < length + nodes).view(pages, page_size)
        taken += pages
    kv.masked_fill_(~stored.to(kv.device)[None, :, :, None, None], float("nan"))
    return kv, table.to(make.device)


def work(inputs: dict[str, Any]) -> tuple[int, int]:
    """(bytes moved, floating-point operations) that the call cannot avoid: each key and value once, q and out
    once."""
    q, kv, lengths = inputs["q"], inputs["kv"], inputs["lengths"]
    batch, num_nodes, heads, head_dim = q.shape
    keys = int(lengths.sum()) + batch * num_nodes
    in_draft = num_nodes * (num_nodes + 1) // 2 if inputs["mode"] == "chain" else num_nodes**2
    pairs = num_nodes * int(lengths.sum()) + batch * in_draft
    kv_bytes = 2 * keys * kv.shape[3] * head_dim * kv.element_size()
    return kv_bytes + 2 * q.numel() * q.element_size(), 4 * pairs * heads * head_dim


WORK: dict[str, Callable[[dict[str, Any]], tuple[int, int]]] = {"paged_attention": work}


def _case(name: str, catches: str, mode: str, num_nodes: int, lengths: Sequence[int], **shape: Any) -> Case:
    build = partial(attention_inputs, mode=mode, num_nodes=num_nodes, lengths=lengths, **shape)
    return Case(name, "paged_attention", build, catches)


def _gated(name: str, catches: str, mode: str, num_nodes: int, **shape: Any) -> Case:
    """A shipped shape: its table is wide enough for several splits, its requests are short."""
    shape = {"heads": (8, 2), "head_dim": 128, "capacity": 2048, **shape}
    build = partial(attention_inputs, mode=mode, num_nodes=num_nodes, lengths=(37,), **shape)
    return Case(name, "paged_attention", build, catches, gate=True)


def _timed(name: str, mode: str, num_nodes: int, batch: int, context: int, **shape: Any) -> Case:
    """Requests of about `context` tokens with the heads of an 8B model."""
    lengths = [context - 7 * row for row in range(batch)]
    shape = {"heads": (32, 8), "head_dim": 128, **shape}
    build = partial(attention_inputs, mode=mode, num_nodes=num_nodes, lengths=lengths, **shape)
    return Case(name, "paged_attention", build, "shapes that are timed", bench=True, tags=("large",))


CASES = (
    _case("empty_batch", "launch on an empty grid", "chain", 3, ()),
    _case("decode_one_head", "tiles padded from one row", "chain", 1, (5,), heads=(1, 1), return_lse=True),
    _case("decode_first_token", "a request without a prefix", "chain", 1, (0,), return_lse=True),
    _case("chain_odd", "rows off the tile; lse per row", "chain", 5, (3, 18), return_lse=True),
    _case("block_odd", "the last row's view given to all", "block", 5, (3, 18), return_lse=True),
    _case("tree_odd", "mask bits by depth instead of by node", "tree", 7, (3, 18), return_lse=True),
    _case("no_prefix", "L = 0: the mask starts in the first tile", "tree", 9, (0, 0)),
    _case("draft_fills_page", "one page too many at an exact edge", "chain", 5, (27, 11)),
    _case("prefix_fills_page", "the draft begins on a fresh page", "block", 5, (32, 16)),
    _case(
        "unequal_lengths",
        "one request's length used for another",
        "chain",
        4,
        (70, 0, 3, 33),
        return_lse=True,
    ),
    _case(
        "splits_chain",
        "splits past the end; merge weights",
        "chain",
        6,
        (50, 3),
        split_tokens=16,
        return_lse=True,
    ),
    _case(
        "splits_tree",
        "draft across two splits, some without a visible key",
        "tree",
        20,
        (55, 27),
        split_tokens=16,
    ),
    _case("splits_block", "split length off the tile", "block", 6, (61, 4), split_tokens=24, return_lse=True),
    _case("splits_many_rows", "the causal end of a row tile inside a split", "chain", 70, (10,), split_tokens=32),
    _case("q_lens", "rows past q_lens not zeroed", "chain", 6, (20, 40, 9), q_lens=(2, 6, 0), return_lse=True),
    _case(
        "q_lens_block",
        "a block row sees slots past q_lens",
        "block",
        6,
        (20, 40),
        q_lens=(3, 1),
        return_lse=True,
    ),
    _case(
        "q_lens_split",
        "merge reads rows never written",
        "tree",
        6,
        (60, 5, 0),
        q_lens=(4, 0, 6),
        split_tokens=16,
    ),
    _case("gqa_2", "row = node * G + g", "chain", 16, (40, 7), heads=(4, 2)),
    _case("gqa_4", "row = node * G + g", "tree", 16, (40, 7), heads=(8, 2)),
    _case("gqa_8", "row = node * G + g", "block", 16, (40, 7), heads=(8, 1)),
    _case("gqa_3", "a group that does not divide the tile", "tree", 7, (40, 7), heads=(6, 2)),
    _case("tree_64", "the word's sign bit", "tree", 64, (21,), heads=(2, 1)),
    _case("tree_65", "first bit of the second word", "tree", 65, (21, 0), heads=(2, 1)),
    _case("tree_200", "four words, the last partial", "tree", 200, (30,), heads=(1, 1), return_lse=True),
    _case("page_1", "per-token pages", "tree", 6, (20, 3), page_size=1),
    _case("page_64", "page wider than the draft", "chain", 6, (60, 130), page_size=64),
    _case("page_odd", "page size not a power of two", "chain", 6, (20, 31), page_size=6, split_tokens=16),
    _case("head_dim_64", "head dimension of small models", "chain", 16, (100,), heads=(4, 2), head_dim=64),
    _case("prefill", "tiles above the diagonal", "chain", 90, (0, 0), q_lens=(90, 41), return_lse=True),
    _case("prefill_continued", "a chunk after a prefix", "chain", 33, (47, 16)),
    _case("long_table", "entries past the last page read", "chain", 3, (5,), capacity=1000, max_length=640),
    _case("cut", "keys past max_length", "tree", 4, (30, 12), max_length=20, return_lse=True),
    _case("own_scale", "scale ignored", "chain", 3, (12,), scale=0.7),
    _gated("shipped_decode", "registers of the 16-row tile", "chain", 1),
    _gated("shipped_chain_16", "registers of the 64-row tile", "chain", 16),
    _gated("shipped_block_16", "registers of the drafter's attention", "block", 16),
    _gated("shipped_tree_16", "registers of the bit mask", "tree", 16),
    _gated("shipped_tree_64", "registers of the 128-row tile with a mask", "tree", 64, capacity=4096),
    _gated("shipped_tree_100", "registers of several mask words", "tree", 100),
    _gated("shipped_prefill", "registers without splits", "chain", 160),
    _gated("shipped_chain_16_small", "head dimension 64", "chain", 16, head_dim=64),
    _timed("decode_b8_8k", "chain", 1, 8, 8192),
    _timed("chain16_b1_8k", "chain", 16, 1, 8192),
    _timed("chain16_b8_8k", "chain", 16, 8, 8192),
    _timed("chain16_b8_32k", "chain", 16, 8, 32768),
    _timed("block16_b8_8k", "block", 16, 8, 8192),
    _timed("tree64_b8_8k", "tree", 64, 8, 8192),
    _timed("chain16_b8_8k_page1", "chain", 16, 8, 8192, page_size=1),
)
