"""Named inputs of latent attention.

Every pool slot that no row may see is NaN, and every table entry past a request's last page names no page. So every
case shows a stray read. Cases tagged `large` are for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from specdec_kernels.attention.cases_inputs import paged_requests
from specdec_kernels.cases import Case, Comparison, Maker, WorkModel, case_of
from specdec_kernels.kv_write.rope import rope_table
from specdec_kernels.tree import build_tree

_MAX_POS = 64
_CHAINS = {1: "decode", 2: "chain2", 4: "chain4", 8: "chain8"}


def mla_inputs(
    make: Maker,
    mode: str,
    num_nodes: int,
    lengths: Sequence[int],
    heads: int = 4,
    latent: int = 32,
    rope: int = 16,
    page_size: int = 16,
    q_lens: Sequence[int] | None = None,
    capacity: int | None = None,
    tree_width: int | None = None,
    query_scale: float = 1.0,
    max_length: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of `mla_attention`: `lengths` committed tokens of each request and a random tree for `mode="tree"`.
    With `tree_width` the rows are the last `num_nodes` nodes of a tree of that many, as in a drafter's expansion
    step."""
    metadata, stored, _ = paged_requests(make, mode, num_nodes, lengths, page_size, q_lens, capacity, tree_width)
    cache = make.normal(*stored.shape, latent + rope).masked_fill_(~stored[:, :, None], float("nan"))
    mask = None
    if mode == "tree":
        width = num_nodes if tree_width is None else tree_width
        tree = build_tree(make.parents(len(lengths), width), metadata.lengths, impl="reference")
        mask = tree.mask[:, width - num_nodes :].contiguous()
    metadata = metadata._replace(mask=mask, tree_width=tree_width, scale=(latent + rope) ** -0.5, max_length=max_length)
    return dict(
        q_latent=make.normal(len(lengths), num_nodes, heads, latent, scale=query_scale),
        q_rope=make.normal(len(lengths), num_nodes, heads, rope, scale=query_scale),
        cache=cache,
        metadata=metadata,
        **options,
    )


def write_inputs(
    make: Maker,
    tokens: int,
    heads: int = 4,
    latent: int = 32,
    rope: int = 16,
    page_size: int = 16,
    skipped: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of `write_latent`; every `skipped`-th token has no slot, the one after it one past the cache. Queries
    and latents are slices of wider projections. Of three tokens and more the last ones are outside of the table."""
    pages = -(-tokens // page_size) + 2
    slots = torch.randperm(pages * page_size, generator=make.generator)[:tokens]
    if skipped:
        slots[::skipped], slots[1::skipped] = -1, pages * page_size
    positions = make.integers(0, _MAX_POS, tokens)
    if tokens > 2:
        positions[-1], positions[-2] = -1, _MAX_POS
    return dict(
        q=make.normal(tokens, heads, 8 + rope)[..., 8:],
        kv=make.normal(tokens, 8 + latent + rope)[:, 8:],
        cache=make.normal(pages, page_size, latent + rope),
        slots=slots.to(make.device),
        positions=positions,
        rope=rope_table(rope, _MAX_POS, device=make.device),
        norm=make.normal(latent),
        eps=1e-6,
        **options,
    )


def head_inputs(make: Maker, tokens: int, heads: int, inner: int, width: int, columns: bool = False) -> dict[str, Any]:
    """Arguments of `head_product`: rows are slices of wider ones, the matrices a part of larger ones, whose rows are
    what is multiplied with `columns`."""
    shape = (heads, width + 3, inner) if columns else (heads, inner + 3, width)
    weight = make.normal(*shape)[:, 3:]
    x = make.normal(tokens, heads, 8 + inner)[..., 8:]
    return dict(x=x, weight=weight.transpose(1, 2) if columns else weight)


def head_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """(bytes, floating-point operations): rows, matrices and results once."""
    x, weight = inputs["x"], inputs["weight"]
    out = len(x) * weight.shape[0] * weight.shape[2]
    return (x.numel() + weight.numel() + out) * x.element_size(), 2 * out * x.shape[2]


def write_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """(bytes, floating-point operations): queries and rows once in and once out."""
    return 2 * (inputs["q"].nbytes + inputs["kv"].nbytes), 6 * (inputs["q"].numel() + inputs["kv"].numel())


def work(inputs: dict[str, Any]) -> tuple[int, int]:
    """(bytes, floating-point operations) that the call cannot avoid: each cached row, query and result once."""
    q_latent, cache, metadata = inputs["q_latent"], inputs["cache"], inputs["metadata"]
    batch, num_nodes, heads, latent = q_latent.shape
    width = cache.shape[2]
    keys = int(metadata.lengths.sum()) + batch * num_nodes
    in_draft = num_nodes * (num_nodes + 1) // 2 if metadata.mode == "chain" else num_nodes**2
    pairs = num_nodes * int(metadata.lengths.sum()) + batch * in_draft
    moved = keys * width + batch * num_nodes * heads * (width + latent)
    return moved * cache.element_size(), 2 * pairs * heads * (width + latent)


def _reference_bytes(inputs: dict[str, Any]) -> int:
    """Per request: scores twice in float32, gathered rows as keys and values, in their own type and in float32."""
    q_latent, cache = inputs["q_latent"], inputs["cache"]
    num_nodes, heads = q_latent.shape[1:3]
    keys = int(inputs["metadata"].lengths.max()) + num_nodes if len(q_latent) else 0
    return keys * (2 * 4 * num_nodes * heads + 2 * cache[0, 0].numel() * (4 + cache.element_size()))


WORK: dict[str, WorkModel] = {
    "mla_attention": work, "mla_attention_with_lse": work, "write_latent": write_work, "head_product": head_work
}  # fmt: skip
COMPARISON = Comparison(
    float64=True,
    compiled_roundings=8,  # 576 products per score, summed in pieces whose order is the compiler's
    by_request=("q_latent", "q_rope", "metadata"),
    reference_bytes=_reference_bytes,
)


_case = partial(case_of, "mla_attention_with_lse", mla_inputs)
_write = partial(case_of, "write_latent", write_inputs)
_heads = partial(case_of, "head_product", head_inputs)
_GATED: dict[str, Any] = dict(gate=True, tags=("large",))


def _gated(name: str, catches: str, mode: str, num_nodes: int, **shape: Any) -> Case:
    """A shipped shape, with queries so small that the order of a sum of 576 terms stays within the tolerance."""
    shape = {"heads": 128, "latent": 512, "rope": 64, "capacity": 4096, "query_scale": 0.125, **shape}
    slow = num_nodes * shape["heads"] > 128 and shape["latent"] != 384  # hundreds of rows, one case of them small
    large = ("large",) if slow else ()
    return case_of("mla_attention", mla_inputs, name, catches, mode, num_nodes, (37,), gate=True, tags=large, **shape)


def _timed(name: str, mode: str, num_nodes: int, batch: int, context: int, heads: int = 128) -> Case:
    """Requests of about `context` tokens with the heads of a DeepSeek-V3 layer, or a share of them."""
    lengths = [context - 7 * row for row in range(batch)]
    shape: dict[str, Any] = dict(heads=heads, latent=512, rope=64, page_size=64, bench=True, tags=("large",))
    return case_of("mla_attention", mla_inputs, name, "shapes that are timed", mode, num_nodes, lengths, **shape)


CASES = (
    _case("empty_batch", "launch on an empty grid", "chain", 3, ()),
    _case("decode_one_head", "a tile padded from one row", "chain", 1, (5,), heads=1),
    _case("decode_first_token", "a request without a prefix", "chain", 1, (0,)),
    _case("chain_odd", "rows off the tile; lse per row", "chain", 5, (3, 18), heads=3),
    _case("block_odd", "the last row's view given to all", "block", 5, (3, 18)),
    _case("tree_odd", "mask bits by depth instead of by node", "tree", 7, (3, 18)),
    _case("draft_fills_page", "one page too many at an exact edge", "chain", 5, (27, 11)),
    _case("unequal_lengths", "one request's length used for another", "chain", 4, (70, 0, 3)),
    _case("splits", "splits past the end; merge weights", "chain", 6, (50, 3), split_tokens=16),
    _case("free_edge", "the last key of a tile taken for seen by all", "chain", 3, (14, 30), split_tokens=16),
    _case("splits_far_apart", "infinite weights", "chain", 2, (120,), split_tokens=16, query_scale=200.0),
    _case("splits_tree", "splits without a visible key", "tree", 20, (55, 27), split_tokens=24),
    _case("q_lens_split", "merge reads rows never written", "tree", 6, (60, 5, 0), q_lens=(4, 0, 6), split_tokens=16),
    _case("q_lens_block", "a row sees slots past q_lens", "block", 6, (20, 40), q_lens=(3, 1)),
    _case("tree_65", "first bit of the second word", "tree", 65, (21, 0), heads=2),
    _case("tree_width", "rows that are not the first", "tree", 4, (9, 30), tree_width=70, q_lens=(4, 2)),
    _case("page_1", "per-token pages", "tree", 6, (20, 3), page_size=1),
    _case("page_odd", "page size not a power of two", "chain", 6, (20, 31), page_size=6, split_tokens=16),
    _case("latent_odd", "the padded rest of the latent", "chain", 3, (20,), latent=48, rope=48),
    _case("latent_odd_split", "the rest lost in the merge", "chain", 3, (40,), latent=80, split_tokens=16),
    _case("latent_512", "the shipped size", "tree", 5, (40,), heads=8, latent=512, rope=64),
    _case("cut", "keys past max_length", "tree", 4, (30, 12), max_length=20),
    _case("fixed_splits", "borders of splits by length", "chain", 5, (150, 63, 64), batch_invariant=True),
    _case("fixed_block", "rows past q_lens", "block", 5, (70, 90), q_lens=(2, 0), batch_invariant=True),
    _heads("heads_empty", "launch on an empty grid", 0, 2, 16, 16),
    _heads("heads_odd", "rows, columns and inner size off the tile", 67, 3, 12, 34),
    _heads("heads_columns", "strides of a transposed matrix", 5, 3, 70, 10, columns=True),
    _heads("heads_shipped_keys", "registers", 8, 128, 128, 512, **_GATED),
    _heads("heads_shipped_values", "registers", 8, 128, 512, 128, columns=True, **_GATED),
    _write("write_empty", "launch on an empty grid", 0),
    _write("write_one", "a tile padded from one row", 1, heads=1),
    _write("write_odd", "rows off the tile, padded lanes", 5, heads=3, latent=48, rope=24, page_size=6),
    _write("write_skipped", "slot -1 wrapped; slot past the cache", 9, skipped=3),
    _write("write_interleaved", "neighbours taken for halves", 4, interleaved=True, skipped=4),
    _write("write_shipped", "registers", 4, heads=128, latent=512, rope=64, interleaved=True, gate=True),
    _write("write_shipped_halves", "registers", 4, heads=16, latent=512, rope=64, gate=True),
    _write(
        "write_b8_n16", "verify of eight requests", 128, heads=128, latent=512, rope=64, bench=True, tags=("large",)
    ),
    _gated("shipped_decode", "registers of the tile", "chain", 1),
    _gated("shipped_block_4", "registers without a mask", "block", 4),
    _gated("shipped_tree_16", "registers of the bit mask", "tree", 16),
    _gated("shipped_tree_100", "registers of several mask words", "tree", 100),
    _gated("shipped_16_heads", "a shard of the heads", "chain", 4, heads=16),
    _gated("shipped_16_rows", "registers of the small tile", "chain", 1, heads=16),
    _gated("shipped_pages_of_8", "pages without whole copies of 16 tokens", "chain", 1, heads=16, page_size=8),
    _gated("shipped_16_rows_latent_256", "the same for a smaller latent", "chain", 1, heads=16, latent=256),
    _gated("shipped_fixed_splits", "registers of splits at fixed positions", "chain", 4, batch_invariant=True),
    _gated("shipped_short", "registers of the store without splits", "chain", 4, capacity=256),
    _gated("shipped_latent_256", "registers of a smaller latent", "chain", 4, latent=256, rope=32),
    _gated("shipped_latent_384", "registers of a latent in two blocks", "chain", 4, latent=384),
    _timed("mla_decode_b1_8k", "chain", 1, 1, 8192),
    *(_timed(f"mla_{name}_b8_8k", "chain", nodes, 8, 8192) for nodes, name in _CHAINS.items()),
    *(
        _timed(f"mla_{name}_b8_8k_16_heads", "chain", nodes, 8, 8192, heads=16)
        for nodes, name in _CHAINS.items()
        if nodes != 2
    ),
    _timed("mla_tree16_b8_8k", "tree", 16, 8, 8192),
)
