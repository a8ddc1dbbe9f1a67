"""Gated delta rule as Triton kernels. The recurrence is one kernel for prompts, decoding, verification and commit: a
program holds all of a head's keys for a few columns of the state in registers, takes them along one path, and keeps no
state of a row. A tree that runs by it repeats the ancestors of each leaf; `kernel_tree` solves trees at once, with
other roundings of the outputs alone: the commit is this recurrence for both.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.linear_attention.api import key_heads
from specdec_kernels.linear_attention.configs import CONFIGS
from specdec_kernels.linear_attention.device import static_of
from specdec_kernels.linear_attention.types import DeltaInputs, DeltaState, DeltaWeights, Paths, RowLinks

_EPS = tl.constexpr(1e-6)


@triton.jit
def _softplus(x):
    """log(1 + e^x), which is x from 20 on, as in torch."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _convolution(qkv_ptr, weight_ptr, kept_ptr, links, row, slot, channel, inside, own, stride, TAPS: tl.constexpr,
                 C: tl.constexpr):  # fmt: skip
    """[ROWS, BLOCK] float32: the sum over the taps. `own` are the rows' inputs, `kept_ptr` the state of the slots."""
    known = channel < C
    weight = tl.load(weight_ptr + channel * TAPS + TAPS - 1, mask=known, other=0.0).to(tl.float32)
    total = own.to(tl.float32) * weight[None, :]
    before = slot * 0
    for tap in tl.static_range(1, TAPS):
        parent = tl.load(links.parents + row, mask=row >= 0, other=-1).to(tl.int64)
        row = parent
        before += (row < 0).to(tl.int64)
        here = inside & (row >= 0)[:, None]
        x = tl.load(qkv_ptr + row[:, None] * stride + channel[None, :], mask=here, other=0.0)
        place = slot * (TAPS - 1) + (TAPS - 1 - before)
        there = inside & ((row < 0) & (slot >= 0))[:, None]
        x += tl.load(kept_ptr + place[:, None] * C + channel[None, :], mask=there, other=0.0)
        weight = tl.load(weight_ptr + channel * TAPS + TAPS - 1 - tap, mask=known, other=0.0).to(tl.float32)
        total += x.to(tl.float32) * weight[None, :]
    return total


@triton.jit(do_not_specialize=["rows", "qkv_stride", "b_stride", "a_stride"])
def _inputs_kernel(
    qkv_ptr,  # [rows, C]
    b_ptr,  # [rows, HV]
    a_ptr,  # [rows, HV]
    weights,  # DeltaWeights
    kept_ptr,  # [S, TAPS - 1, C]
    links,  # RowLinks
    out,  # DeltaInputs, written
    rows,
    qkv_stride,
    b_stride,
    a_stride,
    scale,  # 1 / sqrt(DK)
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,  # Static
):
    head = tl.program_id(1)  # queries, keys, values
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    is_value = head >= 2 * S.H
    lane = tl.arange(0, BLOCK)
    width = tl.where(is_value, S.DV, S.DK)
    first = tl.where(is_value, 2 * S.H * S.DK + (head - 2 * S.H) * S.DV, head * S.DK)
    channel = tl.where(lane < width, first + lane, S.C)
    inside = real[:, None] & (lane < width)[None, :]
    slot = tl.load(links.slots + row, mask=real, other=-1)
    own = tl.load(qkv_ptr + row[:, None] * qkv_stride + channel[None, :], mask=inside, other=0.0)
    at = row[:, None] * S.C + channel[None, :]
    tl.store(out.raw + at, own, mask=inside)
    here = tl.where(real, row, -1)
    total = _convolution(
        qkv_ptr, weights.conv, kept_ptr, links, here, slot, channel, inside, own, qkv_stride, TAPS, S.C
    )  # fmt: skip
    total = total.to(own.dtype).to(tl.float32)
    active = (total * tl.sigmoid(total)).to(own.dtype).to(tl.float32)
    norm = 1.0 / tl.sqrt_rn(tl.sum(active * active, 1) + _EPS)
    factor = tl.where(is_value, 1.0, norm) * tl.where(head < S.H, scale, 1.0)
    tl.store(out.mixed + at, active * factor[:, None], mask=inside)
    if is_value:
        value = head - 2 * S.H
        a = tl.load(a_ptr + row * a_stride + value, mask=real, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + row * b_stride + value, mask=real, other=0.0).to(tl.float32)
        step = _softplus(a + tl.load(weights.dt_bias + value))
        tl.store(out.decay + row * S.HV + value, tl.exp(-tl.exp(tl.load(weights.a_log + value)) * step), mask=real)
        tl.store(out.beta + row * S.HV + value, tl.sigmoid(b), mask=real)


@triton.jit
def delta_step(state, q, k, v, decay, beta):
    """(state [DK, BV] after a row, output [BV] of the row). The product is added by one instruction on every chip, so
    that compilers have no choice of roundings."""
    state = state * decay
    update = beta * (v - tl.sum(state * k[:, None], 0))
    state = tl.fma(tl.broadcast_to(k[:, None], state.shape), tl.broadcast_to(update[None, :], state.shape), state)
    return state, tl.sum(state * q[:, None], 0)


@triton.jit(do_not_specialize=["rows", "slots"])
def _rule_kernel(
    inputs,  # DeltaInputs of L layers
    ssm_ptr,  # [L, slots, HV, DK, DV] float32, written where a path ends in a slot
    paths,  # Paths; all end somewhere or none, and there are owners if there is `out`
    out_ptr,  # [rows, HV, DV] or None
    rows,
    slots,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    S: tl.constexpr,  # Static
):
    path, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    tiles = tl.cdiv(S.DV, BLOCK_V)
    head, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    count = tl.load(paths.counts + path)
    start = tl.load(paths.starts + path)
    end = start * 0 - 1
    if paths.ends is not None:
        end = tl.load(paths.ends + path)
    if (count == 0) & ((end < 0) | (end == start)):
        return
    first = tl.load(paths.first + path).to(tl.int64)
    key = tl.arange(0, BLOCK_K)
    value = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    in_tile = (key < S.DK)[:, None] & (value < S.DV)[None, :]
    place = key[:, None] * S.DV + value[None, :]
    of_layer = ssm_ptr + layer * slots * (S.HV * S.DK * S.DV) + head * (S.DK * S.DV) + place
    state = tl.load(of_layer + start * (S.HV * S.DK * S.DV), mask=in_tile & (start >= 0), other=0.0)
    query = head // (S.HV // S.H) * S.DK + key
    for i in tl.range(0, count):
        row = tl.load(paths.order + first + i).to(tl.int64)
        at = layer * rows + row
        q = tl.load(inputs.mixed + at * S.C + query, mask=key < S.DK, other=0.0)
        k = tl.load(inputs.mixed + at * S.C + S.H * S.DK + query, mask=key < S.DK, other=0.0)
        v = tl.load(inputs.mixed + at * S.C + 2 * S.H * S.DK + head * S.DV + value, mask=value < S.DV, other=0.0)
        decay, beta = tl.load(inputs.decay + at * S.HV + head), tl.load(inputs.beta + at * S.HV + head)
        state, o = delta_step(state, q, k, v, decay, beta)
        if out_ptr is not None:
            mine = tl.load(paths.owners + row) == path
            tl.store(out_ptr + (row * S.HV + head) * S.DV + value, o, mask=(value < S.DV) & mine)
    tl.store(of_layer + end * (S.HV * S.DK * S.DV), state, mask=in_tile & (end >= 0))


@triton.jit(do_not_specialize=["rows", "slots"])
def _tail_kernel(
    raw_ptr,  # [L, rows, C]
    kept_ptr,  # [L, slots, TAPS - 1, C], written where a path ends in a slot
    paths,  # Paths
    rows,
    slots,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    path, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, count = tl.load(paths.first + path).to(tl.int64), tl.load(paths.counts + path)
    start, end = tl.load(paths.starts + path), tl.load(paths.ends + path)
    inside = (channel < C) & (end >= 0)
    of_layer = kept_ptr + layer * slots * ((TAPS - 1) * C) + channel
    # In ascending order: an input that moves within its slot comes from a later place.
    for place in tl.static_range(TAPS - 1):
        back = TAPS - 1 - place  # inputs before the end of the path
        drawn = (back <= count) & (end >= 0)
        row = tl.load(paths.order + first + count - back, mask=drawn, other=0).to(tl.int64)
        x = tl.load(raw_ptr + (layer * rows + row) * C + channel, mask=inside & drawn, other=0.0)
        old = inside & (back > count) & (start >= 0)
        x += tl.load(of_layer + (start * (TAPS - 1) + place + count) * C, mask=old, other=0.0)
        tl.store(of_layer + (end * (TAPS - 1) + place) * C, x, mask=inside)


@triton.jit(do_not_specialize=["rows", "gate_stride"])
def _norm_kernel(
    x_ptr,  # [rows, HV, D]
    gate_ptr,  # [rows, HV * D]
    weight_ptr,  # [D]
    out_ptr,  # [rows, HV, D]
    rows,
    gate_stride,
    eps,
    HV: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, BLOCK)
    inside = (head < rows * HV)[:, None] & (lane < D)[None, :]
    at = head[:, None] * D + lane[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + lane, mask=lane < D, other=0.0).to(tl.float32)
    gated = gate_ptr + (head // HV)[:, None] * gate_stride + (head % HV)[:, None] * D + lane[None, :]
    gate = tl.load(gated, mask=inside, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    scaled = wide * (1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) / D + eps))[:, None]
    normed = (weight[None, :] * scaled.to(x.dtype).to(tl.float32)).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + at, (normed * (gate * tl.sigmoid(gate))).to(x.dtype), mask=inside)


def delta_rule_inputs(
    qkv: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights, state: DeltaState, links: RowLinks, out: DeltaInputs
) -> None:
    rows, (heads, dk, dv), groups = len(qkv), state.ssm.shape[-3:], key_heads(state)
    block = CONFIGS[current_chip(qkv)].input_rows
    launch(
        _inputs_kernel,
        (triton.cdiv(rows, block), 2 * groups + heads),
        *(qkv, b, a, weights, state.conv, links, out, rows, qkv.stride(0), b.stride(0), a.stride(0), dk**-0.5),
        num_warps=1,
        S=static_of(state),
        TAPS=weights.conv.shape[1],
        ROWS=block,
        BLOCK=lanes(max(dk, dv)),
    )


def delta_rule(inputs: DeltaInputs, paths: Paths, state: DeltaState, out: Tensor | None = None) -> Tensor:
    shape = (len(inputs.raw), state.ssm.shape[1], state.ssm.shape[3])
    if out is None:
        out = inputs.raw.new_empty(shape) if paths.complete else inputs.raw.new_zeros(shape)
    one = DeltaState(*(each[None] for each in state))
    _follow(DeltaInputs(*(each[None] for each in inputs)), paths, one, out)
    return out


def commit_delta_rule(inputs: DeltaInputs, paths: Paths, state: DeltaState) -> None:
    _follow(inputs, paths, state, None)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    out, (rows, heads, dim) = torch.empty_like(x), x.shape
    block = CONFIGS[current_chip(x)].norm_rows
    launch(
        _norm_kernel,
        (triton.cdiv(rows * heads, block),),
        *(x, gate, weight, out, rows, gate.stride(0), float(eps)),
        HV=heads,
        D=dim,
        HEADS=block,
        BLOCK=lanes(dim),
    )
    return out


def _follow(inputs: DeltaInputs, paths: Paths, state: DeltaState, out: Tensor | None) -> None:
    """Take the states of L layers along each path; `out` is for one layer."""
    layers, slots, heads, dk, dv = state.ssm.shape
    config, rows = CONFIGS[current_chip(inputs.raw)], inputs.raw.shape[1]
    values = min(config.values, lanes(dv))
    launch(
        _rule_kernel,
        (len(paths.first), heads * triton.cdiv(dv, values), layers),
        *(inputs, state.ssm, paths, out, rows, slots),
        num_warps=1,
        S=static_of(state),
        BLOCK_K=lanes(dk),
        BLOCK_V=values,
    )
    if paths.ends is not None:
        keep_inputs(inputs.raw, paths, state)


def keep_inputs(raw: Tensor, paths: Paths, state: DeltaState) -> None:
    """Keep the last inputs of the convolution of each path; `raw` is [L, R, C]."""
    (rows, channels), (layers, slots) = raw.shape[1:], state.ssm.shape[:2]
    config = CONFIGS[current_chip(raw)]
    block = min(config.tail_block, lanes(channels))
    launch(
        _tail_kernel,
        (len(paths.first), triton.cdiv(channels, block), layers),
        *(raw, state.conv, paths, rows, slots),
        C=channels,
        TAPS=state.conv.shape[2] + 1,
        BLOCK=block,
    )
