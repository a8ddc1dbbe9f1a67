"""Arguments of paged attention made from a few numbers, for the case table and the tests.

Every pool slot that no row may see is NaN, and every table entry past a request's last page names no page. So every
case shows a stray read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.attention.api import mask_paths, plan_attention
from specdec_kernels.attention.types import AttentionMetadata, AttentionShape
from specdec_kernels.cases import Maker, tree_masks

_NO_PAGE = 1 << 30
_DISTINCT_PAGES = 61


def random_tree(
    make: Maker, batch: int, num_slots: int, reach: int | None = None, roots: int = 1
) -> tuple[Tensor, Tensor]:
    """Depths [B, M] int32 and mask words [B, M, ceil(M / 64)] int64 of random trees, see `Maker.parents`."""
    return tree_masks(make.parents(batch, num_slots, reach=reach, roots=roots))


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
    tree_width: int | None = None,
    reach: int | None = None,
    blind: bool = False,
    root_depth: int = 0,
    roots: int = 1,
    sinks: bool = False,
    fp8: bool = False,
    head_scales: bool = False,
    rising: bool = False,
    planned: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of `paged_attention`.

    lengths: committed tokens of each request. heads: (H, H_kv). capacity: tokens of a page-table row (default: the
    longest request). reach, roots: see `random_tree`. tree_width: the rows are random nodes of a tree of that many.
    blind: every third row of a tree sees no slot. root_depth: depth of slot 0. fp8, head_scales: an e4m3 pool, random
    scales per KV head. rising: keys grow eightfold along each sequence, so that rows meet new maxima late. planned:
    with the tile schedule of the call. options: fields of the metadata, or arguments of the call.
    """
    num_slots = num_nodes if tree_width is None else tree_width
    metadata, stored, held = paged_requests(make, mode, num_nodes, lengths, page_size, q_lens, capacity, tree_width)
    kv = _pool(make, stored, heads[1], head_dim)
    for row, pages in enumerate(held if rising else ()):
        growth = torch.linspace(1, 8, pages, device=kv.device).view(-1, 1, 1, 1)
        kv[0, metadata.page_table[row, :pages].long()] *= growth
    queries = make.normal(len(lengths), num_nodes, heads[0], head_dim)
    call = dict(q=queries, kv=kv.to(torch.float8_e4m3fn) if fp8 else kv, metadata=metadata)
    if mode == "tree":
        depths, mask = random_tree(make, len(lengths), num_slots, reach, roots)
        depths += root_depth
        row_depths = depths
        if tree_width is not None:
            picked = make.integers(0, num_slots, len(lengths), num_nodes)
            mask = mask.gather(1, picked[:, :, None].expand(-1, -1, mask.shape[2])).contiguous()
            row_depths = depths.gather(1, picked).contiguous()
        if blind:
            mask[:, ::3] = 0
        options |= dict(mask=mask, tree_width=tree_width)
        if options.get("window") is not None:
            options |= dict(depths=depths, row_depths=None if tree_width is None else row_depths)
        if options.get("batch_invariant"):
            options["paths"] = mask_paths(options["mask"], num_slots, impl="reference")
    if sinks:
        options["sinks"] = _scale_tensor(make, heads[0], 2.0)
    if head_scales:
        options |= {name: _scale_tensor(make, heads[1], 0.5).exp() for name in ("k_scale", "v_scale")}
    arguments = changed(call, **options)
    schedule = {"tile_schedule": plan_attention(**plan_arguments(arguments), impl="reference")} if planned else {}
    return {**arguments, **schedule}


def paged_requests(
    make: Maker,
    mode: str,
    num_nodes: int,
    lengths: Sequence[int],
    page_size: int,
    q_lens: Sequence[int] | None,
    capacity: int | None,
    tree_width: int | None,
) -> tuple[AttentionMetadata, Tensor, list[int]]:
    """Metadata without a mask, which slots [pages, page_size] are stored, and the pages that each request holds."""
    used = list(q_lens) if q_lens is not None else [num_nodes] * len(lengths)
    slots = used if tree_width is None else [tree_width] * len(lengths)
    held = [-(-(length + (tree_width or num_nodes)) // page_size) for length in lengths]
    filled = [length + count for length, count in zip(lengths, slots, strict=True)]
    page_table, stored = shuffled_pages(make, held, filled, page_size, capacity)
    rows = None if q_lens is None else make.tensor(used, torch.int32)
    metadata = AttentionMetadata(page_table, make.tensor(list(lengths), torch.int64), mode, q_lens=rows)
    return metadata, stored, held


def changed(arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Arguments of a call with some replaced: fields of its metadata, or the call's own."""
    fields = {name: value for name, value in changes.items() if name in AttentionMetadata._fields}
    own = {name: value for name, value in changes.items() if name not in fields}
    return arguments | dict(metadata=arguments["metadata"]._replace(**fields)) | own


def plan_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `plan_attention` for a call of `paged_attention`."""
    names = ("metadata", "split_tokens", "tuning", "batch_invariant", "in_order")
    named = {name: arguments[name] for name in names if name in arguments}
    return named | dict(shape=AttentionShape.of(arguments["q"], arguments["kv"]))


def plan_inputs(
    make: Maker,
    num_nodes: int,
    lengths: Sequence[int],
    max_length: int = 300,
    q_lens: Sequence[int] | None = None,
    split_tokens: int | None = None,
    tuning: dict[str, int] | None = None,
    batch_invariant: bool = False,
    **fields: Any,
) -> dict[str, Any]:
    """Arguments of `plan_attention` for 4 query heads per KV head of dimension 128; `fields` are the metadata's."""
    metadata = AttentionMetadata(
        page_table=torch.zeros(len(lengths), -(-max_length // 16), dtype=torch.int32, device=make.device),
        lengths=make.tensor(list(lengths), torch.int64),
        q_lens=None if q_lens is None else make.tensor(list(q_lens), torch.int32),
        max_length=max_length,
        **({"mode": "chain"} | fields),
    )
    shape = AttentionShape(num_nodes, 8, 2, 128, 16, torch.bfloat16, torch.bfloat16)
    call = dict(metadata=metadata, shape=shape, split_tokens=split_tokens, tuning=tuning)
    return call | (dict(batch_invariant=True) if batch_invariant else {})


def paths_inputs(
    make: Maker, batch: int, num_slots: int, most: int, blind: bool = False, reach: int = 4
) -> dict[str, Any]:
    """Arguments of `mask_paths` for random trees; with `blind` every third row sees no slot."""
    _, mask = random_tree(make, batch, num_slots, reach)
    if blind:
        mask[:, ::3] = 0
    return dict(mask=mask, most=most)


def _scale_tensor(make: Maker, size: int, spread: float) -> Tensor:
    return (torch.randn(size, generator=make.generator) * spread).to(make.device)


def shuffled_pages(
    make: Maker, held: Sequence[int], filled: Sequence[int], page_size: int, capacity: int | None
) -> tuple[Tensor, Tensor]:
    """Page table [B, P] int32 in which request b owns `held[b]` shuffled pages, and which slots [pages, page_size] are
    stored: the first `filled[b]` of each request. `capacity`: tokens of a row (default: the longest request)."""
    columns = max([1, *held]) if capacity is None else -(-capacity // page_size)
    order = torch.randperm(sum(held) + 2, generator=make.generator)
    stored = torch.zeros(len(order), page_size, dtype=torch.bool)
    table = torch.full((len(held), columns), _NO_PAGE, dtype=torch.int32)
    taken = 0
    for row, (own, count) in enumerate(zip(held, filled, strict=True)):
        mine = order[taken : taken + own]
        table[row, :own] = mine
        stored[mine] = (torch.arange(own * page_size) < count).view(own, page_size)
        taken += own
    return table.to(make.device), stored.to(make.device)


def _pool(make: Maker, stored: Tensor, kv_heads: int, head_dim: int) -> Tensor:
    """Keys and values with NaN wherever nothing is stored."""
    pages, page_size = stored.shape
    # A long pool repeats its first pages, because drawing gigabytes on the CPU takes too long.
    kv = make.normal(2, min(pages, max(_DISTINCT_PAGES, 8192 // page_size)), page_size, kv_heads, head_dim)
    kv = kv[:, torch.arange(pages, device=kv.device) % kv.shape[1]]
    return kv.masked_fill_(~stored[None, :, :, None, None], float("nan"))
