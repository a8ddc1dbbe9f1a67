"""What chunks of prompts and draft trees have in common: rows, each of which sees itself and some rows before it.

With G_i the sum of log decays of the rows that row i sees, row i of the matrices has, for the rows j that it sees,

    shares_ij = exp(G_i - G_j),   A_ij = beta_i shares_ij k_i . k_j  for j < i,   M_ij = shares_ij q_i . k_j

and zeros elsewhere. The rows write T (diag(beta) V - diag(beta exp(G)) K S) with T = (I + A)^-1 and S the state before
them. A row must see all that the rows it sees do.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.linear_attention.types import LEAST_DECAY

LEAST_LANES = 16
"""Of a tile that is multiplied."""
_LEAST_DECAY = tl.constexpr(LEAST_DECAY)
_BLOCK = tl.constexpr(16)


@triton.jit
def log_decay(decay):
    return tl.log(tl.maximum(decay, _LEAST_DECAY))


@triton.jit
def matrices(
    of_row,  # [SIZE, 1] pointers to `mixed` of the rows
    query,  # channel of the head's first query
    real,  # [SIZE]: rows that are read
    sees,  # [SIZE, SIZE]
    log,  # [SIZE]: log decays
    beta,  # [SIZE]
    H: tl.constexpr,
    DK: tl.constexpr,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """M and T [SIZE, SIZE]."""
    i, part = tl.arange(0, SIZE), tl.arange(0, PART)
    queried = tl.zeros((SIZE, SIZE), tl.float32)
    alike = tl.zeros((SIZE, SIZE), tl.float32)
    for first in tl.range(0, DK, PART):
        key = first + part
        inside = real[:, None] & (key < DK)[None, :]
        k = tl.load(of_row + (H * DK + query + key)[None, :], mask=inside, other=0.0)
        q = tl.load(of_row + (query + key)[None, :], mask=inside, other=0.0)
        alike += tl.dot(k, tl.trans(k), input_precision=PRECISION)
        queried += tl.dot(q, tl.trans(k), input_precision=PRECISION)
    logs = tl.where(sees, log[None, :], 0.0)
    # The sum of what i sees and j does not: G_i - G_j would lose its digits behind a decay of almost zero.
    gaps = tl.dot(logs, tl.trans(tl.where(sees, 0.0, 1.0)), input_precision=PRECISION)
    shares = tl.where(sees, tl.exp(gaps), 0.0)
    a = tl.where(i[:, None] > i[None, :], beta[:, None] * shares * alike, 0.0)
    return shares * queried, _inverse(a, SIZE, PRECISION)


@triton.jit
def _inverse(a, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 for a [SIZE, SIZE] below the diagonal, SIZE 32 or 64.

    Blocks on the diagonal are inverted row by row, all at once; then each two neighbours become one block. The powers
    of a, whose sum the inverse is as well, grow where rows repeat their keys.
    """
    COUNT: tl.constexpr = SIZE // _BLOCK
    i, block = tl.arange(0, _BLOCK), tl.arange(0, COUNT)
    diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    own = tl.sum(tl.where(diagonal, tl.reshape(a, (COUNT, _BLOCK, COUNT, _BLOCK)), 0.0), 2)
    found = tl.where((i[:, None] == i[None, :])[None, :, :], 1.0, own * 0.0)
    for row in tl.range(1, _BLOCK):
        here = (i == row)[None, :, None]
        factors = tl.sum(tl.where(here, own, 0.0), 1)
        found -= tl.where(here, tl.sum(factors[:, :, None] * found, 1)[:, None, :], 0.0)
    inverse = tl.reshape(tl.where(diagonal, found[:, :, None, :], 0.0), (SIZE, SIZE))
    place = tl.arange(0, SIZE)
    for level in tl.static_range(2):
        if (_BLOCK << level) < SIZE:
            mine, other = place[:, None] // (_BLOCK << level), place[None, :] // (_BLOCK << level)
            between = tl.where((mine // 2 == other // 2) & (mine != other), a, 0.0)
            right = tl.dot(between, inverse, input_precision=PRECISION)
            inverse -= tl.dot(inverse, right, input_precision=PRECISION)
    return inverse
