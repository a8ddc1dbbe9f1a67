"""Kernels of the SGLang functions that the families have no counterpart of.

A step of a walk visits one node, so a request is done after at most N - 1 steps. The greedy walk loads the tree at once
and follows it in registers. The walk that samples takes one lane per request, and its warp stops with its last request.
Sampling keeps SGLang's bookkeeping (rejected mass in `draft_probs`). Then it reads
one row per request twice: for the mass of every tile of the vocabulary, and again for the one tile in which the running
mass passes the uniform number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.compat.sglang.configs import config_of
from specdec_kernels.kv_index.kernel import owning_row
from specdec_kernels.launch import lanes, launch
from specdec_kernels.tree.types import TreeLinks
from specdec_kernels.verify.device import entry, wide_entry


@triton.jit(do_not_specialize=["batch"])
def _deliver_links_kernel(
    first_child_ptr,  # [B, NODES] int32
    next_sibling_ptr,  # [B, NODES] int32
    positions_ptr,  # [B, NODES] int64
    out_positions_ptr,  # [B * NODES] int
    out_index_ptr,  # [B, NODES] int
    out_child_ptr,  # [B, NODES] int
    out_sibling_ptr,  # [B, NODES] int
    batch,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < batch * NODES
    position = tl.load(positions_ptr + place, mask=live, other=0)
    tl.store(out_positions_ptr + place, position.to(out_positions_ptr.dtype.element_ty), mask=live)
    tl.store(out_index_ptr + place, place.to(out_index_ptr.dtype.element_ty), mask=live)
    child = tl.load(first_child_ptr + place, mask=live, other=-1)
    tl.store(out_child_ptr + place, child.to(out_child_ptr.dtype.element_ty), mask=live)
    sibling = tl.load(next_sibling_ptr + place, mask=live, other=-1)
    tl.store(out_sibling_ptr + place, sibling.to(out_sibling_ptr.dtype.element_ty), mask=live)


@triton.jit
def _link(node, NODES: tl.constexpr):
    """Node that a link names; -1, which ends a walk, for all that are not in the row."""
    return tl.where((node >= 0) & (node < NODES), node, -1)


@triton.jit
def _start_walk(index_ptr, next_token_ptr, accept_index_ptr, request, live, NODES: tl.constexpr, PATH: tl.constexpr):
    """Flat id of the root and its first child; the root is written to the path."""
    last = tl.load(index_ptr + request * NODES, mask=live, other=-1).to(tl.int64)
    child = _link(tl.load(next_token_ptr + request * NODES, mask=live, other=-1).to(tl.int64), NODES)
    tl.store(accept_index_ptr + request * PATH, last.to(accept_index_ptr.dtype.element_ty), mask=live)
    return last, child


@triton.jit
def _goes_on(live, child, accepted, PATH: tl.constexpr):
    """Whether there is a child to look at, and room for it on the path."""
    return live & (child >= 0) & (accepted < PATH - 1)


@triton.jit
def _take(
    predicts_ptr, accept_index_ptr, index_ptr, request, hit, token, last, child, accepted, flat_nodes,
    NODES: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Put an accepted child on the path; the new last flat id."""
    inside = hit & (last >= 0) & (last < flat_nodes)
    tl.store(predicts_ptr + last, token.to(predicts_ptr.dtype.element_ty), mask=inside)
    found = tl.load(index_ptr + request * NODES + child, mask=hit, other=-1).to(tl.int64)
    tl.store(accept_index_ptr + request * PATH + accepted + 1, found.to(accept_index_ptr.dtype.element_ty), mask=hit)
    return tl.where(hit, found, last)


@triton.jit
def _onward(next_token_ptr, next_sibling_ptr, request, active, hit, child, NODES: tl.constexpr):
    """First child of an accepted node, next sibling of a rejected one."""
    place = request * NODES + child
    down = tl.load(next_token_ptr + place, mask=hit, other=-1).to(tl.int64)
    along = tl.load(next_sibling_ptr + place, mask=active & (hit == 0), other=-1).to(tl.int64)
    return tl.where(active, _link(tl.where(hit, down, along), NODES), child)


@triton.jit
def _row(values_ptr, place, live):
    """Entries of a row as int64, -1 where not `live`."""
    return tl.load(values_ptr + place, mask=live, other=-1).to(tl.int64)


@triton.jit(do_not_specialize=["batch", "flat_nodes"])
def _verify_greedy_kernel(
    predicts_ptr,  # [flat_nodes] int
    accept_index_ptr,  # [B, PATH] int
    accept_num_ptr,  # [B] int
    candidates_ptr,  # [B, NODES] int
    index_ptr,  # [B, NODES] int
    next_token_ptr,  # [B, NODES] int
    next_sibling_ptr,  # [B, NODES] int
    target_ptr,  # [B * NODES] int
    batch,
    flat_nodes,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = request < batch
    node = tl.arange(0, BLOCK_N)[None, :]
    place, in_row = request[:, None] * NODES + node, live[:, None] & (node < NODES)
    tokens, flat = _row(candidates_ptr, place, in_row), _row(index_ptr, place, in_row)
    children, siblings = _row(next_token_ptr, place, in_row), _row(next_sibling_ptr, place, in_row)
    children, siblings = _link(children, NODES).to(tl.int32), _link(siblings, NODES).to(tl.int32)
    targets = _row(target_ptr, flat, in_row & (flat >= 0) & (flat < batch * NODES))

    accepted = (request * 0).to(tl.int32)
    last, target = wide_entry(flat, node, accepted), wide_entry(targets, node, accepted)
    child = entry(children, node, accepted)
    path_ptr = accept_index_ptr + request * PATH
    tl.store(path_ptr, last.to(accept_index_ptr.dtype.element_ty), mask=live)
    visits = NODES - 1
    active = _goes_on(live, child, accepted, PATH)
    while (visits > 0) & (tl.max(active.to(tl.int32), 0) > 0):
        token = wide_entry(tokens, node, child)
        hit = active & (token == target)
        inside = hit & (last >= 0) & (last < flat_nodes)
        tl.store(predicts_ptr + last, token.to(predicts_ptr.dtype.element_ty), mask=inside)
        last = tl.where(hit, wide_entry(flat, node, child), last)
        accepted += hit.to(tl.int32)
        tl.store(path_ptr + accepted, last.to(accept_index_ptr.dtype.element_ty), mask=hit)
        target = tl.where(hit, wide_entry(targets, node, child), target)
        onward = tl.where(hit, entry(children, node, child), entry(siblings, node, child))
        child = tl.where(active, onward, child)
        active = _goes_on(live, child, accepted, PATH)
        visits -= 1
    inside = live & (last >= 0) & (last < flat_nodes)
    tl.store(predicts_ptr + last, target.to(predicts_ptr.dtype.element_ty), mask=inside)
    tl.store(accept_num_ptr + request, accepted.to(accept_num_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["batch", "flat_nodes", "threshold_single", "threshold_acc"])
def _sample_walk_kernel(
    predicts_ptr,  # [flat_nodes] int
    accept_index_ptr,  # [B, PATH] int
    accept_num_ptr,  # [B] int
    candidates_ptr,  # [B, NODES] int
    index_ptr,  # [B, NODES] int
    next_token_ptr,  # [B, NODES] int
    next_sibling_ptr,  # [B, NODES] int
    uniforms_ptr,  # [B, NODES] float32
    target_ptr,  # [B, NODES, VOCAB] float32
    draft_ptr,  # [B, NODES, VOCAB] float32, changed
    node_ptr,  # [B] int32: last accepted node
    last_ptr,  # [B] int64: its flat id
    batch,
    flat_nodes,
    threshold_single,
    threshold_acc,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = request < batch
    last, child = _start_walk(index_ptr, next_token_ptr, accept_index_ptr, request, live, NODES, PATH)
    accepted, node = request * 0, request * 0
    visits = NODES - 1
    uniform = tl.load(uniforms_ptr + request * NODES, mask=live, other=1.0)
    mass = uniform * 0.0
    active = _goes_on(live, child, accepted, PATH)
    while (visits > 0) & (tl.max(active.to(tl.int32), 0) > 0):
        token = tl.load(candidates_ptr + request * NODES + child, mask=active, other=-1).to(tl.int64)
        known = active & (token >= 0) & (token < VOCAB)
        place = (request * NODES + node) * VOCAB + tl.where(known, token, 0)
        probability = tl.load(target_ptr + place, mask=known, other=0.0)
        probability = tl.where(probability > 0, probability, 0.0)
        before = tl.load(draft_ptr + place, mask=known, other=0.0)
        added = tl.where(before > 0, 0.0, probability)
        mass += added
        hit = known & ((uniform < tl.div_rn(mass, mass * 0 + threshold_acc)) | (added >= threshold_single))
        tl.store(draft_ptr + place, probability, mask=known & (hit == 0) & ((before > 0) == 0))
        # A duplicate sibling reads this entry again, and a lane may be held by more than one thread.
        tl.debug_barrier()
        last = _take(
            predicts_ptr, accept_index_ptr, index_ptr, request, hit, token, last, child, accepted, flat_nodes,
            NODES, PATH,
        )  # fmt: skip
        accepted += hit.to(tl.int64)
        node = tl.where(hit, child, node)
        uniform = tl.where(hit, tl.load(uniforms_ptr + request * NODES + child, mask=hit, other=1.0), uniform)
        mass = tl.where(hit, 0.0, mass)
        child = _onward(next_token_ptr, next_sibling_ptr, request, active, hit, child, NODES)
        active = _goes_on(live, child, accepted, PATH)
        visits -= 1
    tl.store(node_ptr + request, node.to(tl.int32), mask=live)
    tl.store(last_ptr + request, last, mask=live)
    tl.store(accept_num_ptr + request, accepted.to(accept_num_ptr.dtype.element_ty), mask=live)


@triton.jit
def _residual(target_ptr, draft_ptr, row, token, full, VOCAB: tl.constexpr):
    """Target and what is left of it without the rejected tokens (all of it after a full path)."""
    inside = token < VOCAB
    target = tl.load(target_ptr + row * VOCAB + token, mask=inside, other=0.0)
    target = tl.where(target > 0, target, 0.0)
    rejected = tl.load(draft_ptr + row * VOCAB + token, mask=inside & (full == 0), other=0.0)
    rejected = tl.where(rejected > 0, rejected, 0.0)
    return target, tl.maximum(target - rejected, 0.0)


@triton.jit
def _residual_tiles_kernel(
    target_ptr,  # [B, NODES, VOCAB] float32
    draft_ptr,  # [B, NODES, VOCAB] float32
    node_ptr,  # [B] int32
    accept_num_ptr,  # [B] int
    tile_mass_ptr,  # [B, TILES] float32
    tile_max_ptr,  # [B, TILES] float32, of the target
    tile_arg_ptr,  # [B, TILES] int32
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    request, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = request * NODES + tl.load(node_ptr + request)
    full = tl.load(accept_num_ptr + request) == PATH - 1
    token = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    target, residual = _residual(target_ptr, draft_ptr, row, token, full, VOCAB)
    top = tl.max(target, 0)
    place = request * TILES + tile
    tl.store(tile_mass_ptr + place, tl.sum(residual, 0))
    tl.store(tile_max_ptr + place, top)
    tl.store(tile_arg_ptr + place, tl.min(tl.where((target == top) & (token < VOCAB), token, VOCAB), 0))


@triton.jit
def _first_beyond(running, weight, goal, index, END: tl.constexpr):
    """First index of positive weight whose sum exceeds the goal, else the last such index, else -1."""
    first = tl.min(tl.where((running > goal) & (weight > 0), index, END), 0)
    last = tl.max(tl.where(weight > 0, index, -1), 0)
    return tl.where(first < END, first, last)


@triton.jit(do_not_specialize=["flat_nodes"])
def _final_token_kernel(
    predicts_ptr,  # [flat_nodes] int
    final_uniforms_ptr,  # [B] float32
    target_ptr,  # [B, NODES, VOCAB] float32
    draft_ptr,  # [B, NODES, VOCAB] float32
    node_ptr,  # [B] int32
    last_ptr,  # [B] int64
    accept_num_ptr,  # [B] int
    tile_mass_ptr,  # [B, TILES] float32
    tile_max_ptr,  # [B, TILES] float32
    tile_arg_ptr,  # [B, TILES] int32
    flat_nodes,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK_T)
    place = request * TILES + tile
    mass = tl.load(tile_mass_ptr + place, mask=tile < TILES, other=0.0)
    running = tl.cumsum(mass, 0)
    goal = tl.load(final_uniforms_ptr + request) * tl.max(running, 0)
    winner = tl.maximum(_first_beyond(running, mass, goal, tile, BLOCK_T), 0)
    before = tl.max(tl.where(tile < winner, running, 0.0), 0)

    row = request * NODES + tl.load(node_ptr + request)
    full = tl.load(accept_num_ptr + request) == PATH - 1
    token = winner * BLOCK_V + tl.arange(0, BLOCK_V)
    _, residual = _residual(target_ptr, draft_ptr, row, token, full, VOCAB)
    drawn = _first_beyond(tl.cumsum(residual, 0), residual, goal - before, token, VOCAB)

    tops = tl.load(tile_max_ptr + place, mask=tile < TILES, other=-1.0)
    args = tl.load(tile_arg_ptr + place, mask=tile < TILES, other=VOCAB)
    likeliest = tl.min(tl.where(tops == tl.max(tops, 0), args, VOCAB), 0)
    drawn = tl.where(drawn >= 0, drawn, likeliest)
    last = tl.load(last_ptr + request)
    tl.store(predicts_ptr + last, drawn.to(predicts_ptr.dtype.element_ty), mask=(last >= 0) & (last < flat_nodes))


@triton.jit(do_not_specialize=["segments", "size", "flags"])
def _packbits_kernel(
    x_ptr,  # [flags] bool or uint8
    input_indptr_ptr,  # [segments + 1] int32
    output_indptr_ptr,  # [segments + 1] int32
    y_ptr,  # [size] uint8
    segments,
    size,
    flags,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < size
    segment = owning_row(output_indptr_ptr, place, segments, live)
    owned = live & (segment < segments)
    column = place - tl.load(output_indptr_ptr + segment, mask=owned, other=0)
    first = tl.load(input_indptr_ptr + segment, mask=owned, other=0) + 8 * column
    end = tl.minimum(tl.load(input_indptr_ptr + segment + 1, mask=owned, other=0), flags)
    packed = (place * 0).to(tl.int32)
    for bit in tl.static_range(8):
        flag = first + bit
        inside = owned & (flag >= 0) & (flag < end)
        packed |= (tl.load(x_ptr + flag, mask=inside, other=0) != 0).to(tl.int32) << bit
    tl.store(y_ptr + place, packed.to(tl.uint8), mask=owned)


def deliver_links(links: TreeLinks, outputs: tuple[torch.Tensor, ...]) -> None:
    """See `reference.deliver_links`."""
    batch, nodes = links.first_child.shape
    config = config_of(links.positions)
    block = lanes(batch * nodes, config.flat_block)
    launch(
        _deliver_links_kernel, (triton.cdiv(batch * nodes, block),), links.first_child, links.next_sibling,
        links.positions, *outputs, batch, num_warps=config.num_warps, NODES=nodes, BLOCK=block,
    )  # fmt: skip


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """See `specdec_kernels.compat.sglang.verify_tree_greedy`."""
    batch, nodes = candidates.shape
    block = min(triton.next_power_of_2(max(batch, 1)), config_of(candidates).greedy_requests)
    launch(
        _verify_greedy_kernel, (triton.cdiv(batch, block),), predicts, accept_index, accept_token_num,
        candidates, retrive_index, next_token, next_sibling, target_predict, batch, predicts.shape[0],
        num_warps=1, NODES=nodes, PATH=accept_index.shape[1], BLOCK=block, BLOCK_N=lanes(nodes),
    )  # fmt: skip


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    uniforms: torch.Tensor,
    final_uniforms: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    """See `specdec_kernels.compat.sglang.tree_speculative_sampling_target_only`."""
    batch, nodes, vocab = target_probs.shape
    config = config_of(candidates)
    block, block_v = lanes(batch, config.walk_requests), lanes(vocab, config.max_tile)
    tiles = triton.cdiv(vocab, block_v)

    def scratch(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=candidates.device)

    node, last = scratch(batch, dtype=torch.int32), scratch(batch, dtype=torch.int64)
    mass, top = (scratch(batch, tiles, dtype=torch.float32) for _ in range(2))
    arg = scratch(batch, tiles, dtype=torch.int32)
    sizes = dict(NODES=nodes, PATH=accept_index.shape[1], VOCAB=vocab)
    launch(
        _sample_walk_kernel, (triton.cdiv(batch, block),), predicts, accept_index, accept_token_num,
        candidates, retrive_index, next_token, next_sibling, uniforms, target_probs, draft_probs, node, last,
        batch, predicts.shape[0], float(threshold_single), float(threshold_acc),
        num_warps=config.walk_warps, BLOCK=block, **sizes,
    )  # fmt: skip
    launch(
        _residual_tiles_kernel, (batch, tiles), target_probs, draft_probs, node, accept_token_num, mass, top,
        arg, num_warps=config.num_warps, TILES=tiles, BLOCK_V=block_v, **sizes,
    )  # fmt: skip
    launch(
        _final_token_kernel, (batch,), predicts, final_uniforms, target_probs, draft_probs, node, last,
        accept_token_num, mass, top, arg, predicts.shape[0], num_warps=config.num_warps, TILES=tiles,
        BLOCK_V=block_v, BLOCK_T=lanes(tiles), **sizes,
    )  # fmt: skip


def segment_packbits(x: torch.Tensor, input_indptr: torch.Tensor, output_indptr: torch.Tensor, y: torch.Tensor) -> None:
    """See `specdec_kernels.compat.sglang.segment_packbits`."""
    config = config_of(x)
    block = lanes(y.shape[0], config.flat_block)
    launch(
        _packbits_kernel, (triton.cdiv(y.shape[0], block),), x, input_indptr, output_indptr, y,
        input_indptr.shape[0] - 1, y.shape[0], x.shape[0], num_warps=config.num_warps, BLOCK=block,
    )  # fmt: skip
