"""Greedy and sampled traversal of trees in SGLang's layouts.

A step of a traversal visits one node, so a request is done after at most N - 1 steps. The greedy one loads the tree at
once and follows it in registers. The sampled one has one lane per request and keeps SGLang's bookkeeping (rejected mass
in `draft_probs`). Its last token is sampled by reading one row per request twice: for the mass of every tile of the
vocabulary, and again for the one tile in which the running mass passes the uniform number.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.compat.sglang.configs import CONFIGS
from specdec_kernels.compat.sglang.types import Outcome, Sampling, Tree
from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.verify.device import entry, wide_entry


class End(NamedTuple):
    """Where each path ends, and what its last row has in every tile of the vocabulary."""

    node: Any  # [B] int32: last accepted node
    last: Any  # [B] int64: its flat id
    mass: Any  # [B, TILES] float32: of the residual
    top: Any  # [B, TILES] float32: largest probability of the target
    arg: Any  # [B, TILES] int32: its first token


@triton.jit
def _link(node, NODES: tl.constexpr):
    """The node of a link; -1, which ends a traversal, for one that is not in the row."""
    return tl.where((node >= 0) & (node < NODES), node, -1)


@triton.jit
def _goes_on(live, child, accepted, PATH: tl.constexpr):
    """Whether there is a child to visit, and room for it on the path."""
    return live & (child >= 0) & (accepted < PATH - 1)


@triton.jit
def _row(values_ptr, place, live):
    """Entries of a row as int64, -1 where not `live`."""
    return tl.load(values_ptr + place, mask=live, other=-1).to(tl.int64)


@triton.jit(do_not_specialize=["batch", "flat_nodes"])
def _verify_greedy_kernel(
    outcome,  # Outcome, written
    tree,  # Tree
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
    place = request[:, None] * NODES + node
    in_row = live[:, None] & (node < NODES)
    tokens = _row(tree.candidates, place, in_row)
    flat = _row(tree.retrive_index, place, in_row)
    children = _link(_row(tree.next_token, place, in_row), NODES).to(tl.int32)
    siblings = _link(_row(tree.next_sibling, place, in_row), NODES).to(tl.int32)
    targets = _row(target_ptr, flat, in_row & (flat >= 0) & (flat < batch * NODES))

    accepted = (request * 0).to(tl.int32)
    last = wide_entry(flat, node, accepted)
    target = wide_entry(targets, node, accepted)
    child = entry(children, node, accepted)
    path_ptr = outcome.accept_index + request * PATH
    tl.store(path_ptr, last, mask=live)
    visits = NODES - 1
    active = _goes_on(live, child, accepted, PATH)
    while (visits > 0) & (tl.max(active.to(tl.int32), 0) > 0):
        token = wide_entry(tokens, node, child)
        hit = active & (token == target)
        inside = hit & (last >= 0) & (last < flat_nodes)
        tl.store(outcome.predicts + last, token, mask=inside)
        last = tl.where(hit, wide_entry(flat, node, child), last)
        accepted += hit.to(tl.int32)
        tl.store(path_ptr + accepted, last, mask=hit)
        target = tl.where(hit, wide_entry(targets, node, child), target)
        onward = tl.where(hit, entry(children, node, child), entry(siblings, node, child))
        child = tl.where(active, onward, child)
        active = _goes_on(live, child, accepted, PATH)
        visits -= 1
    inside = live & (last >= 0) & (last < flat_nodes)
    tl.store(outcome.predicts + last, target, mask=inside)
    tl.store(outcome.accept_token_num + request, accepted, mask=live)


@triton.jit(do_not_specialize=["batch", "flat_nodes", "threshold_single", "threshold_acc"])
def _sample_walk_kernel(
    outcome,  # Outcome, written
    tree,  # Tree
    given,  # Sampling, whose draft probabilities are changed
    end,  # End, whose nodes are written
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
    last = tl.load(tree.retrive_index + request * NODES, mask=live, other=-1).to(tl.int64)
    child = _link(tl.load(tree.next_token + request * NODES, mask=live, other=-1).to(tl.int64), NODES)
    path_ptr = outcome.accept_index + request * PATH
    tl.store(path_ptr, last, mask=live)
    accepted = request * 0
    node = request * 0
    visits = NODES - 1
    uniform = tl.load(given.uniforms + request * NODES, mask=live, other=1.0)
    mass = uniform * 0.0
    active = _goes_on(live, child, accepted, PATH)
    while (visits > 0) & (tl.max(active.to(tl.int32), 0) > 0):
        token = tl.load(tree.candidates + request * NODES + child, mask=active, other=-1).to(tl.int64)
        known = active & (token >= 0) & (token < VOCAB)
        place = (request * NODES + node) * VOCAB + tl.where(known, token, 0)
        probability = tl.load(given.target_probs + place, mask=known, other=0.0)
        probability = tl.where(probability > 0, probability, 0.0)
        before = tl.load(given.draft_probs + place, mask=known, other=0.0)
        added = tl.where(before > 0, 0.0, probability)
        mass += added
        hit = known & ((uniform < tl.div_rn(mass, mass * 0 + threshold_acc)) | (added >= threshold_single))
        tl.store(given.draft_probs + place, probability, mask=known & (hit == 0) & ((before > 0) == 0))
        # A duplicate sibling reads this entry again, and a lane may be held by more than one thread.
        tl.debug_barrier()
        inside = hit & (last >= 0) & (last < flat_nodes)
        tl.store(outcome.predicts + last, token, mask=inside)
        visited = request * NODES + child
        last = tl.where(hit, tl.load(tree.retrive_index + visited, mask=hit, other=-1).to(tl.int64), last)
        tl.store(path_ptr + accepted + 1, last, mask=hit)
        accepted += hit.to(tl.int64)
        node = tl.where(hit, child, node)
        uniform = tl.where(hit, tl.load(given.uniforms + visited, mask=hit, other=1.0), uniform)
        mass = tl.where(hit, 0.0, mass)
        down = tl.load(tree.next_token + visited, mask=hit, other=-1).to(tl.int64)
        along = tl.load(tree.next_sibling + visited, mask=active & (hit == 0), other=-1).to(tl.int64)
        child = tl.where(active, _link(tl.where(hit, down, along), NODES), child)
        active = _goes_on(live, child, accepted, PATH)
        visits -= 1
    tl.store(end.node + request, node.to(tl.int32), mask=live)
    tl.store(end.last + request, last, mask=live)
    tl.store(outcome.accept_token_num + request, accepted, mask=live)


@triton.jit
def _residual(given, row, token, full, VOCAB: tl.constexpr):
    """Target and what is left of it without the rejected tokens (all of it after a full path)."""
    inside = token < VOCAB
    target = tl.load(given.target_probs + row * VOCAB + token, mask=inside, other=0.0)
    target = tl.where(target > 0, target, 0.0)
    rejected = tl.load(given.draft_probs + row * VOCAB + token, mask=inside & (full == 0), other=0.0)
    rejected = tl.where(rejected > 0, rejected, 0.0)
    return target, tl.maximum(target - rejected, 0.0)


@triton.jit
def _residual_tiles_kernel(
    given,  # Sampling
    end,  # End, whose tiles are written
    accept_num_ptr,  # [B] int
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = request * NODES + tl.load(end.node + request)
    full = tl.load(accept_num_ptr + request) == PATH - 1
    token = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    target, residual = _residual(given, row, token, full, VOCAB)
    top = tl.max(target, 0)
    place = request * TILES + tile
    tl.store(end.mass + place, tl.sum(residual, 0))
    tl.store(end.top + place, top)
    tl.store(end.arg + place, tl.min(tl.where((target == top) & (token < VOCAB), token, VOCAB), 0))


@triton.jit
def _first_beyond(running, weight, goal, index, END: tl.constexpr):
    """First index of positive weight whose sum exceeds the goal, else the last such index, else -1."""
    first = tl.min(tl.where((running > goal) & (weight > 0), index, END), 0)
    last = tl.max(tl.where(weight > 0, index, -1), 0)
    return tl.where(first < END, first, last)


@triton.jit(do_not_specialize=["flat_nodes"])
def _final_token_kernel(
    outcome,  # Outcome, whose last predictions are written
    given,  # Sampling
    end,  # End
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
    mass = tl.load(end.mass + place, mask=tile < TILES, other=0.0)
    running = tl.cumsum(mass, 0)
    goal = tl.load(given.final_uniforms + request) * tl.max(running, 0)
    winner = tl.maximum(_first_beyond(running, mass, goal, tile, BLOCK_T), 0)
    before = tl.max(tl.where(tile < winner, running, 0.0), 0)

    row = request * NODES + tl.load(end.node + request)
    full = tl.load(outcome.accept_token_num + request) == PATH - 1
    token = winner * BLOCK_V + tl.arange(0, BLOCK_V)
    _, residual = _residual(given, row, token, full, VOCAB)
    sampled = _first_beyond(tl.cumsum(residual, 0), residual, goal - before, token, VOCAB)

    tops = tl.load(end.top + place, mask=tile < TILES, other=-1.0)
    args = tl.load(end.arg + place, mask=tile < TILES, other=VOCAB)
    largest = tl.min(tl.where(tops == tl.max(tops, 0), args, VOCAB), 0)
    sampled = tl.where(sampled >= 0, sampled, largest)
    last = tl.load(end.last + request)
    tl.store(outcome.predicts + last, sampled, mask=(last >= 0) & (last < flat_nodes))


def verify_tree_greedy(outcome: Outcome, tree: Tree, target_predict: Tensor) -> None:
    batch, nodes = tree.candidates.shape
    block = min(triton.next_power_of_2(max(batch, 1)), CONFIGS[current_chip(tree.candidates)].greedy_requests)
    launch(
        _verify_greedy_kernel, (triton.cdiv(batch, block),), outcome, tree, target_predict, batch,
        outcome.predicts.shape[0], num_warps=1, NODES=nodes, PATH=outcome.accept_index.shape[1], BLOCK=block,
        BLOCK_N=lanes(nodes),
    )  # fmt: skip


def tree_speculative_sampling_target_only(
    outcome: Outcome, tree: Tree, given: Sampling, threshold_single: float, threshold_acc: float
) -> None:
    uniforms, (batch, nodes, vocab) = given.uniforms, given.target_probs.shape
    config, room = CONFIGS[current_chip(uniforms)], outcome.predicts.shape[0]
    block, block_v = lanes(batch, config.walk_requests), lanes(vocab, config.max_tile)
    tiles = triton.cdiv(vocab, block_v)
    end = End(
        uniforms.new_empty(batch, dtype=torch.int32), uniforms.new_empty(batch, dtype=torch.int64),
        uniforms.new_empty(batch, tiles), uniforms.new_empty(batch, tiles),
        uniforms.new_empty(batch, tiles, dtype=torch.int32),
    )  # fmt: skip
    sizes = dict(NODES=nodes, PATH=outcome.accept_index.shape[1], VOCAB=vocab)
    launch(
        _sample_walk_kernel, (triton.cdiv(batch, block),), outcome, tree, given, end, batch, room,
        float(threshold_single), float(threshold_acc), num_warps=1, BLOCK=block, **sizes,
    )  # fmt: skip
    sizes |= dict(TILES=tiles, BLOCK_V=block_v, num_warps=config.num_warps)
    launch(_residual_tiles_kernel, (batch, tiles), given, end, outcome.accept_token_num, **sizes)
    launch(_final_token_kernel, (batch,), outcome, given, end, room, BLOCK_T=lanes(tiles), **sizes)
