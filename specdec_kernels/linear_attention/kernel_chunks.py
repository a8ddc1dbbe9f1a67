"""Whole chunks of prompts as Triton kernels, after the WY form of Gated DeltaNet (arXiv 2412.06464, section 3.3).

A row sees all rows of its chunk up to itself. With G, M and T of `device`, the first kernel makes of each chunk, all at
once, M and

    W = T diag(beta exp(G)) K,   U = T diag(beta) V

and the second takes the state S through the chunks of a segment:

    D = U - W S,   O = diag(exp(G)) Q S + M D,   S = exp(G_last) S + (diag(exp(G_last - G)) K)^T D
"""

# mypy: ignore-errors
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.linear_attention.configs import CONFIGS
from specdec_kernels.linear_attention.device import LEAST_LANES, log_decay, matrices, static_of
from specdec_kernels.linear_attention.kernel import keep_inputs
from specdec_kernels.linear_attention.types import CHUNK, Chunks, DeltaInputs, DeltaState, Paths


class Solved(NamedTuple):
    """What the first kernel makes of the rows."""

    log: Any  # [R, HV] float32: G
    keys: Any  # [R, HV, DK] float32: W
    vals: Any  # [R, HV, DV] float32: U; not `values`, which is an attribute of every tuple in Triton
    shares: Any  # [R, HV, SIZE] float32: M


@triton.jit
def _chunk_kernel(
    inputs,  # DeltaInputs
    whole_ptr,  # [R / SIZE] int32
    solved,  # Solved, written
    S: tl.constexpr,  # Static
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(whole_ptr + chunk) == 0:
        return
    i, part = tl.arange(0, S.SIZE), tl.arange(0, S.PART)
    row = chunk * S.SIZE + i
    of_row = inputs.mixed + row[:, None] * S.C
    query = head // (S.HV // S.H) * S.DK
    log = log_decay(tl.load(inputs.decay + row * S.HV + head))
    beta = tl.load(inputs.beta + row * S.HV + head)
    total = tl.cumsum(log, 0)
    sees = i[:, None] >= i[None, :]
    seen, inverse = matrices(of_row, query, i >= 0, sees, log, beta, S)
    tl.store(solved.shares + (row[:, None] * S.HV + head) * S.SIZE + i[None, :], seen)
    tl.store(solved.log + row * S.HV + head, total)
    for first in tl.range(0, S.DK, S.PART):
        key = first + part
        k = tl.load(of_row + (S.H * S.DK + query + key)[None, :], mask=(key < S.DK)[None, :], other=0.0)
        w = tl.dot(inverse, (beta * tl.exp(total))[:, None] * k, input_precision=S.PRECISION)
        tl.store(solved.keys + (row[:, None] * S.HV + head) * S.DK + key[None, :], w, mask=(key < S.DK)[None, :])
    for first in tl.range(0, S.DV, S.PART):
        value = first + part
        of_value = of_row + (2 * S.H * S.DK + head * S.DV + value)[None, :]
        v = tl.load(of_value, mask=(value < S.DV)[None, :], other=0.0)
        u = tl.dot(inverse, beta[:, None] * v, input_precision=S.PRECISION)
        tl.store(solved.vals + (row[:, None] * S.HV + head) * S.DV + value[None, :], u, mask=(value < S.DV)[None, :])


@triton.jit
def _scan_kernel(
    mixed_ptr,  # [R, C] float32
    solved,  # Solved
    ssm_ptr,  # [slots, HV, DK, DV] float32, written where segments end
    chunks,  # Chunks
    out_ptr,  # [R, HV, DV]
    BLOCK_V: tl.constexpr,
    S: tl.constexpr,  # Static
):
    DK: tl.constexpr = S.DK
    PART: tl.constexpr = S.PART
    segment = tl.program_id(0)
    tiles = tl.cdiv(S.DV, BLOCK_V)
    head, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    count = tl.load(chunks.counts + segment)
    if count == 0:
        return
    first = tl.load(chunks.first + segment).to(tl.int64)
    start, end = tl.load(chunks.starts + segment), tl.load(chunks.ends + segment)
    i, part = tl.arange(0, S.SIZE), tl.arange(0, PART)
    value = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    in_tile = (value < S.DV)[None, :]
    of_head = ssm_ptr + head * (DK * S.DV) + value[None, :]
    query = head // (S.HV // S.H) * DK
    # The state by parts of the keys: each product needs one of them and a part of the rows' keys.
    state = ()
    for at in tl.static_range(0, DK, PART):
        key = at + part
        inside = (key < DK)[:, None] & in_tile & (start >= 0)
        state = state + (tl.load(of_head + start * (S.HV * DK * S.DV) + key[:, None] * S.DV, mask=inside, other=0.0),)
    for chunk in tl.range(0, count):
        row = (first + chunk) * S.SIZE + i
        of_value = (row * S.HV + head)[:, None] * S.DV + value[None, :]
        of_row = mixed_ptr + row[:, None] * S.C + query
        total = tl.load(solved.log + row * S.HV + head)
        difference = tl.load(solved.vals + of_value, mask=in_tile, other=0.0)
        o = tl.full([S.SIZE, BLOCK_V], 0.0, tl.float32)
        for at in tl.static_range(0, DK, PART):
            key = at + part
            w = tl.load(
                solved.keys + (row * S.HV + head)[:, None] * DK + key[None, :], mask=(key < DK)[None, :], other=0.0
            )
            difference -= tl.dot(w, state[at // PART], input_precision=S.PRECISION)
            q = tl.load(of_row + key[None, :], mask=(key < DK)[None, :], other=0.0)
            o += tl.dot(q, state[at // PART], input_precision=S.PRECISION)
        seen = tl.load(solved.shares + (row * S.HV + head)[:, None] * S.SIZE + i[None, :])
        o = tl.exp(total)[:, None] * o + tl.dot(seen, difference, input_precision=S.PRECISION)
        tl.store(out_ptr + of_value, o, mask=in_tile)
        last = tl.sum(tl.where(i == S.SIZE - 1, total, 0.0), 0)
        after = ()
        for at in tl.static_range(0, DK, PART):
            key = at + part
            k = tl.load(of_row + (S.H * DK + key)[None, :], mask=(key < DK)[None, :], other=0.0)
            k *= tl.exp(last - total)[:, None]
            added = tl.dot(tl.trans(k), difference, input_precision=S.PRECISION)
            after = after + (tl.exp(last) * state[at // PART] + added,)
        state = after
    for at in tl.static_range(0, DK, PART):
        key = at + part
        inside = (key < DK)[:, None] & in_tile
        tl.store(of_head + end * (S.HV * DK * S.DV) + key[:, None] * S.DV, state[at // PART], mask=inside)


def delta_rule_chunks(inputs: DeltaInputs, chunks: Chunks, state: DeltaState) -> Tensor:
    mixed, (heads, dk, dv), rows = inputs.mixed, state.ssm.shape[1:], len(inputs.raw)
    config = CONFIGS[current_chip(inputs.raw)]
    out = inputs.raw.new_zeros((rows, heads, dv))
    solved = Solved(
        torch.empty_like(inputs.decay), *(mixed.new_empty((rows, heads, width)) for width in (dk, dv, CHUNK))
    )
    precision = "ieee" if inputs.raw.dtype == torch.float32 else config.precision
    static = static_of(state, SIZE=CHUNK, PART=config.chunk_part, PRECISION=precision)
    launch(
        _chunk_kernel,
        (len(chunks.whole), heads),
        *(inputs, chunks.whole, solved),
        num_warps=config.chunk_warps,
        S=static,
    )
    block = max(LEAST_LANES, min(config.chunk_values, lanes(dv)))
    launch(
        _scan_kernel,
        (len(chunks.first), heads * triton.cdiv(dv, block)),
        *(mixed, solved, state.ssm, chunks, out),
        num_stages=1,
        BLOCK_V=block,
        S=static._replace(PART=config.part),
    )
    order = torch.arange(rows, dtype=torch.int32, device=mixed.device)
    ends = torch.where(chunks.counts > 0, chunks.ends, -1)
    paths = Paths(order, chunks.first * CHUNK, chunks.counts * CHUNK, chunks.starts, ends)
    one = DeltaState(*(each[None] for each in state))
    keep_inputs(inputs.raw[None], paths, one)
    return out
