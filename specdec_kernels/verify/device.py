# mypy: ignore-errors
"""What the acceptance kernels share: entries of rows in registers, probabilities of tokens, and the outcome."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.sampling import device as d
from specdec_kernels.sampling.types import ACCEPT_STREAM
from specdec_kernels.verify.types import CLASS_EDGES, Accepted

_ACCEPT = tl.constexpr(ACCEPT_STREAM)
_EDGES = tl.constexpr(CLASS_EDGES)
CLASSES = len(CLASS_EDGES) + 1
_CLASSES = tl.constexpr(CLASSES)


@triton.jit
def entry(values, lane, index):
    """values[b, index[b]] of int32 values [B, N] with lanes [1, N]. Within a warp a sum of 32-bit integers is one
    instruction, and a load that depends on another load takes ten times as long."""
    return tl.sum(tl.where(lane == index[:, None], values, 0), 1)


@triton.jit
def wide_entry(values, lane, index):
    """`entry` of int64 values, by halves."""
    low = entry(values.to(tl.int32), lane, index)
    high = entry((values >> 32).to(tl.int32), lane, index)
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def target_terms(distribution_ptr, temperature, row, rows, asks):
    """Top, floor, total and scale of the rows that ask, see `target_prob`; all shaped as `row`."""
    top = tl.load(distribution_ptr + row, mask=asks, other=0.0)
    floor = tl.load(distribution_ptr + rows + row, mask=asks, other=0.0)
    total = tl.load(distribution_ptr + 2 * rows + row, mask=asks, other=1.0)
    # A row without a usable logit has weights and a total of 0.
    return top, floor, tl.where(total > 0, total, 1.0), d.exponent_scale(temperature)


@triton.jit
def target_prob(values_ptr, top, floor, total, scale, row, column, row_stride, live, PROBS: tl.constexpr):
    """p of `column` in `row`, which has these `target_terms`; 0 where not `live`. All broadcast against each other."""
    value = d.load_values(values_ptr, row, column, row_stride, live)
    return tl.where(value >= floor, d.weigh(value, top, scale, PROBS) / total, 0.0)


@triton.jit
def draft_row(draft_rows_ptr, request, node, live, NODES: tl.constexpr, DRAFT_ROWS: tl.constexpr):
    """Row of the draft's distributions that the children of `node` were drawn from; -1 where there are no draws."""
    of_node = node
    if draft_rows_ptr is not None:
        of_node = tl.load(draft_rows_ptr + request.to(tl.int64) * NODES + node, mask=live, other=-1)
    return tl.where(live & (of_node >= 0) & (of_node < DRAFT_ROWS), request * DRAFT_ROWS + of_node, -1)


@triton.jit
def draft_prob(draft_ptr, row, column, live, VOCAB: tl.constexpr):
    """q of `column` in `row` of the draft's distributions; NaN and negative entries are 0, and so is a row below 0."""
    prob = tl.load(draft_ptr + row.to(tl.int64) * VOCAB + column, mask=live & (row >= 0), other=0.0)
    return tl.where(prob > 0, prob, 0.0)


@triton.jit
def token_class(p, q):
    """Class of a token by p / q, see `CLASS_EDGES`."""
    found = (p >= _EDGES[0] * q).to(tl.int32)
    for edge in tl.static_range(1, _CLASSES - 1):
        found += (p >= _EDGES[edge] * q).to(tl.int32)
    return found


@triton.jit
def skewed_prob(factors_ptr, row, p, q, live):
    """q, or of `greedy_paths` the probability that a token is drawn and kept; `row` and `p` broadcast. Nodes without
    draws have no factors."""
    if factors_ptr is not None:
        q *= tl.load(factors_ptr + row.to(tl.int64) * _CLASSES + token_class(p, q), mask=live & (q > 0), other=1.0)
    return q


@triton.jit
def judging_uniforms(seeds_ptr, positions_ptr, uniforms_ptr, request, in_batch, node, NODES: tl.constexpr):
    """[B, BLOCK_N] float64: the uniforms that judge the nodes."""
    here = in_batch[:, None] & (node >= 1) & (node < NODES)
    if uniforms_ptr is not None:
        uniform = tl.load(uniforms_ptr + request[:, None] * (NODES + 1) + node - 1, mask=here, other=1.0)
    else:
        zero = tl.zeros(here.shape, tl.int64)
        seed = tl.load(seeds_ptr + request, mask=in_batch, other=0)
        root = tl.load(positions_ptr + request.to(tl.int64) * NODES, mask=in_batch, other=0)
        uniform = d.philox_uniform(seed[:, None] + zero, root[:, None] + zero, _ACCEPT, node - 1)
    return uniform


@triton.jit
def store_outcome(
    out_tokens_ptr, out_count_ptr, out_nodes_ptr, out_bonus_ptr, out_lengths_ptr, out_valid_ptr, length, request,
    in_batch, column, emitted, path, count, bonus, usable, DEPTH: tl.constexpr,
):  # fmt: skip
    """Store all fields of `Accepted` but the log-probabilities, for requests [B] and columns [1, BLOCK_D]."""
    out = request.to(tl.int64)[:, None] * (DEPTH + 1) + column
    in_out = in_batch[:, None] & (column <= DEPTH)
    tl.store(out_tokens_ptr + out, emitted, mask=in_out)
    tl.store(out_nodes_ptr + out, path, mask=in_out)
    tl.store(out_count_ptr + request, count, mask=in_batch)
    tl.store(out_bonus_ptr + request, bonus, mask=in_batch)
    tl.store(out_lengths_ptr + request, length + count + 1, mask=in_batch)
    tl.store(out_valid_ptr + request, usable, mask=in_batch)


def empty_outcome(batch: int, max_depth: int, device: torch.device, with_logprobs: bool) -> Accepted:
    """Unwritten outputs of acceptance."""

    def out(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    return Accepted(
        tokens=out(batch, max_depth + 1, dtype=torch.int64),
        num_accepted=out(batch, dtype=torch.int32),
        nodes=out(batch, max_depth + 1, dtype=torch.int32),
        bonus=out(batch, dtype=torch.int64),
        new_lengths=out(batch, dtype=torch.int64),
        valid=out(batch, dtype=torch.bool),
        logprobs=out(batch, max_depth + 1, dtype=torch.float32) if with_logprobs else None,
    )
