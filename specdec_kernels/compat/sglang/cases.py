"""Named inputs of the SGLang functions: outputs are tensors with contents, as SGLang hands them over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Maker, case_of
from specdec_kernels.compat.sglang.index.cases import pool_rows, token_table
from specdec_kernels.compat.sglang.types import TreeMaskMode

_OLD = 77  # what an output holds before the call


def _old(make: Maker, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full(shape, _OLD, dtype=dtype, device=make.device)


def draft_history(
    make: Maker, batch: int, nodes: int, topk: int, depth: int, orphans: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(parent_list, selected) of random drafts: candidates of falling score, parents chosen before children."""
    total = topk + (depth - 1) * topk * topk
    parents = torch.full((batch, topk * (depth - 1) + 1 if depth > 1 else 0), -1, dtype=torch.int64)
    selected = torch.empty(batch, nodes - 1, dtype=torch.int64)
    for row in range(batch):
        chosen = list(range(topk))
        reachable = list(chosen)
        for step in range(1, depth):
            parents[row, 1 + (step - 1) * topk : 1 + step * topk] = torch.tensor(chosen)
            first = topk + topk * topk * (step - 1)
            picks = torch.randperm(topk * topk, generator=make.generator)[:topk].sort().values
            reachable += [first + p for p in range(topk * topk)]
            chosen = [first + int(p) for p in picks]
        order = torch.tensor(reachable)[torch.randperm(total, generator=make.generator)]
        kept = order[: nodes - 1] if orphans else _with_ancestors(order, parents[row], topk, nodes - 1)
        selected[row] = kept.sort().values
    return parents.to(make.device), selected.to(make.device)


def _with_ancestors(order: torch.Tensor, parents: torch.Tensor, topk: int, count: int) -> torch.Tensor:
    """`count` of the candidates in `order`, each with all candidates on its path."""
    kept: set[int] = set()
    for candidate in order.tolist():
        path = {candidate}
        while candidate >= topk:
            candidate = int(parents[candidate // topk])
            path.add(candidate)
        if len(kept | path) <= count:
            kept |= path
    return torch.tensor(list(kept))


def build_inputs(
    make: Maker,
    batch: int,
    nodes: int,
    mode: TreeMaskMode,
    topk: int = 4,
    depth: int = 4,
    longest: int = 6,
    orphans: bool = True,
) -> dict[str, Any]:
    """Arguments of `build_tree_kernel_efficient`: random choices, so that `orphans` are among them if wanted. Without
    them the links hold -1, as SGLang prepares them: its own kernel writes only links that there are."""
    parent_list, selected = draft_history(make, batch, nodes, topk, depth, orphans)
    lengths = make.integers(0, longest + 1, batch)
    cells = batch * nodes * nodes
    if mode is TreeMaskMode.FULL_MASK:
        cells += nodes * int(lengths.sum()) + 5
    if mode is TreeMaskMode.QLEN_ONLY_BITPACKING:
        packed = next(kind for bits, kind in ((8, torch.uint8), (32, torch.int32), (64, torch.int64)) if nodes <= bits)
        tree_mask = torch.zeros(batch * nodes, dtype=packed, device=make.device)
    else:
        tree_mask = torch.ones(cells, dtype=torch.bool, device=make.device)
    outputs = tree_outputs(make, batch, nodes)
    if not orphans:
        outputs["retrive_next_token"].fill_(-1)
        outputs["retrive_next_sibling"].fill_(-1)
    return dict(
        parent_list=parent_list,
        selected_index=selected,
        verified_seq_len=lengths,
        tree_mask=tree_mask,
        **outputs,
        topk=topk,
        depth=depth,
        draft_token_num=nodes,
        tree_mask_mode=int(mode),
    )


def tree_outputs(make: Maker, batch: int, nodes: int) -> dict[str, torch.Tensor]:
    """Positions and links with contents."""
    names = ("retrive_index", "retrive_next_token", "retrive_next_sibling")
    return dict(positions=_old(make, batch * nodes)) | {name: _old(make, batch, nodes) for name in names}


def _reconstruct(make: Maker, batch: int, nodes: int) -> dict[str, Any]:
    mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    for row in range(batch):
        for node in range(nodes):
            if node:
                parent = int(torch.randint(0, node, (1,), generator=make.generator))
                mask[row, node] = mask[row, parent]
            mask[row, node, node] = True
    return dict(
        tree_mask=mask.flatten().to(make.device),
        verified_seq_len=make.integers(0, 50, batch),
        **tree_outputs(make, batch, nodes),
        batch_size=batch,
        draft_token_num=nodes,
    )


def random_links(make: Maker, batch: int, nodes: int) -> dict[str, torch.Tensor]:
    """First-child and next-sibling links of random trees."""
    child = torch.full((batch, nodes), -1, dtype=torch.int64)
    sibling = torch.full((batch, nodes), -1, dtype=torch.int64)
    for row in range(batch):
        for node in range(nodes - 1, 0, -1):
            parent = int(torch.randint(0, node, (1,), generator=make.generator))
            sibling[row, node], child[row, parent] = child[row, parent], node
    index = torch.arange(batch * nodes).view(batch, nodes)
    links = dict(retrive_index=index, retrive_next_token=child, retrive_next_sibling=sibling)
    return {name: tensor.to(make.device) for name, tensor in links.items()}


def _spoil(links: dict[str, torch.Tensor]) -> None:
    """Links and flat ids one past the last, and below the first."""
    index, child, sibling = links.values()
    batch, nodes = index.shape
    child[::2, 1], sibling[1::2, 1] = nodes, nodes
    index[0, 1], index[1, 1], index[2, 0] = batch * nodes, -1, batch * nodes


def _lose(links: dict[str, torch.Tensor]) -> None:
    """The first child of each root has a flat id one past the last, or below the first."""
    index = links["retrive_index"]
    index[::2, 1], index[1::2, 1] = index.numel(), -1


def _turn_round(links: dict[str, torch.Tensor]) -> None:
    """Links that lead back to where they come from."""
    _, child, sibling = links.values()
    child[:, 0], child[::2, 1], child[1::2, 1], sibling[:, 1] = 1, 1, 0, 0


def walk_outputs(make: Maker, batch: int, nodes: int, path: int) -> dict[str, torch.Tensor]:
    """`predicts`, `accept_index` and `accept_token_num` as SGLang prepares them."""
    return dict(
        predicts=_old(make, batch * nodes, dtype=torch.int32),
        accept_index=torch.full((batch, path), -1, dtype=torch.int32, device=make.device),
        accept_token_num=_old(make, batch, dtype=torch.int32),
    )


def _greedy(
    make: Maker,
    batch: int,
    nodes: int,
    path: int,
    vocab: int = 3,
    first: int = 0,
    cycle: bool = False,
    change: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> dict[str, Any]:
    """Few tokens, from `first` on, so that paths are deep and siblings repeat; with `change` over other links."""
    links = random_links(make, batch, nodes)
    if change is not None:
        change(links)
    inputs: dict[str, Any] = walk_outputs(make, batch, nodes, path) | dict(
        candidates=make.integers(first, first + vocab, batch, nodes),
        **links,
        target_predict=make.integers(first, first + vocab, batch, nodes),
    )
    if cycle:
        inputs["retrive_next_token"][:, 1] = 1
        inputs["retrive_next_sibling"][:, 2] = 99
        inputs["retrive_next_token"][:, 0] = 1
    return inputs


def coarse_probs(make: Maker, batch: int, nodes: int, vocab: int) -> torch.Tensor:
    """Distributions in multiples of 1/64, whose sums are exact in any order."""
    draws = make.integers(0, vocab, batch, nodes, 64)
    counts = torch.zeros(batch, nodes, vocab, device=make.device)
    return counts.scatter_add_(2, draws, torch.ones_like(draws, dtype=torch.float32)) / 64


def _sampling(
    make: Maker,
    batch: int,
    nodes: int,
    path: int,
    vocab: int,
    single: float = 1.0,
    acc: float = 1.0,
    odd: bool = False,
    spent: bool = False,
    empty: bool = False,
    top: bool = False,
    change: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> dict[str, Any]:
    """`odd`: uniforms of 0, rows without mass, tokens outside the vocabulary. `spent`: the draft already has what the
    target gives to tokens that no node holds. `empty`: it has all that the target gives. `top`: final uniforms of 1,
    which no running sum exceeds, as rounding may have it. With `change` over other links."""
    links = random_links(make, batch, nodes)
    if change is not None:
        change(links)
    target = coarse_probs(make, batch, nodes, vocab)
    candidates = make.integers(0, min(vocab, 6), batch, nodes)
    draft = torch.zeros_like(target)
    if spent:
        target[..., :6] = 1 / 64
        draft[..., 6:] = target[..., 6:]
    if empty:
        draft = target.clone()
    uniforms = make.integers(0, 128, batch, nodes).float() / 128
    final = make.integers(0, 128, batch).float() / 128
    if odd:
        target[::2, 1:] = 0
        target[1::3, 0, 2] = float("nan")
        candidates[:, 2::3] = vocab
        uniforms[:, ::2] = 0
        final[::2] = 0
    if top:
        final[:] = 1
    return walk_outputs(make, batch, nodes, path) | dict(
        candidates=candidates,
        **links,
        uniform_samples=uniforms,
        uniform_samples_for_final_sampling=final,
        target_probs=target,
        draft_probs=draft,
        threshold_single=single,
        threshold_acc=acc,
    )


def _packbits(make: Maker, sizes: tuple[int, ...], room: int = 2, missing: int = 0) -> dict[str, Any]:
    """`room`: bytes of the output behind the last segment. `missing`: flags that the last segment lacks."""
    begin = torch.tensor([0, *sizes]).cumsum(0)
    bytes_ = torch.tensor([0, *(-(-size // 8) for size in sizes)]).cumsum(0)
    return dict(
        x=make.integers(0, 2, int(begin[-1]) - missing).bool(),
        input_indptr=begin.int().to(make.device),
        output_indptr=bytes_.int().to(make.device),
        y=_old(make, int(bytes_[-1]) + room, dtype=torch.uint8),
        batch_size=len(sizes),
    )


def _renorm(make: Maker, which: str, rows: int, vocab: int, value: Any) -> dict[str, Any]:
    probs = coarse_probs(make, rows, 1, vocab)[:, 0]
    given = torch.tensor(value, device=make.device) if isinstance(value, list) else value
    return {"probs": probs, which: given}


def _spec_info(make: Maker, batch: int, most: int = 4) -> dict[str, Any]:
    accepted = make.integers(1, most + 1, batch, dtype=torch.int32)
    accepted[1::4] = 0
    return dict(
        verified_id=make.integers(0, 1000, int(accepted.sum()), dtype=torch.int32),
        seq_lens=make.integers(0, 50, batch) + accepted,
        accept_lens=accepted,
        positions=_old(make, batch * most),
        new_verified_id=_old(make, batch, dtype=torch.int32),
        bs_upper=16,
    )


def _pool(make: Maker, batch: int, width: int) -> dict[str, torch.Tensor]:
    return dict(req_pool_indices=pool_rows(make, batch, batch + 2), req_to_token=token_table(make, batch + 2, width))


def _assign(make: Maker, batch: int, read: bool = False, width: int = 20) -> dict[str, Any]:
    counts = make.integers(0, 6, batch)
    start = make.integers(0, width - 6, batch)
    total = int(counts.sum()) + 3
    return _pool(make, batch, width) | dict(
        start_offset=start,
        end_offset=start + counts,
        out_cache_loc=_old(make, total) if read else make.integers(0, 1 << 20, total),
        pool_len=width,
        bs_upper=16,
    )


def _draft_locs(make: Maker, batch: int, topk: int, steps: int, page_size: int, longest: int = 9) -> dict[str, Any]:
    lengths = make.integers(0, longest + 1, batch)
    tail = lengths % page_size
    pages = (tail + steps + page_size - 1) // page_size
    paged = page_size > 1 and topk > 1
    extend = lengths - tail + pages * page_size * topk - lengths if paged else torch.full_like(lengths, topk * steps)
    width = longest + topk * (page_size + steps) * 2
    copies = (topk - 1) * int(tail.sum()) if paged else 0
    return _pool(make, batch, width) | dict(
        seq_lens=lengths,
        extend_lens=extend,
        num_new_pages_per_topk=pages,
        out_cache_loc=make.integers(0, 1 << 20, int(extend.sum())),
        source_cache_loc=_old(make, copies) if copies else None,
        target_cache_loc=_old(make, copies) if copies else None,
        last_page_lens_cumsum=tail.cumsum(0),
        duplicate_cache_len=copies,
        pool_len=width,
        topk=topk,
        speculative_num_steps=steps,
        page_size=page_size,
        bs_upper=16,
        iter_upper=16,
    )


def _decode_indices(
    make: Maker, batch: int, topk: int, steps: int, page_size: int, window: int = 0, sink: int = 0
) -> dict[str, Any]:
    inputs = _draft_locs(make, batch, topk, steps, page_size)
    lengths = inputs["seq_lens"]
    width = int(lengths.sum()) * topk + batch * topk * steps + 4
    return dict(
        req_pool_indices=inputs["req_pool_indices"],
        req_to_token=inputs["req_to_token"],
        paged_kernel_lens=lengths,
        kv_indices=_old(make, steps, width, dtype=torch.int32),
        kv_indptr=_old(make, steps, batch * topk + 3, dtype=torch.int32),
        positions=lengths.repeat_interleave(topk),
        pool_len=inputs["pool_len"],
        kv_indices_stride=width,
        kv_indptr_stride=batch * topk + 3,
        page_size=page_size,
        window_size=window,
        sink_size=sink,
    )


def _pair_indices(make: Maker, batch: int, factor: int = 2) -> dict[str, Any]:
    lengths = make.integers(0, 9, batch) + factor
    return dict(
        kv_indptr=_old(make, factor * batch + 1, dtype=torch.int32),
        kv_indices=_old(make, factor * int(lengths.sum()), dtype=torch.int32),
        **_pool(make, batch, 20),
        seq_lens=lengths,
        expand_factor=factor,
        row_stride=20,
    )


def _evict(make: Maker, batch: int, nodes: int, page_size: int) -> dict[str, Any]:
    accepted = make.integers(1, nodes + 1, batch)
    return dict(
        seq_lens=make.integers(0, 40, batch),
        evict_mask=(torch.arange(nodes, device=make.device) >= accepted[:, None]).flatten(),
        page_size=page_size,
        num_draft_tokens=nodes,
    )


def _accepted(make: Maker, batch: int, nodes: int, page_size: int) -> dict[str, torch.Tensor]:
    """Lengths, accepted drafts, slots and what is freed."""
    lengths, accepted = make.integers(0, 40, batch), make.integers(0, nodes, batch, dtype=torch.int32)
    kept = (lengths + accepted + page_size) // page_size * page_size
    slots = torch.randperm(batch * nodes + 9, generator=make.generator)[: batch * nodes].to(make.device)
    return dict(
        lengths=lengths, accepted=accepted, slots=slots, freed=lengths + nodes - torch.minimum(kept, lengths + nodes)
    )


def _target_locs(make: Maker, batch: int, nodes: int, page_size: int) -> dict[str, Any]:
    found = _accepted(make, batch, nodes, page_size)
    return dict(
        tgt_cache_loc=_old(make, int(found["accepted"].sum()) + batch),
        to_free_slots=_old(make, int(found["freed"].sum())),
        accept_length=found["accepted"],
        to_free_num_slots=found["freed"],
        out_cache_loc=found["slots"],
        num_verify_tokens=nodes,
    )


def _source_locs(make: Maker, batch: int, nodes: int, page_size: int) -> dict[str, Any]:
    found = _accepted(make, batch, nodes, page_size)
    size = int(found["accepted"].sum()) + batch
    return dict(
        seq_lens=found["lengths"],
        out_cache_loc=found["slots"],
        accept_index=make.integers(0, max(batch * nodes, 1), size, dtype=torch.int32),
        accept_length=found["accepted"],
        draft_token_num=nodes,
        page_size=page_size,
    )


def _filter(make: Maker, batch: int) -> dict[str, Any]:
    accepted = make.integers(0, 4, batch, dtype=torch.int32)
    kept = (accepted + 1) * make.integers(0, 2, batch, dtype=torch.int32)
    return dict(
        out_cache_loc=_old(make, int(kept.sum())),
        tgt_cache_loc=make.integers(0, 1 << 40, int(accepted.sum()) + batch),
        accept_length=accepted,
        accept_length_filter=kept,
    )


def _flashinfer(make: Maker, batch: int, starts: bool) -> dict[str, Any]:
    counts = make.integers(0, 8, batch, dtype=torch.int32)
    pool = _pool(make, batch, 20)
    return dict(
        req_to_token_ptr=pool["req_to_token"],
        req_pool_indices_ptr=pool["req_pool_indices"],
        page_kernel_lens_ptr=counts,
        kv_indptr=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        kv_start_idx=make.integers(0, 12, batch, dtype=torch.int32) if starts else None,
        kv_indices_ptr=_old(make, int(counts.sum()) + 4, dtype=torch.int32),
        req_to_token_ptr_stride=20,
    )


def _accepted_slots(make: Maker, size: int, nodes: int) -> dict[str, Any]:
    return dict(
        accept_index=make.integers(-1, nodes, size, dtype=torch.int32),
        out_cache_loc=make.integers(0, 1 << 40, nodes),
        accepted_out_cache_loc=_old(make, size),
    )


_build = partial(case_of, "build_tree_kernel_efficient", build_inputs)
_greedy_case = partial(case_of, "verify_tree_greedy", _greedy)
_sampling_case = partial(case_of, "tree_speculative_sampling_target_only", _sampling)
_packbits_case = partial(case_of, "segment_packbits", _packbits)
_draft_case = partial(case_of, "assign_draft_cache_locs", _draft_locs)
_decode_case = partial(case_of, "generate_draft_decode_kv_indices", _decode_indices)
_FULL, _QUERY, _PACKED = TreeMaskMode


def _bonus(make: Maker, batch: int, stride: int) -> dict[str, Any]:
    return dict(
        accept_tokens=make.integers(0, 50, batch, stride),
        accept_lens=make.tensor([row % (stride + 2) for row in range(batch)], torch.int32),
        bonus_tokens=_old(make, batch),
        accept_stride=stride,
    )


def _predicted(make: Maker, batch: int, nodes: int, stride: int) -> dict[str, Any]:
    lens = [1 + row % stride for row in range(batch)]
    behind = (-1, batch * nodes)  # what stands behind the accepted nodes is not read
    index = [[row * nodes + i if i < lens[row] else behind[i % 2] for i in range(stride)] for row in range(batch)]
    return dict(
        predict=make.integers(0, 50, batch * nodes),
        accept_index=make.tensor(index, torch.int32),
        accept_lens=make.tensor(lens, torch.int32),
        bonus_tokens=_old(make, batch),
        accept_index_stride=stride,
    )


def _evict_any(make: Maker, batch: int, nodes: int) -> dict[str, Any]:
    return dict(
        out_cache_loc=torch.randperm(batch * nodes, generator=make.generator).to(make.device),
        evict_mask=make.integers(0, 2, batch * nodes).bool(),
        page_size=2,
        num_draft_tokens=nodes,
    )


CASES = (
    _build("sgl_build_full", "ragged offsets of the full mask", gate=True, batch=3, nodes=7, mode=_FULL),
    _build("sgl_build_query", "cells by row and column", gate=True, batch=3, nodes=9, mode=_QUERY),
    _build("sgl_build_packed", "bits of a row", gate=True, batch=3, nodes=8, mode=_PACKED),
    _build("sgl_build_packed_32", "the sign bit of a packed row", batch=2, nodes=32, mode=_PACKED, topk=6),
    _build("sgl_build_packed_64", "words without bits to cut off", batch=2, nodes=64, mode=_PACKED, topk=8),
    _build("sgl_build_wide", "cells of the second mask word", batch=1, nodes=70, mode=_QUERY, topk=8),
    _build("sgl_build_chain", "an empty parent list", batch=2, nodes=4, mode=_QUERY, topk=4, depth=1),
    _build("sgl_build_many", "lengths of a second block", batch=260, nodes=2, mode=_FULL, topk=1, depth=2),
    _build("sgl_build_root", "a tree of the root alone", batch=2, nodes=1, mode=_FULL),
    _build(
        "sgl_build_b64", "the step's shape", gate=True, bench=True, tags=("large",), batch=64, nodes=32, mode=_QUERY,
        topk=8, orphans=False,
    ),
    case_of(
        "reconstruct_indices_from_tree_mask", _reconstruct, "sgl_mask", "siblings by parent", gate=True,
        batch=3, nodes=9,
    ),
    _greedy_case("sgl_greedy_empty", "B = 0", batch=0, nodes=3, path=2),
    _greedy_case("sgl_greedy_deep", "the walk's order", gate=True, batch=9, nodes=12, path=6),
    _greedy_case("sgl_greedy_short", "a path past its width", batch=9, nodes=12, path=2, vocab=2),
    _greedy_case("sgl_greedy_root", "a tree of the root alone", batch=3, nodes=1, path=1),
    _greedy_case("sgl_greedy_wild", "ids one past the last", batch=24, nodes=4, path=4, vocab=2, change=_spoil),
    _greedy_case(
        "sgl_greedy_lost", "tokens of -1 behind an id that there is not", batch=6, nodes=5, path=4, vocab=1, first=-1,
        change=_lose,
    ),
    _greedy_case("sgl_greedy_round", "more visits than nodes", batch=9, nodes=3, path=9, vocab=2, change=_turn_round),
    _greedy_case("sgl_greedy_cycle", "links that never end", batch=4, nodes=6, path=4, vocab=1, cycle=True),
    _greedy_case(
        "sgl_greedy_b64", "the step's shape", gate=True, bench=True, tags=("large",), batch=64, nodes=32, path=6,
        vocab=3,
    ),
    _sampling_case("sgl_sampling_small", "uniforms and residuals", gate=True, batch=6, nodes=7, path=4, vocab=9),
    _sampling_case("sgl_sampling_tiles", "the carry between tiles", batch=2, nodes=3, path=3, vocab=1300),
    _sampling_case("sgl_sampling_short", "the whole target after a full path", batch=6, nodes=7, path=2, vocab=5),
    _sampling_case(
        "sgl_sampling_spent", "what the draft has, taken from a full path", batch=8, nodes=5, path=2, vocab=1300,
        single=0.0, acc=0.0, spent=True,
    ),
    _sampling_case("sgl_sampling_lossy", "thresholds", batch=6, nodes=7, path=4, vocab=9, single=0.25, acc=0.5),
    _sampling_case(
        "sgl_sampling_zero", "every first child taken", batch=4, nodes=7, path=4, vocab=9, single=0.0, acc=0.0
    ),
    _sampling_case(
        "sgl_sampling_wild", "ids one past the last", batch=5, nodes=4, path=4, vocab=5, acc=0.5, change=_spoil
    ),
    _sampling_case("sgl_sampling_empty", "no mass is left", batch=3, nodes=1, path=2, vocab=1300, empty=True),
    _sampling_case("sgl_sampling_top", "the last token of a sum", batch=3, nodes=2, path=2, vocab=1300, top=True),
    _sampling_case(
        "sgl_sampling_lost", "nodes behind an id that there is not", batch=6, nodes=5, path=4, vocab=5, single=0.0,
        acc=0.0, change=_lose,
    ),
    _sampling_case(
        "sgl_sampling_round", "more visits than nodes", batch=3, nodes=3, path=9, vocab=5, single=0.0, acc=0.0,
        change=_turn_round,
    ),
    _sampling_case("sgl_sampling_odd", "no mass, NaN, tokens outside", batch=7, nodes=6, path=4, vocab=9, odd=True),
    _sampling_case(
        "sgl_sampling_gate", "registers", gate=True, tags=("large",), batch=2, nodes=4, path=3, vocab=151936
    ),
    _sampling_case(
        "sgl_sampling_152k", "the step's shape", bench=True, tags=("large",), batch=8, nodes=16, path=6, vocab=151936
    ),
    _packbits_case("sgl_pack_none", "no segments", sizes=()),
    _packbits_case("sgl_pack", "segments that end within a byte", gate=True, sizes=(0, 3, 8, 17, 0, 1)),
    _packbits_case("sgl_pack_missing", "flags behind the input", sizes=(3, 9, 4), missing=2),
    _packbits_case("sgl_pack_short", "bytes behind the output", sizes=(3, 9, 1), room=-1),
    case_of("top_k_renorm_prob", _renorm, "sgl_top_k", "ties", which="top_k", rows=3, vocab=11, value=[1, 3, 40]),
    case_of("top_p_renorm_prob", _renorm, "sgl_top_p", "the threshold", which="top_p", rows=3, vocab=11, value=0.5),
    case_of("create_extend_after_decode_spec_info", _spec_info, "sgl_spec_info", "offsets of the bonus", batch=5),
    case_of("assign_req_to_token_pool", _assign, "sgl_assign", "rows and starts", batch=5),
    case_of("assign_extend_cache_locs", _assign, "sgl_extend", "rows and starts", batch=5, read=True),
    _draft_case("sgl_draft_page_1", "unpaged drafts", batch=4, topk=3, steps=2, page_size=1),
    _draft_case("sgl_draft_chain", "one branch", batch=4, topk=1, steps=3, page_size=4),
    _draft_case("sgl_draft_whole", "no tail to copy", batch=3, topk=3, steps=5, page_size=4, longest=0),
    _draft_case("sgl_draft_paged", "copy lists, result over its input", batch=5, topk=3, steps=5, page_size=4),
    _decode_case("sgl_decode_page_1", "unpaged branches", batch=4, topk=3, steps=2, page_size=1),
    _decode_case("sgl_decode_paged", "paged branches", batch=4, topk=2, steps=3, page_size=4),
    _decode_case("sgl_decode_window", "window", batch=4, topk=2, steps=3, page_size=4, window=2, sink=1),
    case_of("create_draft_kv_indices", _pair_indices, "sgl_pair", "two sequences a request", batch=4),
    case_of("create_draft_kv_indices", _pair_indices, "sgl_factor_4", "any factor", batch=3, factor=4),
    case_of("align_evict_mask_to_page_size", _evict, "sgl_evict", "page edges", batch=7, nodes=5, page_size=4),
    case_of("get_target_cache_loc", _target_locs, "sgl_target", "first and last slots", batch=5, nodes=6, page_size=4),
    case_of(
        "get_target_cache_loc", _target_locs, "sgl_target_b64", "the step's shape", bench=True, batch=64, nodes=32,
        page_size=16,
    ),
    case_of("get_src_tgt_cache_loc", _source_locs, "sgl_source", "whole pages freed", batch=5, nodes=6, page_size=4),
    case_of("filter_finished_cache_loc_kernel", _filter, "sgl_filter", "finished rows", batch=7),
    case_of("filter_finished_cache_loc_kernel", _filter, "sgl_filter_b64", "the step's shape", bench=True, batch=64),
    case_of("create_flashinfer_kv_indices_triton", _flashinfer, "sgl_flashinfer", "offsets", batch=5, starts=True),
    case_of("create_flashinfer_kv_indices_triton", _flashinfer, "sgl_flashinfer_0", "no starts", batch=5, starts=False),
    case_of("fill_bonus_tokens", _bonus, "sgl_bonus", "a request without tokens", batch=6, stride=4),
    case_of("fill_bonus_tokens_from_predict", _predicted, "sgl_predicted", "flat ids", batch=4, nodes=6, stride=4),
    case_of("align_evict_mask_to_page_size_simple_eagle", _evict_any, "sgl_evict_any", "any order", batch=3, nodes=8),
    case_of("fill_accepted_out_cache_loc", _accepted_slots, "sgl_accepted", "order", size=24, nodes=16),
)  # fmt: skip
