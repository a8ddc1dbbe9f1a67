"""Draft trees of up to `CHUNK` nodes as one Triton kernel: the outputs of all nodes from one read of the state S.

A node sees its ancestors and itself. With G, M and T of `device`,

    D = T (diag(beta) V - diag(beta exp(G)) K S),   O = diag(exp(G)) Q S + M D

so no state of a node exists, and ancestors that nodes have in common are worked through once. A program has a few
columns of S, and makes M and T for itself.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, lanes, launch, num_processors
from specdec_kernels.linear_attention.configs import CONFIGS
from specdec_kernels.linear_attention.device import LEAST_LANES, log_decay, matrices, static_of
from specdec_kernels.linear_attention.types import DeltaInputs, DeltaState, Trees

_LEAST_ROWS = 32


@triton.jit(do_not_specialize=["nodes"])
def _tree_kernel(
    inputs,  # DeltaInputs of B * nodes rows
    ssm_ptr,  # [slots, HV, DK, DV] float32
    trees,  # Trees
    out_ptr,  # [B * nodes, HV, DV]
    nodes,
    BLOCK_V: tl.constexpr,
    S: tl.constexpr,  # Static
):
    tiles = tl.cdiv(S.DV, BLOCK_V)
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    request = tl.program_id(1).to(tl.int64)
    i, part = tl.arange(0, S.SIZE), tl.arange(0, S.PART)
    real = i < nodes
    row = request * nodes + i
    word = tl.load(trees.mask + row, mask=real, other=0)
    bit = (word[:, None] >> i[None, :].to(tl.int64)) & 1
    sees = ((bit != 0) & (i[:, None] > i[None, :])) | (i[:, None] == i[None, :])
    log = log_decay(tl.load(inputs.decay + row * S.HV + head, mask=real, other=1.0))
    beta = tl.load(inputs.beta + row * S.HV + head, mask=real, other=0.0)
    of_row = inputs.mixed + row[:, None] * S.C
    query = head // (S.HV // S.H) * S.DK
    seen, inverse = matrices(of_row, query, real, sees, log, beta, S)
    slot = tl.load(trees.slots + request)
    value = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    in_tile = (value < S.DV)[None, :]
    of_head = ssm_ptr + (slot * S.HV + head) * (S.DK * S.DV) + value[None, :]
    known = tl.full([S.SIZE, BLOCK_V], 0.0, tl.float32)
    o = tl.full([S.SIZE, BLOCK_V], 0.0, tl.float32)
    for first in tl.range(0, S.DK, S.PART):
        key = first + part
        state = tl.load(of_head + key[:, None] * S.DV, mask=(key < S.DK)[:, None] & in_tile & (slot >= 0), other=0.0)
        inside = real[:, None] & (key < S.DK)[None, :]
        k = tl.load(of_row + (S.H * S.DK + query + key)[None, :], mask=inside, other=0.0)
        known += tl.dot(k, state, input_precision=S.PRECISION)
        q = tl.load(of_row + (query + key)[None, :], mask=inside, other=0.0)
        o += tl.dot(q, state, input_precision=S.PRECISION)
    inside = real[:, None] & in_tile
    v = tl.load(of_row + (2 * S.H * S.DK + head * S.DV + value)[None, :], mask=inside, other=0.0)
    left = tl.exp(tl.sum(tl.where(sees, log[None, :], 0.0), 1))[:, None]
    written = tl.dot(inverse, beta[:, None] * (v - left * known), input_precision=S.PRECISION)
    o = left * o + tl.dot(seen, written, input_precision=S.PRECISION)
    of_value = out_ptr + (row * S.HV + head)[:, None] * S.DV + value[None, :]
    tl.store(of_value, o, mask=inside)


def delta_rule_tree(inputs: DeltaInputs, trees: Trees, state: DeltaState) -> Tensor:
    (heads, _, dv), (batch, nodes, _) = state.ssm.shape[1:], trees.mask.shape
    config = CONFIGS[current_chip(inputs.raw)]
    out = inputs.raw.new_empty((len(inputs.raw), heads, dv))
    size = max(_LEAST_ROWS, lanes(nodes))
    block = max(LEAST_LANES, min(config.tree_values // size, lanes(dv)))
    # Fewer columns make more programs, of which each repeats M and T: only where the chip has room for them.
    while block > LEAST_LANES and 2 * batch * heads * triton.cdiv(dv, block) <= num_processors(inputs.raw):
        block //= 2
    launch(
        _tree_kernel,
        (heads * triton.cdiv(dv, block), batch),
        *(inputs, state.ssm, trees, out, nodes),
        num_warps=config.chunk_warps,
        BLOCK_V=block,
        S=static_of(
            state,
            SIZE=size,
            PART=max(LEAST_LANES, config.tree_part // size),
            PRECISION="ieee" if inputs.raw.dtype == torch.float32 else config.precision,
        ),
    )
    return out
