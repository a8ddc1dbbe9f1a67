"""Choice of a size in two launches: one program a row counts steps, then one program learns and chooses. Of few rows,
one program does both.

Ranks are counted by comparing every node with every other one, which needs no sort.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.adaptive.configs import COMPARED, FEW_ROWS, ROWS
from specdec_kernels.adaptive.types import (
    CHAIN_WHOLE,
    EVIDENCE,
    KEEP_SMALLER,
    KEEP_STILL,
    LEAST_EVIDENCE,
    LEAST_GAIN,
    LEAST_HALF_LIFE,
    ROW_HALF_LIFE,
    TREE_EXTRA,
    TRIAL_HALF_LIFE,
    SizeState,
)
from specdec_kernels.launch import current_chip, lanes, launch

_LEAST_EVIDENCE = tl.constexpr(LEAST_EVIDENCE)
_LEAST_GAIN = tl.constexpr(LEAST_GAIN)
_LEAST_HALF_LIFE = tl.constexpr(LEAST_HALF_LIFE)
_ROW_HALF_LIFE = tl.constexpr(ROW_HALF_LIFE)
_TRIAL_HALF_LIFE = tl.constexpr(TRIAL_HALF_LIFE)
_CHAIN_WHOLE = tl.constexpr(CHAIN_WHOLE)
_TREE_EXTRA = tl.constexpr(TREE_EXTRA)
_KEEP_STILL = tl.constexpr(KEEP_STILL)
_KEEP_SMALLER = tl.constexpr(KEEP_SMALLER)
_COLUMNS = tl.constexpr(len(EVIDENCE))


@triton.jit
def _ranks(confidence_ptr, row, node, score, NODES: tl.constexpr, BLOCK_N: tl.constexpr, COMPARED: tl.constexpr):
    """[BLOCK_N] int32: how many nodes stand before each one by falling confidence."""
    rank = tl.zeros((BLOCK_N,), tl.int32)
    for start in range(0, NODES, COMPARED):
        other = start + tl.arange(0, COMPARED)
        theirs = tl.load(confidence_ptr + row + other, mask=other < NODES, other=-1.0)
        equal = (theirs[None, :] == score[:, None]) & (other[None, :] < node[:, None])
        rank += tl.sum(((theirs[None, :] > score[:, None]) | equal).to(tl.int32), 1)
    return rank


@triton.jit
def _steps_of_row(
    sizes_ptr,  # [SIZES] int32
    confidence_ptr,  # [B, NODES] float32 or None
    nodes_ptr,  # [B, PATH] int32
    num_accepted_ptr,  # [B] int32
    request,
    size,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    SIZES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """[BLOCK_S] float32: steps of each size for the tokens of one row, 0 for sizes above that of the step."""
    node = tl.arange(0, BLOCK_N)
    row = request * NODES
    rank = node
    if confidence_ptr is not None:
        score = tl.load(confidence_ptr + row + node, mask=node < NODES, other=0.0)
        rank = _ranks(confidence_ptr, row, node, score, NODES, BLOCK_N, COMPARED)
    place = tl.arange(0, BLOCK_P)
    count = tl.load(num_accepted_ptr + request)
    draft = (place > 0) & (place <= count) & (place < PATH)
    path = tl.load(nodes_ptr + request * PATH + place, mask=draft, other=-1)
    on_path = tl.sum((path[None, :] == node[:, None]).to(tl.int32), 1) > 0
    index = tl.arange(0, BLOCK_S)
    bound = tl.load(sizes_ptr + index, mask=index < SIZES, other=0)
    within = on_path[:, None] & (rank[:, None] < bound[None, :])
    tokens = 1 + tl.sum(within.to(tl.int32), 0)
    written = tl.sum(tl.where(index == size, tokens, 0), 0)
    steps = written.to(tl.float32) / tokens.to(tl.float32)
    if confidence_ptr is None:
        whole = ((written + tokens - 1) // tokens).to(tl.float32)
        steps += _CHAIN_WHOLE * (whole - steps)
    else:
        steps = tl.where(index > 0, 1.0 + _TREE_EXTRA * (steps - 1.0), steps)
    return tl.where(index <= size, steps, 0.0)


@triton.jit(do_not_specialize=["size"])
def _steps_kernel(
    sizes_ptr,  # [SIZES] int32
    confidence_ptr,  # [B, NODES] float32 or None
    nodes_ptr,  # [B, PATH] int32
    num_accepted_ptr,  # [B] int32
    active_ptr,  # [B] int32
    steps_ptr,  # [B, SIZES] float32, out: see _steps_of_row; 0 in padding rows
    size,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    SIZES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    COMPARED: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    steps = _steps_of_row(
        *(sizes_ptr, confidence_ptr, nodes_ptr, num_accepted_ptr, request, size),
        *(NODES, PATH, SIZES, BLOCK_N, BLOCK_P, BLOCK_S, COMPARED),
    )
    index = tl.arange(0, BLOCK_S)
    live = tl.load(active_ptr + request) > 0
    tl.store(steps_ptr + request * SIZES + index, tl.where(live, steps, 0.0), mask=index < SIZES)


@triton.jit
def _sum_over_rows(steps_ptr, active_ptr, batch, SIZES: tl.constexpr, BLOCK_S: tl.constexpr, ROWS: tl.constexpr):
    """[BLOCK_S] float32: steps of each size; and the number of active rows."""
    index = tl.arange(0, BLOCK_S)
    steps = tl.zeros((BLOCK_S,), tl.float32)
    rows = 0.0
    for start in range(0, batch, ROWS):
        request = start + tl.arange(0, ROWS)
        inside = (request < batch)[:, None] & (index < SIZES)[None, :]
        place = steps_ptr + request.to(tl.int64)[:, None] * SIZES + index[None, :]
        steps += tl.sum(tl.load(place, mask=inside, other=0.0), 0)
        live = tl.load(active_ptr + request, mask=request < batch, other=0) > 0
        rows += tl.sum(live.to(tl.float32), 0)
    return steps, rows


@triton.jit
def _kept(rows, last):
    """What a step of so many rows leaves of the evidence of those before."""
    per_row = 1.0 / rows
    half_life = per_row * _ROW_HALF_LIFE + _LEAST_HALF_LIFE
    half_life = tl.where(last == 0, tl.minimum(half_life, per_row * _TRIAL_HALF_LIFE), half_life)
    return tl.exp2(-1.0 / half_life)


@triton.jit
def _choose(
    sizes_ptr,  # [SIZES] int32
    evidence_ptr,  # [SIZES - 1, 2] float32, read and written
    choice_ptr,  # [2] int32, read and written
    step_ms_ptr,  # [SIZES] float32
    steps,  # [BLOCK_S] float32
    rows,
    size,
    SIZES: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Learn from the `steps` of each size for the tokens of so many active `rows`, and choose."""
    index = tl.arange(0, BLOCK_S)
    inside = index < SIZES
    last = tl.load(choice_ptr)
    keep = _kept(rows, last)
    pair = evidence_ptr + (index - 1) * _COLUMNS
    smaller = tl.load(pair, mask=inside & (index > 0), other=1.0)
    own = tl.load(pair + 1, mask=inside & (index > 0), other=1.0)
    of_smaller = tl.sum(tl.where(index[None, :] == index[:, None] - 1, steps[None, :], 0.0), 1)
    gained = tl.sum(tl.where(index == size, smaller / own - 1.0, 0.0), 0)
    updated = (index > 0) & (index <= size)
    fades = updated | (keep * own > _LEAST_EVIDENCE)
    left = tl.where(fades, keep, 1.0)
    smaller = left * smaller + tl.where(updated, of_smaller, 0.0)
    own = left * own + tl.where(updated, steps, 0.0)
    gain = tl.sum(tl.where(index == size, smaller / own - 1.0, 0.0), 0)
    growth = (gain + _LEAST_GAIN) / (gained + _LEAST_GAIN)
    grows = (index > size) & (last != 0)
    smaller = tl.where(grows, own + (smaller - own) * growth, smaller)
    tl.store(pair, smaller, mask=inside & (index > 0))
    tl.store(pair + 1, own, mask=inside & (index > 0))
    most = tl.load(sizes_ptr + index, mask=inside, other=1).to(tl.float32)
    tokens = tl.minimum(tl.cumprod(smaller / own, 0), most)
    rate = tl.where(inside, tokens / tl.load(step_ms_ptr + index, mask=inside, other=1.0), -1.0)
    best = tl.argmax(rate, 0)
    last_rate = tl.sum(tl.where(index == last, rate, 0.0), 0)  # 0 where nothing was chosen before
    stays = tl.max(rate, 0) < last_rate * tl.where(best > last, _KEEP_SMALLER, _KEEP_STILL)
    tl.store(choice_ptr, tl.where(stays, last, best))
    tl.store(choice_ptr + 1, tl.argmax(tl.where(index > 0, rate, -1.0), 0))


@triton.jit(do_not_specialize=["batch", "size"])
def _choose_kernel(
    sizes_ptr,  # [SIZES] int32
    evidence_ptr,  # [SIZES - 1, 2] float32, read and written
    choice_ptr,  # [2] int32, read and written
    steps_ptr,  # [B, SIZES] float32
    active_ptr,  # [B] int32
    step_ms_ptr,  # [SIZES] float32
    batch,
    size,
    SIZES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr,
):
    steps, rows = _sum_over_rows(steps_ptr, active_ptr, batch, SIZES, BLOCK_S, ROWS)
    if rows > 0:
        _choose(sizes_ptr, evidence_ptr, choice_ptr, step_ms_ptr, steps, rows, size, SIZES, BLOCK_S)


@triton.jit(do_not_specialize=["batch", "size"])
def _count_and_choose_kernel(
    sizes_ptr,  # [SIZES] int32
    evidence_ptr,  # [SIZES - 1, 2] float32, read and written
    choice_ptr,  # [2] int32, read and written
    confidence_ptr,  # [B, NODES] float32 or None
    nodes_ptr,  # [B, PATH] int32
    num_accepted_ptr,  # [B] int32
    active_ptr,  # [B] int32
    step_ms_ptr,  # [SIZES] float32
    batch,
    size,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    SIZES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    COMPARED: tl.constexpr,
):
    steps = tl.zeros((BLOCK_S,), tl.float32)
    rows = 0.0
    for request in range(batch):
        if tl.load(active_ptr + request) > 0:
            rows += 1.0
            steps += _steps_of_row(
                *(sizes_ptr, confidence_ptr, nodes_ptr, num_accepted_ptr, request, size),
                *(NODES, PATH, SIZES, BLOCK_N, BLOCK_P, BLOCK_S, COMPARED),
            )
    if rows > 0:
        _choose(sizes_ptr, evidence_ptr, choice_ptr, step_ms_ptr, steps, rows, size, SIZES, BLOCK_S)


def choose_size(
    state: SizeState,
    confidence: torch.Tensor | None,
    nodes: torch.Tensor,
    num_accepted: torch.Tensor,
    active: torch.Tensor,
    step_ms: torch.Tensor,
    size: int,
    num_nodes: int,
) -> None:
    """See `specdec_kernels.choose_size`, which has checked the arguments."""
    (batch, path), count, chip = nodes.shape, len(state.sizes), current_chip(nodes)
    if batch == 0:
        return
    counting = dict(
        NODES=num_nodes,
        PATH=path,
        SIZES=count,
        BLOCK_N=lanes(num_nodes),
        BLOCK_P=lanes(path),
        BLOCK_S=lanes(count),
        COMPARED=min(COMPARED[chip], lanes(num_nodes)),
    )
    step = (confidence, nodes, num_accepted, active)
    if batch <= FEW_ROWS:
        chosen = (state.sizes, state.evidence, state.choice, *step, step_ms, batch, size)
        launch(_count_and_choose_kernel, (1,), *chosen, num_warps=1 if num_nodes <= 32 else 4, **counting)
        return
    steps = torch.empty((batch, count), dtype=torch.float32, device=nodes.device)
    launch(_steps_kernel, (batch,), state.sizes, *step, steps, size, **counting)
    launch(
        _choose_kernel,
        (1,),
        *(state.sizes, state.evidence, state.choice, steps, active, step_ms, batch, size),
        num_warps=1,
        SIZES=count,
        BLOCK_S=lanes(count),
        ROWS=min(ROWS[chip], lanes(batch)),
    )
