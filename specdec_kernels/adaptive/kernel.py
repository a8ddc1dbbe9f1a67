"""Choice of a size in two launches: one program a row sums its bands, then one program learns and chooses.

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
    LEAST_HALF_LIFE,
    NEARLY_EQUAL,
    PRIOR,
    ROW_HALF_LIFE,
    SLOWER,
    SizeState,
)
from specdec_kernels.launch import current_chip, lanes, launch

_LEAST_HALF_LIFE = tl.constexpr(LEAST_HALF_LIFE)
_ROW_HALF_LIFE = tl.constexpr(ROW_HALF_LIFE)
_SLOWER = tl.constexpr(SLOWER)
_PRIOR = tl.constexpr(PRIOR)
_NEARLY_EQUAL = tl.constexpr(NEARLY_EQUAL)
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


@triton.jit
def _bands_kernel(
    sizes_ptr,  # [BANDS + 1] int32
    confidence_ptr,  # [B, NODES] float32 or None
    nodes_ptr,  # [B, PATH] int32
    num_accepted_ptr,  # [B] int32
    active_ptr,  # [B] int32
    bands_ptr,  # [B, BANDS, 2] float32, out: expected and accepted drafts, 0 in padding rows
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    BANDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    COMPARED: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_N)
    row = request * NODES
    if confidence_ptr is not None:
        score = tl.load(confidence_ptr + row + node, mask=node < NODES, other=0.0)
        rank = _ranks(confidence_ptr, row, node, score, NODES, BLOCK_N, COMPARED)
    else:
        score = tl.zeros((BLOCK_N,), tl.float32)
        rank = node
    place = tl.arange(0, BLOCK_P)
    count = tl.load(num_accepted_ptr + request)
    draft = (place > 0) & (place <= count) & (place < PATH)
    path = tl.load(nodes_ptr + request * PATH + place, mask=draft, other=-1)
    on_path = tl.sum((path[None, :] == node[:, None]).to(tl.int32), 1) > 0
    live = tl.load(active_ptr + request) > 0
    for band in range(BANDS):
        low = tl.load(sizes_ptr + band)
        high = tl.load(sizes_ptr + band + 1)
        inside = (rank >= low) & (rank < high) & (node < NODES) & live
        out = bands_ptr + (request * BANDS + band) * 2
        tl.store(out, tl.sum(tl.where(inside, score, 0.0), 0))
        tl.store(out + 1, tl.sum((inside & on_path).to(tl.float32), 0))


@triton.jit
def _sum_over_rows(bands_ptr, active_ptr, batch, BANDS: tl.constexpr, BLOCK_S: tl.constexpr, ROWS: tl.constexpr):
    """[BLOCK_S] float32 each: expected and accepted drafts of each band; and the number of active rows."""
    band = tl.arange(0, BLOCK_S)
    expected = tl.zeros((BLOCK_S,), tl.float32)
    accepted = tl.zeros((BLOCK_S,), tl.float32)
    rows = 0.0
    for start in range(0, batch, ROWS):
        request = start + tl.arange(0, ROWS)
        inside = (request < batch)[:, None] & (band < BANDS)[None, :]
        place = bands_ptr + (request.to(tl.int64)[:, None] * BANDS + band[None, :]) * 2
        expected += tl.sum(tl.load(place, mask=inside, other=0.0), 0)
        accepted += tl.sum(tl.load(place + 1, mask=inside, other=0.0), 0)
        live = tl.load(active_ptr + request, mask=request < batch, other=0) > 0
        rows += tl.sum(live.to(tl.float32), 0)
    return expected, accepted, rows


@triton.jit
def _learn(evidence_ptr, e, a, a_before, rows, keep, keep_slowly, CONFIDENT: tl.constexpr):
    """Update the evidence of a drafted band; its gain."""
    signal = keep * tl.load(evidence_ptr) + (e if CONFIDENT else a)
    weight = keep * tl.load(evidence_ptr + 1) + rows
    accepted = keep_slowly * tl.load(evidence_ptr + 2) + a
    expected = keep_slowly * tl.load(evidence_ptr + 3) + e
    before = keep_slowly * tl.load(evidence_ptr + 4) + a_before
    gain = signal / weight
    if CONFIDENT:
        gain = gain * (accepted + _PRIOR) / (expected + _PRIOR)
    tl.store(evidence_ptr, signal)
    tl.store(evidence_ptr + 1, weight)
    tl.store(evidence_ptr + 2, accepted)
    tl.store(evidence_ptr + 3, expected)
    tl.store(evidence_ptr + 4, before)
    return gain


@triton.jit
def _or_larger(size, step_ms_ptr, BANDS: tl.constexpr, BLOCK_S: tl.constexpr):
    """The last index of nearly the same cost, where `size` drafts."""
    index = tl.arange(0, BLOCK_S) + 1
    times = tl.load(step_ms_ptr + index, mask=index <= BANDS, other=float("inf"))
    cheap = (times <= tl.load(step_ms_ptr + size) * _NEARLY_EQUAL) & (size > 0)
    return tl.maximum(size, tl.max(tl.where(cheap, index, 0), 0))


@triton.jit(do_not_specialize=["batch", "size"])
def _choose_kernel(
    sizes_ptr,  # [BANDS + 1] int32
    evidence_ptr,  # [BANDS, 5] float32, read and written
    choice_ptr,  # [2] int32, written
    bands_ptr,  # [B, BANDS, 2] float32
    active_ptr,  # [B] int32
    step_ms_ptr,  # [BANDS + 1] float32
    batch,
    size,
    CONFIDENT: tl.constexpr,
    BANDS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr,
):
    expected, accepted, rows = _sum_over_rows(bands_ptr, active_ptr, batch, BANDS, BLOCK_S, ROWS)
    if rows > 0:
        half_life = (1.0 / rows) * _ROW_HALF_LIFE + _LEAST_HALF_LIFE
        keep = tl.exp2(-1.0 / half_life)
        keep_slowly = tl.exp2(-1.0 / (half_life * _SLOWER))
        lane = tl.arange(0, BLOCK_S)
        best_rate = 1.0 / tl.load(step_ms_ptr)
        best = 0
        drafting_rate = -1.0
        drafting = 0
        tokens = 1.0
        before = 0.0
        a_before = 0.0
        for band in range(BANDS):
            row = evidence_ptr + band * _COLUMNS
            gain = before * (tl.load(row + 2) + _PRIOR) / (tl.load(row + 4) + _PRIOR)
            if band < size:
                e = tl.sum(tl.where(lane == band, expected, 0.0), 0)
                a = tl.sum(tl.where(lane == band, accepted, 0.0), 0)
                gain = _learn(row, e, a, a_before, rows, keep, keep_slowly, CONFIDENT)
                a_before = a
            width = tl.load(sizes_ptr + band + 1) - tl.load(sizes_ptr + band)
            gain = tl.minimum(gain, width.to(tl.float32))
            tokens += gain
            before = gain
            rate = tokens / tl.load(step_ms_ptr + band + 1)
            best = tl.where(rate > best_rate, band + 1, best)
            best_rate = tl.maximum(rate, best_rate)
            drafting = tl.where(rate > drafting_rate, band + 1, drafting)
            drafting_rate = tl.maximum(rate, drafting_rate)
        tl.store(choice_ptr, _or_larger(best, step_ms_ptr, BANDS, BLOCK_S))
        tl.store(choice_ptr + 1, _or_larger(drafting, step_ms_ptr, BANDS, BLOCK_S))


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
    (batch, path), count, chip = nodes.shape, len(state.evidence), current_chip(nodes)
    if batch == 0:
        return
    bands = torch.empty(batch, count, 2, dtype=torch.float32, device=nodes.device)
    launch(
        _bands_kernel,
        (batch,),
        *(state.sizes, confidence, nodes, num_accepted, active, bands),
        NODES=num_nodes,
        PATH=path,
        BANDS=count,
        BLOCK_N=lanes(num_nodes),
        BLOCK_P=lanes(path),
        COMPARED=min(COMPARED[chip], lanes(num_nodes)),
    )
    launch(
        _choose_kernel,
        (1,),
        *(state.sizes, state.evidence, state.choice, bands, active, step_ms, batch, size),
        num_warps=1,
        CONFIDENT=confidence is not None,
        BANDS=count,
        BLOCK_S=lanes(count),
        ROWS=min(ROWS[chip], lanes(batch)),
    )
