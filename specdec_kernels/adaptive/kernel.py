"""Choice of a size in two launches: one program a row counts steps, then one program learns and chooses.

Ranks are counted by comparing every node with every other one, which needs no sort.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.adaptive.configs import COMPARED, ROWS
from specdec_kernels.adaptive.types import (
    EVIDENCE,
    KEEP_STILL,
    LEAST_HALF_LIFE,
    ROW_HALF_LIFE,
    TRIAL_HALF_LIFE,
    SizeState,
)
from specdec_kernels.launch import current_chip, lanes, launch

_LEAST_HALF_LIFE = tl.constexpr(LEAST_HALF_LIFE)
_ROW_HALF_LIFE = tl.constexpr(ROW_HALF_LIFE)
_TRIAL_HALF_LIFE = tl.constexpr(TRIAL_HALF_LIFE)
_KEEP_STILL = tl.constexpr(KEEP_STILL)
_COLUMNS = tl.constexpr(len(EVIDENCE))


@triton.jit
def _ranks(confidence_ptr, row, node, score, NODES: tl.constexpr, BLOCK_N: tl.constexpr, COMPARED: tl.constexpr):
    """[BLOCK_N] int32: how many nodes stand before each one by falling confidence."""
    rank = tl.zeros((BLOCK_N,), tl.int32)
    for start in range(0, NODES, COMPARED):
        other = start + tl.arange(0, COMPARED)
        theirs = tl.load(confidence_ptr + row + other, mask=other < NODES, other=-1.0)
        equal = (theirs[None, :] == score[:, None]) & (other[None, :] < node[:, None])
        ahead = ((theirs[None, :] > score[:, None]) | equal) & (other < NODES)[None, :]
        rank += tl.sum(ahead.to(tl.int32), 1)
    return rank


@triton.jit(do_not_specialize=["size"])
def _steps_kernel(
    sizes_ptr,  # [SIZES] int32
    confidence_ptr,  # [B, NODES] float32 or None
    nodes_ptr,  # [B, PATH] int32
    num_accepted_ptr,  # [B] int32
    active_ptr,  # [B] int32
    steps_ptr,  # [B, SIZES] float32, out: steps of each size for the tokens of this one, 0 in padding rows
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
    on_path = (tl.sum((path[None, :] == node[:, None]).to(tl.int32), 1) > 0) & (node < NODES)
    live = tl.load(active_ptr + request) > 0
    index = tl.arange(0, BLOCK_S)
    bound = tl.load(sizes_ptr + index, mask=index < SIZES, other=0)
    within = on_path[:, None] & (rank[:, None] < bound[None, :])
    tokens = 1.0 + tl.sum(within.to(tl.float32), 0)
    written = tl.sum(tl.where(index == size, tokens, 0.0), 0)
    steps = tl.where(live & (index <= size), written / tokens, 0.0)
    tl.store(steps_ptr + request * SIZES + index, steps, mask=index < SIZES)


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
        last = tl.load(choice_ptr)
        keep = _kept(rows, last)
        lane = tl.arange(0, BLOCK_S)
        tokens = 1.0
        best_rate = 1.0 / tl.load(step_ms_ptr)
        best = 0
        last_rate = best_rate
        drafting_rate = -1.0
        drafting = 0
        for index in range(1, SIZES):
            row = evidence_ptr + (index - 1) * _COLUMNS
            smaller = tl.load(row)
            own = tl.load(row + 1)
            if index <= size:
                smaller = keep * smaller + tl.sum(tl.where(lane == index - 1, steps, 0.0), 0)
                own = keep * own + tl.sum(tl.where(lane == index, steps, 0.0), 0)
                tl.store(row, smaller)
                tl.store(row + 1, own)
            tokens = tl.minimum(tokens * smaller / own, tl.load(sizes_ptr + index).to(tl.float32))
            rate = tokens / tl.load(step_ms_ptr + index)
            last_rate = tl.where(last == index, rate, last_rate)
            best = tl.where(rate > best_rate, index, best)
            best_rate = tl.maximum(rate, best_rate)
            drafting = tl.where(rate > drafting_rate, index, drafting)
            drafting_rate = tl.maximum(rate, drafting_rate)
        stays = (last >= 0) & (best_rate < last_rate * _KEEP_STILL)
        tl.store(choice_ptr, tl.where(stays, last, best))
        tl.store(choice_ptr + 1, drafting)


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
    steps = torch.empty(batch, count, dtype=torch.float32, device=nodes.device)
    launch(
        _steps_kernel,
        (batch,),
        *(state.sizes, confidence, nodes, num_accepted, active, steps, size),
        NODES=num_nodes,
        PATH=path,
        SIZES=count,
        BLOCK_N=lanes(num_nodes),
        BLOCK_P=lanes(path),
        BLOCK_S=lanes(count),
        COMPARED=min(COMPARED[chip], lanes(num_nodes)),
    )
    launch(
        _choose_kernel,
        (1,),
        *(state.sizes, state.evidence, state.choice, steps, active, step_ms, batch, size),
        num_warps=1,
        SIZES=count,
        BLOCK_S=lanes(count),
        ROWS=min(ROWS[chip], lanes(batch)),
    )
