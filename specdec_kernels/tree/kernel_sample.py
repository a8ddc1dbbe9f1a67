# mypy: ignore-errors
"""Samples the children of nodes, one uniform a child, in two kernels that read the distributions once.

The first kernel sums the probabilities of each group of WIDTH neighbouring tokens. The second runs one program per
parent: the sums give the group that the uniform falls in, which is read again. Without replacement its sum is taken
again without the sampled tokens, so that no difference of two sums is ever formed.
"""

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling.types import DRAFT_STREAM
from specdec_kernels.tree.configs import CONFIGS
from specdec_kernels.tree.types import ChildSampling

_DRAFT = tl.constexpr(DRAFT_STREAM)


@triton.jit
def _probability(probs_ptr, row, column, live, VOCAB: tl.constexpr):
    """Entries of `row`; 0 where not `live`, NaN or negative."""
    prob = tl.load(probs_ptr + row.to(tl.int64) * VOCAB + column, mask=live & (column < VOCAB), other=0.0)
    return tl.where(prob > 0, prob, 0.0)


@triton.jit(do_not_specialize=["rows"])
def _group_masses_kernel(
    probs_ptr,  # [R, VOCAB] float32
    masses_ptr,  # [R, GROUPS] float32
    rows,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDTH: tl.constexpr,
):
    pair = tl.arange(0, BLOCK_R * BLOCK_S)
    row = tl.program_id(0) * BLOCK_R + pair // BLOCK_S
    group = tl.program_id(1) * BLOCK_S + pair % BLOCK_S
    live = (row < rows) & (group < GROUPS)
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mass = tl.sum(_probability(probs_ptr, row[:, None], column, live[:, None], VOCAB), 1)
    tl.store(masses_ptr + row.to(tl.int64) * GROUPS + group, mass, mask=live)


@triton.jit(do_not_specialize=["batch"])
def _sample_children_kernel(
    call,  # ChildSampling, whose tokens are written
    masses_ptr,  # [B * ROWS, GROUPS] float32
    batch,
    PARENTS: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    NODES: tl.constexpr,
    CHOICES: tl.constexpr,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    REPLACEMENT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    WIDTH: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    request = pair // PARENTS
    parent = pair - request * PARENTS
    in_pairs = request < batch
    row = request * ROWS + tl.load(call.rows + parent, mask=in_pairs, other=0)
    drawing = in_pairs & (tl.load(call.temperature + request, mask=in_pairs, other=0.0) > 0)
    in_group = tl.arange(0, WIDTH)[None, :]
    lane = tl.arange(0, BLOCK_K)[None, :]
    group_lane = tl.arange(0, BLOCK_G)[None, :]
    place = row.to(tl.int64)[:, None] * GROUPS + group_lane
    mass = tl.load(masses_ptr + place, mask=drawing[:, None] & (group_lane < GROUPS), other=0.0)
    chosen = tl.full((BLOCK_R, BLOCK_K), -1, tl.int32)
    for rank in range(COUNT):
        child = tl.load(call.children + parent * COUNT + rank, mask=in_pairs, other=-1)
        wanted = in_pairs & (child >= 0)
        uniform = d.keyed_uniform(call, request.to(tl.int64) * NODES + child, request, request, wanted, _DRAFT, child)
        group, within = d.find(mass, uniform)
        column = tl.maximum(group, 0)[:, None] * WIDTH + in_group
        weight = _probability(call.probs, row[:, None], column, (drawing & (group >= 0))[:, None], VOCAB)
        if not REPLACEMENT:
            for earlier in range(rank):
                gone = tl.sum(tl.where(lane == earlier, chosen, 0), 1)
                weight = tl.where(column == gone[:, None], 0.0, weight)
        found, _ = d.find(weight, within)
        token = tl.where(wanted & (found >= 0), tl.maximum(group, 0) * WIDTH + found, -1)
        if not REPLACEMENT:
            rest = tl.sum(tl.where(column == token[:, None], 0.0, weight), 1)
            mass = tl.where(wanted[:, None] & (group_lane == group[:, None]), rest[:, None], mass)
        chosen = tl.where(lane == rank, token[:, None], chosen)
        # Where nothing is left the first child's token is repeated: the rules pass over it.
        filled = tl.where(token >= 0, token, tl.maximum(tl.sum(tl.where(lane == 0, chosen, 0), 1), 0)).to(tl.int64)
        choice = row.to(tl.int64) * CHOICES + tl.minimum(rank, CHOICES - 1)
        greedy = tl.load(call.top_tokens + choice, mask=wanted & (drawing == 0), other=0)
        at = request.to(tl.int64) * NODES + child
        tl.store(call.tokens + at, tl.where(drawing, filled, greedy), mask=wanted)


def sample_children(call: ChildSampling, replacement: bool) -> None:
    (batch, num_rows, vocab), (parents, count) = call.probs.shape, call.children.shape
    config = CONFIGS[current_chip(call.probs)]
    width, groups, block_g = d.grouping(vocab, config.sample_width)
    masses = torch.empty(batch * num_rows, groups, dtype=torch.float32, device=call.probs.device)
    block_s = min(config.sample_groups, block_g)
    block_r = d.rows_per_program(batch * num_rows, config.max_requests, block_s * width)
    sizes = dict(VOCAB=vocab, GROUPS=groups, WIDTH=width)
    launch(
        _group_masses_kernel, (triton.cdiv(batch * num_rows, block_r), triton.cdiv(groups, block_s)), call.probs,
        masses, batch * num_rows, num_warps=config.topk_warps, BLOCK_R=block_r, BLOCK_S=block_s, **sizes,
    )  # fmt: skip
    block_r = d.rows_per_program(batch * parents, config.max_requests, block_g)
    launch(
        _sample_children_kernel, (triton.cdiv(batch * parents, block_r),), call, masses, batch,
        num_warps=config.sample_warps, PARENTS=parents, COUNT=count, ROWS=num_rows, NODES=call.tokens.shape[1],
        CHOICES=call.top_tokens.shape[2], REPLACEMENT=replacement, BLOCK_R=block_r, BLOCK_K=lanes(count),
        BLOCK_G=block_g, **sizes,
    )  # fmt: skip
