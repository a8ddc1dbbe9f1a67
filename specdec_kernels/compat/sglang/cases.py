"""Named inputs of the functions with kernels: outputs are tensors with contents, as SGLang hands them over."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.cases import Case, Maker, case_of
from specdec_kernels.compat.sglang.types import TreeMaskMode
from specdec_kernels.tree.reference import links_of

_OLD = 77  # what an output holds before the call


def _old(make: Maker, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.full(shape, _OLD, dtype=dtype, device=make.device)


def draft_history(
    make: Maker, batch: int, nodes: int, topk: int, depth: int, orphans: bool = True
) -> tuple[Tensor, Tensor]:
    """(parent_list, selected) of random drafts; without `orphans` every node's parent is selected too."""
    children = topk * topk
    scores = torch.rand(batch, topk + (depth - 1) * children, generator=make.generator)
    chosen, levels = torch.arange(topk).expand(batch, -1), []
    for first in range(topk, scores.shape[1], children):
        if not orphans:  # a child has a smaller score than its parent
            scores[:, first : first + children] *= scores.gather(1, chosen).repeat_interleave(topk, 1)
        levels.append(chosen)
        picks = torch.rand(batch, children, generator=make.generator).argsort(1)[:, :topk]
        chosen = first + picks.sort(1).values
    root = torch.full((batch, 1), -1)
    parents = torch.cat([root, *levels], 1) if levels else root[:, :0]
    selected = scores.argsort(1, descending=True)[:, : nodes - 1].sort(1).values
    return parents.to(make.device), selected.contiguous().to(make.device)


def build_inputs(
    make: Maker, batch: int, nodes: int, mode: TreeMaskMode, topk: int = 4, depth: int = 4, longest: int = 6,
    orphans: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of `build_tree_kernel_efficient`. Without `orphans` the links hold -1, as SGLang prepares them."""
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


def tree_outputs(make: Maker, batch: int, nodes: int) -> dict[str, Tensor]:
    """Positions and links with contents."""
    names = ("retrive_index", "retrive_next_token", "retrive_next_sibling")
    return dict(positions=_old(make, batch * nodes)) | {name: _old(make, batch, nodes) for name in names}


def random_links(make: Maker, batch: int, nodes: int) -> dict[str, Tensor]:
    """First-child and next-sibling links of random trees."""
    child, sibling = links_of(make.parents(batch, nodes).long())
    index = torch.arange(batch * nodes, device=make.device).view(batch, nodes)
    return dict(retrive_index=index, retrive_next_token=child, retrive_next_sibling=sibling)


def _spoil(links: dict[str, Tensor]) -> None:
    """Links and flat ids one past the last, and below the first."""
    index, child, sibling = links.values()
    batch, nodes = index.shape
    child[::2, 1], sibling[1::2, 1] = nodes, nodes
    index[0, 1], index[1, 1], index[2, 0] = batch * nodes, -1, batch * nodes


def walk_outputs(make: Maker, batch: int, nodes: int, path: int) -> dict[str, Tensor]:
    """`predicts`, `accept_index` and `accept_token_num` as SGLang prepares them."""
    return dict(
        predicts=_old(make, batch * nodes, dtype=torch.int32),
        accept_index=torch.full((batch, path), -1, dtype=torch.int32, device=make.device),
        accept_token_num=_old(make, batch, dtype=torch.int32),
    )


def _cycle(links: dict[str, Tensor]) -> None:
    """Links that never end, and a sibling far past the last node."""
    _, child, sibling = links.values()
    child[:, :2], sibling[:, 2] = 1, 99


def _traversal(
    make: Maker, batch: int, nodes: int, path: int, most: int, change: Callable[[dict[str, Tensor]], None] | None
) -> dict[str, Tensor]:
    """Outputs, links (which `change` spoils) and candidates below `most`."""
    links = random_links(make, batch, nodes)
    if change is not None:
        change(links)
    return walk_outputs(make, batch, nodes, path) | dict(candidates=make.integers(0, most, batch, nodes), **links)


def greedy_inputs(make: Maker, batch: int, nodes: int, path: int, vocab: int = 3, change: Any = None) -> dict[str, Any]:
    """Few tokens, so that paths are deep and siblings repeat."""
    inputs = _traversal(make, batch, nodes, path, vocab, change)
    return inputs | dict(target_predict=make.integers(0, vocab, batch, nodes))


def coarse_probs(make: Maker, batch: int, nodes: int, vocab: int) -> Tensor:
    """Distributions in multiples of 1/64, whose sums are exact in any order."""
    draws = make.integers(0, vocab, batch, nodes, 64)
    counts = torch.zeros(batch, nodes, vocab, device=make.device)
    return counts.scatter_add_(2, draws, torch.ones_like(draws, dtype=torch.float32)) / 64


def sampling_inputs(
    make: Maker, batch: int, nodes: int, path: int, vocab: int, single: float = 1.0, acc: float = 1.0,
    odd: bool = False, change: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """`odd`: uniforms of 0, rows without mass, tokens outside the vocabulary; `change` spoils the links."""
    inputs: dict[str, Any] = _traversal(make, batch, nodes, path, min(vocab, 6), change)
    target = coarse_probs(make, batch, nodes, vocab)
    uniforms = make.integers(0, 128, batch, nodes).float() / 128
    final = make.integers(0, 128, batch).float() / 128
    if odd:
        target[::2, 1:] = 0
        target[1::3, 0, 2] = float("nan")
        inputs["candidates"][:, 2::3] = vocab
        uniforms[:, ::2] = 0
        final[::2] = 0
    return inputs | dict(
        uniform_samples=uniforms,
        uniform_samples_for_final_sampling=final,
        target_probs=target,
        draft_probs=torch.zeros_like(target),
        threshold_single=single,
        threshold_acc=acc,
    )


def _spec_info(make: Maker, batch: int, most: int = 4) -> dict[str, Any]:
    accepted = make.integers(1, most + 1, batch, dtype=torch.int32)
    accepted[1::4] = 0
    return dict(
        verified_id=make.integers(0, 1000, int(accepted.sum()), dtype=torch.int32),
        seq_lens=make.integers(0, 50, batch) + accepted,
        accept_lens=accepted,
        positions=_old(make, batch * most),
        new_verified_id=_old(make, batch, dtype=torch.int32),
    )


def _pool(make: Maker, batch: int, width: int) -> dict[str, Tensor]:
    """A table of distinct slots with two rows more than requests, and the requests' rows."""
    rows = batch + 2
    table = torch.randperm(rows * width, generator=make.generator).view(rows, width)
    order = torch.randperm(rows, generator=make.generator)[:batch]
    return dict(req_pool_indices=order.to(make.device), req_to_token=table.to(make.device, torch.int32))


def _extend(make: Maker, batch: int, width: int = 20, outside: bool = False) -> dict[str, Any]:
    """`outside`: some spans leave their row."""
    counts = make.integers(0, 6, batch)
    start = make.integers(0, width if outside else width - 6, batch)
    slots = _old(make, int(counts.sum()) + 3)
    spans = dict(start_offset=start, end_offset=start + counts, out_cache_loc=slots, pool_len=width)
    return _pool(make, batch, width) | spans


def _decode_indices(
    make: Maker, batch: int, topk: int, steps: int, page_size: int, short: int = 0, longest: int = 9, **window: int
) -> dict[str, Any]:
    """`short`: entries that the indices lack."""
    lengths = make.integers(0, longest + 1, batch)
    width = int(lengths.sum()) * topk + batch * topk * steps + 4 - short
    return dict(
        **_pool(make, batch, longest + topk * (page_size + steps) * 2),
        paged_kernel_lens=lengths,
        kv_indices=_old(make, steps, width, dtype=torch.int32),
        kv_indptr=_old(make, steps, batch * topk + 3, dtype=torch.int32),
        positions=lengths.repeat_interleave(topk),
        page_size=page_size,
        **window,
    )


def _pair_indices(make: Maker, batch: int, factor: int = 2, longest: int = 8) -> dict[str, Any]:
    lengths = make.integers(0, longest + 1, batch) + factor
    return dict(
        kv_indptr=_old(make, factor * batch + 1, dtype=torch.int32),
        kv_indices=_old(make, factor * int(lengths.sum()), dtype=torch.int32),
        **_pool(make, batch, longest + factor + 1),
        seq_lens=lengths,
        expand_factor=factor,
    )


def _target_locs(make: Maker, batch: int, nodes: int, page_size: int) -> dict[str, Any]:
    lengths, accepted = make.integers(0, 40, batch), make.integers(0, nodes, batch, dtype=torch.int32)
    kept = torch.minimum((lengths + accepted + page_size) // page_size * page_size, lengths + nodes)
    freed = lengths + nodes - kept
    return dict(
        tgt_cache_loc=_old(make, int(accepted.sum()) + batch),
        to_free_slots=_old(make, int(freed.sum())),
        accept_length=accepted,
        to_free_num_slots=freed,
        out_cache_loc=torch.randperm(batch * nodes, generator=make.generator).to(make.device),
        num_verify_tokens=nodes,
    )


def _flashinfer(make: Maker, batch: int, starts: bool) -> dict[str, Any]:
    """Offsets that leave each request one entry more than it has."""
    counts, pool = make.integers(0, 8, batch, dtype=torch.int32), _pool(make, batch, 20)
    return dict(
        req_to_token_ptr=pool["req_to_token"],
        req_pool_indices_ptr=pool["req_pool_indices"],
        page_kernel_lens_ptr=counts,
        kv_indptr=torch.nn.functional.pad((counts + 1).cumsum(0), (1, 0)).int(),
        kv_start_idx=make.integers(0, 12, batch, dtype=torch.int32) if starts else None,
        kv_indices_ptr=_old(make, int(counts.sum()) + batch + 4, dtype=torch.int32),
    )


def _case(function: str, build: Callable[..., dict[str, Any]], name: str, catches: str, **arguments: Any) -> Case:
    return case_of(function, build, f"sgl_{name}", catches, **arguments)


_build = partial(_case, "build_tree_kernel_efficient", build_inputs)
_greedy_case = partial(_case, "verify_tree_greedy", greedy_inputs)
_sampling_case = partial(_case, "tree_speculative_sampling_target_only", sampling_inputs)
_extend_case = partial(_case, "assign_extend_cache_locs", _extend)
_decode_case = partial(_case, "generate_draft_decode_kv_indices", _decode_indices)
_pair_case = partial(_case, "create_draft_kv_indices", _pair_indices)
_flashinfer_case = partial(_case, "create_flashinfer_kv_indices_triton", _flashinfer)
_target = partial(_case, "get_target_cache_loc", _target_locs)
_FULL, _QUERY, _PACKED = TreeMaskMode
_STEP: dict[str, Any] = dict(bench=True, tags=("large",))

CASES = (
    _build("build_full", "ragged offsets of the full mask", gate=True, batch=3, nodes=7, mode=_FULL),
    _build("build_query", "cells by row and column", gate=True, batch=3, nodes=9, mode=_QUERY),
    _build("build_packed", "bits of a row", gate=True, batch=3, nodes=8, mode=_PACKED),
    _build("build_packed_64", "words without spare bits", batch=2, nodes=64, mode=_PACKED, topk=8),
    _build("build_wide", "cells of the second mask word", batch=1, nodes=70, mode=_QUERY, topk=8),
    _build("build_chain", "an empty parent list", batch=2, nodes=4, mode=_QUERY, topk=4, depth=1),
    _build("build_many", "lengths of a second block", batch=260, nodes=2, mode=_FULL, topk=1, depth=2),
    _build("build_root", "a tree of the root alone", batch=2, nodes=1, mode=_FULL),
    _build("build_b64", "a step", gate=True, **_STEP, batch=64, nodes=32, mode=_QUERY, topk=8, orphans=False),
    _greedy_case("greedy_empty", "B = 0", batch=0, nodes=3, path=2),
    _greedy_case("greedy_deep", "the order of visits", gate=True, batch=9, nodes=12, path=6),
    _greedy_case("greedy_short", "a path past its width", batch=9, nodes=12, path=2, vocab=2),
    _greedy_case("greedy_wild", "ids one past the last", batch=24, nodes=4, path=4, vocab=2, change=_spoil),
    _greedy_case("greedy_cycle", "links that never end", batch=4, nodes=6, path=4, vocab=1, change=_cycle),
    _greedy_case("greedy_b64", "a step", gate=True, **_STEP, batch=64, nodes=32, path=6, vocab=3),
    _sampling_case("sampling_small", "uniforms and residuals", gate=True, batch=6, nodes=7, path=4, vocab=9),
    _sampling_case("sampling_tiles", "the carry between tiles", batch=2, nodes=3, path=3, vocab=1300),
    _sampling_case("sampling_short", "the whole target after a full path", batch=6, nodes=7, path=2, vocab=5),
    _sampling_case("sampling_lossy", "thresholds", batch=6, nodes=7, path=4, vocab=9, single=0.25, acc=0.5),
    _sampling_case("sampling_wild", "ids past the last", batch=5, nodes=4, path=4, vocab=5, acc=0.5, change=_spoil),
    _sampling_case("sampling_odd", "no mass, NaN, tokens outside", batch=7, nodes=6, path=4, vocab=9, odd=True),
    _sampling_case("sampling_gate", "registers", gate=True, tags=("large",), batch=2, nodes=4, path=3, vocab=151936),
    _sampling_case("sampling_152k", "a step", **_STEP, batch=8, nodes=16, path=6, vocab=151936),
    _case("create_extend_after_decode_spec_info", _spec_info, "spec_info", "offsets of the bonus", gate=True, batch=5),
    _extend_case("extend", "rows and starts", gate=True, batch=5),
    _extend_case("extend_outside", "outside", batch=9, outside=True),
    _decode_case("decode_page_1", "unpaged branches", gate=True, batch=4, topk=3, steps=2, page_size=1),
    _decode_case("decode_paged", "paged branches", gate=True, batch=4, topk=2, steps=3, page_size=4),
    _decode_case("decode_window", "window", batch=4, topk=2, steps=3, page_size=4, window_size=2, sink_size=1),
    _decode_case("decode_short", "branches past the indices", batch=4, topk=2, steps=3, page_size=1, short=20),
    _decode_case("decode_b64", "a step", **_STEP, batch=64, topk=4, steps=3, page_size=16, longest=1024),
    _pair_case("pair", "two sequences a request", gate=True, batch=4),
    _pair_case("factor_4", "any factor", batch=3, factor=4),
    _pair_case("pair_b64", "a step", **_STEP, batch=64, longest=1024),
    _target("target", "first and last slots", batch=5, nodes=6, page_size=4),
    _target("target_b64", "a step", bench=True, batch=64, nodes=32, page_size=16),
    _flashinfer_case("flashinfer", "offsets with spare entries", batch=5, starts=True),
    _flashinfer_case("flashinfer_0", "no starts", batch=5, starts=False),
)  # fmt: skip
