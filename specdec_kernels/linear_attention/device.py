"""What chunks of prompts and draft trees have in common: rows, each of which sees itself and some rows before it.

With G_i the sum of log decays of the rows that row i sees, row i of the matrices has, for the rows j that it sees,

    shares_ij = exp(G_i - G_j),   A_ij = beta_i shares_ij k_i . k_j  for j < i,   M_ij = shares_ij q_i . k_j

and zeros elsewhere. The rows write T (diag(beta) V - diag(beta exp(G)) K S) with T = (I + A)^-1 and S the state before
them. A row must see all that the rows it sees do.
"""

# mypy: ignore-errors
from typing import Any, NamedTuple

import triton
import triton.language as tl

from specdec_kernels.linear_attention.api import key_heads
from specdec_kernels.linear_attention.types import LEAST_DECAY, DeltaState

LEAST_LANES = 16
"""Of a tile that is multiplied."""
_LEAST_DECAY = tl.constexpr(LEAST_DECAY)


@triton.jit
def log_decay(decay):
    return tl.log(tl.maximum(decay, _LEAST_DECAY))


class Static(NamedTuple):
    """Compile-time sizes of the kernels of this family."""

    H: int
    HV: int
    DK: int
    DV: int
    C: int  # channels
    SIZE: int = 0  # rows that are solved at once
    PART: int = 0  # keys of a row that one product takes
    PRECISION: str = ""  # of the products


def static_of(state: DeltaState, **solved: Any) -> Static:
    """The sizes of a layer's state, or of several."""
    heads, dk, dv = state.ssm.shape[-3:]
    return Static(key_heads(state), heads, dk, dv, state.conv.shape[-1], **solved)


@triton.jit
def matrices(of_row, query, real, sees, log, beta, S: tl.constexpr):
    """M and T [SIZE, SIZE], from pointers to `mixed` of the rows [SIZE, 1], the channel of the head's first query,
    whether a row is `real` [SIZE] and `sees` [SIZE, SIZE], log decays and shares [SIZE]."""
    KEYS: tl.constexpr = S.H * S.DK  # channel of the first key
    i, part = tl.arange(0, S.SIZE), tl.arange(0, S.PART)
    queried = tl.full([S.SIZE, S.SIZE], 0.0, tl.float32)
    alike = tl.full([S.SIZE, S.SIZE], 0.0, tl.float32)
    for first in tl.range(0, S.DK, S.PART):
        key = first + part
        inside = real[:, None] & (key < S.DK)[None, :]
        k = tl.load(of_row + (KEYS + query + key)[None, :], mask=inside, other=0.0)
        q = tl.load(of_row + (query + key)[None, :], mask=inside, other=0.0)
        alike += tl.dot(k, tl.trans(k), input_precision=S.PRECISION)
        queried += tl.dot(q, tl.trans(k), input_precision=S.PRECISION)
    logs = tl.where(sees, log[None, :], 0.0)
    # The sum of what i sees and j does not: G_i - G_j would lose its digits behind a decay of almost zero. Zeros and
    # ones are exact in half precision, and logarithms are the sum of two halves.
    hidden = tl.trans(tl.where(sees, 0.0, 1.0).to(tl.float16))
    high = logs.to(tl.float16)
    gaps = tl.dot((logs - high.to(tl.float32)).to(tl.float16), hidden, tl.dot(high, hidden))
    shares = tl.where(sees, tl.exp(gaps), 0.0)
    a = tl.where(i[:, None] > i[None, :], beta[:, None] * shares * alike, 0.0)
    return shares * queried, _inverse(a, S)


@triton.jit
def _inverse(a, S: tl.constexpr):
    """(I + a)^-1 for a [SIZE, SIZE] below the diagonal.

    Both halves of the diagonal are inverted row by row, at the same time, and the block below them is -T1 a T0. The
    powers of a, whose sum the inverse is as well, grow where rows repeat their keys.
    """
    HALF: tl.constexpr = S.SIZE // 2
    i, block = tl.arange(0, HALF), tl.arange(0, 2)
    second = (block == 1)[:, None, None, None]
    diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    blocks = tl.reshape(a, (2, HALF, 2, HALF))
    own = tl.sum(tl.where(diagonal, blocks, 0.0), 2)
    below = tl.sum(tl.sum(tl.where(second & (diagonal == 0), blocks, 0.0), 2), 0)
    found = tl.where((i[:, None] == i[None, :])[None, :, :], 1.0, own * 0.0)
    for row in tl.range(1, HALF):
        here = (i == row)[None, :, None]
        factors = tl.sum(tl.where(here, own, 0.0), 1)
        found -= tl.where(here, tl.sum(factors[:, :, None] * found, 1)[:, None, :], 0.0)
    last = (block == 1)[:, None, None]
    right = tl.dot(below, tl.sum(tl.where(last, 0.0, found), 0), input_precision=S.PRECISION)
    below = -tl.dot(tl.sum(tl.where(last, found, 0.0), 0), right, input_precision=S.PRECISION)
    below = tl.where(second, below[None, :, None, :], 0.0)
    return tl.reshape(tl.where(diagonal, found[:, :, None, :], below), (S.SIZE, S.SIZE))
