# mypy: ignore-errors
"""Parts that the verification kernels share: entries of rows in registers, probabilities of tokens, and the outcome."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.sampling import device as d
from specdec_kernels.sampling.types import ACCEPT_STREAM
from specdec_kernels.verify.types import CLASS_EDGES, Accepted

_ACCEPT = tl.constexpr(ACCEPT_STREAM)
_EDGES = tl.constexpr(CLASS_EDGES)
CLASSES = len(CLASS_EDGES) + 1
_CLASSES = tl.constexpr(CLASSES)


class Rows(NamedTuple):
    """The rows of the target and of the draft in memory."""

    target: Any  # [B * N, VOCAB], row stride row_stride; not `values`, which is an attribute of every tuple in Triton
    terms: Any  # [4, B * N] float32, see `sampling.kernel.Selected.distribution`
    argmax: Any  # [B * N] int64
    valid: Any  # [B * N] bool
    temperature: Any  # [B] float32
    draft: Any  # [B, DRAFT_ROWS, VOCAB] float32
    draft_rows: Any  # [B, N] int32, or None: node n has row n


class Distributions(NamedTuple):
    """The rows of the target and of the draft, as kernels read them."""

    of: Any  # Rows
    row_stride: Any
    rows: Any  # B * N
    factors: Any = None  # [B, N, CLASSES] float32: q' / q by class under `greedy_paths`
    words: Any = None  # [B, WORDS] int64, zeros: where the programs that share a row add; None for one program
    splits: Any = 1  # programs that share the passes over a row


class Terms(NamedTuple):
    """The numbers that turn a row's values into probabilities, see `target_prob`."""

    top: Any
    floor: Any
    total: Any
    scale: Any


@triton.jit
def entry(values, lane, index):
    """values[b, index[b]] of int32 values [B, N] with lanes [1, N]: one instruction of a warp, unlike a dependent
    load."""
    return tl.sum(tl.where(lane == index[:, None], values, 0), 1)


@triton.jit
def wide_entry(values, lane, index):
    """`entry` of int64 values, by halves."""
    low = entry(values.to(tl.int32), lane, index)
    high = entry((values >> 32).to(tl.int32), lane, index)
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def target_terms(source, temperature, row, asks):
    """`Terms` of the rows in `asks`, shaped as `row`."""
    top = tl.load(source.of.terms + row, mask=asks, other=0.0)
    floor = tl.load(source.of.terms + source.rows + row, mask=asks, other=0.0)
    total = tl.load(source.of.terms + 2 * source.rows + row, mask=asks, other=1.0)
    # A row without a usable logit has weights and a total of 0.
    return Terms(top, floor, tl.where(total > 0, total, 1.0), d.exponent_scale(temperature))


@triton.jit
def target_prob(source, terms, row, column, live, PROBS: tl.constexpr):
    """p of `column` in `row`, which has these `terms`; 0 where not `live`. All broadcast against each other."""
    value = d.load_values(source.of.target, row, column, source.row_stride, live)
    return tl.where(value >= terms.floor, d.weigh(value, terms.top, terms.scale, PROBS) / terms.total, 0.0)


@triton.jit
def draft_row(draft_rows_ptr, request, node, live, NODES: tl.constexpr, DRAFT_ROWS: tl.constexpr):
    """Row of the draft that the children of `node` were sampled from; -1 where none were sampled."""
    of_node = node
    if draft_rows_ptr is not None:
        of_node = tl.load(draft_rows_ptr + request.to(tl.int64) * NODES + node, mask=live, other=-1)
    return tl.where(live & (of_node >= 0) & (of_node < DRAFT_ROWS), request * DRAFT_ROWS + of_node, -1)


@triton.jit
def draft_prob(source, row, column, live, VOCAB: tl.constexpr):
    """q of `column` in `row` of the draft; NaN and negative entries are 0, and so is a row below 0."""
    prob = tl.load(source.of.draft + row.to(tl.int64) * VOCAB + column, mask=live & (row >= 0), other=0.0)
    return tl.where(prob > 0, prob, 0.0)


@triton.jit
def token_class(p, q):
    """Class of a token by p / q, see `CLASS_EDGES`."""
    found = (p >= _EDGES[0] * q).to(tl.int32)
    for edge in tl.static_range(1, _CLASSES - 1):
        found += (p >= _EDGES[edge] * q).to(tl.int32)
    return found


@triton.jit
def kept_prob(source, row, p, q, live):
    """q, or under `greedy_paths` the probability that a token is sampled and kept; `row` and `p` broadcast."""
    if source.factors is not None:
        kind = token_class(p, q)
        q *= tl.load(source.factors + row.to(tl.int64) * _CLASSES + kind, mask=live & (q > 0), other=1.0)
    return q


@triton.jit
def judging_uniforms(origin, request, in_batch, node, NODES: tl.constexpr):
    """[B, BLOCK_N] float64: the uniforms that judge the nodes."""
    here = in_batch[:, None] & (node >= 1) & (node < NODES)
    if origin.uniforms is not None:
        uniform = tl.load(origin.uniforms + request[:, None] * (NODES + 1) + node - 1, mask=here, other=1.0)
    else:
        zero = tl.zeros(here.shape, tl.int64)
        seed = tl.load(origin.seeds + request, mask=in_batch, other=0)
        root = tl.load(origin.positions + request.to(tl.int64) * NODES, mask=in_batch, other=0)
        uniform = d.philox_uniform(seed[:, None] + zero, root[:, None] + zero, _ACCEPT, node - 1)
    return uniform


@triton.jit
def store_outcome(
    accepted, length, request, in_batch, column, emitted, path, count, bonus, usable, DEPTH: tl.constexpr
):  # fmt: skip
    """Store all fields of `accepted` but the log-probabilities, for requests [B] and columns [1, BLOCK_D]."""
    out = request.to(tl.int64)[:, None] * (DEPTH + 1) + column
    in_out = in_batch[:, None] & (column <= DEPTH)
    tl.store(accepted.tokens + out, emitted, mask=in_out)
    tl.store(accepted.nodes + out, path, mask=in_out)
    tl.store(accepted.num_accepted + request, count, mask=in_batch)
    tl.store(accepted.bonus + request, bonus, mask=in_batch)
    tl.store(accepted.new_lengths + request, length + count + 1, mask=in_batch)
    tl.store(accepted.valid + request, usable, mask=in_batch)


def empty_outcome(batch: int, max_depth: int, device: torch.device, with_logprobs: bool) -> Accepted:
    """Unwritten outputs of verification."""

    def out(*shape: int, dtype: torch.dtype) -> Tensor:
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
