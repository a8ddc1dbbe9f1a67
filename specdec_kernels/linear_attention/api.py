"""Gated delta rule over rows of several requests, in three calls a layer, and the commit of all layers.

Row r of a value head has query q, key k (of its key head) and value v, a decay exp(g) and a share beta:

    c = SiLU(sum over taps t of conv[t] x(r - t))      x(r - t): inputs of the row and its ancestors, then of the state
    q = norm(c_q) / sqrt(dk),   k = norm(c_k),   v = c_v           norm(y) = y / sqrt(sum y^2 + 1e-6)
    g = -exp(a_log) softplus(a + dt_bias),   beta = sigmoid(b)
    S = exp(g) S',   S = S + k (beta (v - S^T k))^T,   o = S^T q   S' [dk, dv]: state after the row before

Equations and roundings are those of transformers' Qwen3-Next and Qwen3.5, but beta stays float32. States are float32.
A state passes through the rows of a path one after another, by the same operations in every call: the outputs of a row
and the state after it have the same bits in a prompt, in decoding, in a chain, in a tree and in a commit.
`delta_rule_chunks` and `delta_rule_tree` differ in bits: they take whole chunks of prompts and whole trees at once.

Tensors are contiguous where not said otherwise. Slots and rows are not checked: they are on the device.
"""

import torch
from torch import Tensor

from specdec_kernels.checks import expect_between, expect_fields, expect_shape, expect_strided, expect_tensors
from specdec_kernels.launch import dispatch
from specdec_kernels.linear_attention.types import (
    CHUNK,
    Chunks,
    DeltaInputs,
    DeltaState,
    DeltaWeights,
    Paths,
    RowLinks,
    Trees,
)

MAX_HEAD_DIM = 256
MAX_TAPS = 8
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def delta_rule_inputs(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    state: DeltaState,
    links: RowLinks,
    *,
    out: DeltaInputs | None = None,
    impl: str = "auto",
) -> DeltaInputs:
    """Convolution, SiLU, norms and gates of R rows of one layer.

    Args:
        qkv: [R, C], rows may be strided; the convolution is rounded to its dtype, as is its activation.
        b, a: [R, HV], dtype of `qkv`, rows may be strided.
        weights: `conv` has the dtype of `qkv`.
        state: of one layer, read; `conv` has the dtype of `qkv`.
        out: written and returned if given, for example a layer of what `commit_delta_rule` reads.
    """
    expect_strided(qkv=(qkv, (None, None), _FLOATS))
    rows, channels = qkv.shape
    heads = _check_state(state, channels, qkv.dtype)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    expect_strided(b=(b, (rows, heads), qkv.dtype), a=(a, (rows, heads), qkv.dtype))
    expect_tensors(
        {"qkv": qkv, "b": b, "a": a},
        conv=(weights.conv, (channels, state.conv.shape[1] + 1), qkv.dtype),
        a_log=(weights.a_log, (heads,), wide),
        dt_bias=(weights.dt_bias, (heads,), wide),
        state_conv=(state.conv, (None, None, channels), qkv.dtype),
    )
    expect_fields(links, others=dict(qkv=qkv), R=rows)
    if out is None:
        decay, beta = (qkv.new_empty((rows, heads), dtype=wide) for _ in range(2))
        out = DeltaInputs(qkv.new_empty((rows, channels), dtype=wide), decay, beta, qkv.new_empty((rows, channels)))
    _check_inputs(out, (rows,), channels, heads)
    dispatch("delta_rule_inputs", __package__, impl, qkv)(qkv, b, a, weights, state, links, out)
    return out


def delta_rule(
    inputs: DeltaInputs, paths: Paths, state: DeltaState, *, out: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """[R, HV, dv] in the dtype of `inputs.raw`: outputs of the rows of one layer, zeros where a row has no owner.

    The state is read, and written where `paths.ends` names a slot. No slot may end two paths, and a slot that ends a
    path may start no other. `out` is returned if given, and rows without an owner keep what it holds.
    """
    heads = _check_layer(inputs, state)
    expect_fields(paths, others=dict(raw=inputs.raw), R=len(inputs.raw))
    if paths.owners is None:
        raise ValueError("owners: expected the path that writes each row, got None")
    if out is not None:
        expect_tensors({"raw": inputs.raw}, out=(out, (len(inputs.raw), heads, state.ssm.shape[3]), inputs.raw.dtype))
    return dispatch("delta_rule", __package__, impl, inputs.raw)(inputs, paths, state, out)


def delta_rule_chunks(inputs: DeltaInputs, chunks: Chunks, state: DeltaState, *, impl: str = "auto") -> Tensor:
    """[R, HV, dv] in the dtype of `inputs.raw`: outputs of the rows of whole chunks of one layer, zeros elsewhere.

    The same function of a chunk as `delta_rule`, by matrix products over its rows: sums have another order, so outputs
    and states have other bits. R is a multiple of `CHUNK`. The state is read, and written at the end of segments with
    chunks; no slot may end two segments, and a slot that ends a segment may start no other.
    """
    _check_layer(inputs, state)
    if (rows := len(inputs.raw)) % CHUNK:
        raise ValueError(f"inputs: expected a multiple of {CHUNK} rows, got {rows}")
    expect_fields(chunks, others=dict(raw=inputs.raw), R=rows)
    return dispatch("delta_rule_chunks", __package__, impl, inputs.raw, "kernel_chunks")(inputs, chunks, state)


def delta_rule_tree(inputs: DeltaInputs, trees: Trees, state: DeltaState, *, impl: str = "auto") -> Tensor:
    """[R, HV, dv] in the dtype of `inputs.raw`: outputs of the nodes of B trees of up to `CHUNK` nodes, of one layer.

    The same function as `delta_rule` along `tree_paths`, by matrix products over the nodes: sums have another order, so
    outputs have other bits, and deterministic decoding takes `delta_rule`. Bits of nodes behind a node are ignored, and
    a node sees itself in any case. One that sees no other follows the state of the slot, unused ones too. The state is
    read. Larger trees are refused; `delta_rule` takes them.
    """
    _check_layer(inputs, state)
    expect_fields(trees, others=dict(raw=inputs.raw))
    batch, nodes, _ = trees.mask.shape
    expect_between("nodes of mask", nodes, 1, CHUNK)
    if len(inputs.raw) != batch * nodes:
        raise ValueError(f"inputs: expected {batch} * {nodes} rows, got {len(inputs.raw)}")
    return dispatch("delta_rule_tree", __package__, impl, inputs.raw, "kernel_tree")(inputs, trees, state)


def commit_delta_rule(inputs: DeltaInputs, paths: Paths, state: DeltaState, *, impl: str = "auto") -> None:
    """Take the states of L layers along `paths`, and write them to `paths.ends`; a path without rows that starts where
    it ends changes nothing.

    Args:
        inputs: of L layers, as `delta_rule_inputs` left them.
        state: of L layers, written.
    """
    raw = inputs.raw
    expect_shape("raw", raw, (None, None, None))
    heads = _check_state(state, raw.shape[-1], raw.dtype, layers=raw.shape[0])
    _check_inputs(inputs, raw.shape[:2], raw.shape[-1], heads)
    expect_fields(paths, others=dict(raw=raw), R=raw.shape[1])
    if paths.ends is None:
        raise ValueError("ends: expected the slot that takes each state, got None")
    dispatch("commit_delta_rule", __package__, impl, raw)(inputs, paths, state)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, impl: str = "auto") -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) * SiLU(gate) over the last dimension, in the dtype of x [R, HV, dv].

    Roundings as in transformers: the scaled row and its product with the weight are rounded to the dtype of x before
    they are multiplied by the gate in float32.

    Args:
        gate: [R, HV * dv], dtype of x, rows may be strided.
        weight: [dv], dtype of x.
    """
    expect_tensors(x=(x, (None, None, None), _FLOATS))
    expect_between("dv of x", x.shape[2], 1, MAX_HEAD_DIM)
    expect_strided(gate=(gate, (x.shape[0], x.shape[1] * x.shape[2]), x.dtype))
    expect_tensors({"x": x, "gate": gate}, weight=(weight, (x.shape[2],), x.dtype))
    return dispatch("gated_rms_norm", __package__, impl, x)(x, gate, weight, eps)


def key_heads(state: DeltaState) -> int:
    """H of a state: the channels that are no values are those of H queries and H keys."""
    heads, dk, dv = state.ssm.shape[-3:]
    return int((state.conv.shape[-1] - heads * dv) // (2 * dk))


def _check_state(state: DeltaState, channels: int, kind: torch.dtype, layers: int | None = None) -> int:
    """The number of value heads. Raises ValueError where the state does not fit rows of `channels`."""
    lead = () if layers is None else (layers,)
    expect_shape("state.ssm", state.ssm, (*lead, None, None, None, None))
    slots, heads, dk, dv = state.ssm.shape[len(lead) :]
    expect_between("dk of state.ssm", dk, 1, MAX_HEAD_DIM)
    expect_between("dv of state.ssm", dv, 1, MAX_HEAD_DIM)
    expect_tensors(
        ssm=(state.ssm, (*lead, slots, heads, dk, dv), torch.promote_types(kind, torch.float32)),
        conv=(state.conv, (*lead, slots, None, channels), kind),
    )
    expect_between("taps of state.conv", state.conv.shape[-2] + 1, 2, MAX_TAPS)
    groups = key_heads(state)
    if groups < 1 or heads % groups or 2 * groups * dk + heads * dv != channels:
        raise ValueError(f"channels: expected 2 H * {dk} + {heads} * {dv} with H a divisor of {heads}, got {channels}")
    return int(heads)


def _check_layer(inputs: DeltaInputs, state: DeltaState) -> int:
    """The number of value heads of one layer."""
    raw = inputs.raw
    heads = _check_state(state, raw.shape[-1], raw.dtype)
    _check_inputs(inputs, raw.shape[:1], raw.shape[-1], heads)
    return heads


def _check_inputs(inputs: DeltaInputs, lead: tuple[int, ...], channels: int, heads: int) -> None:
    kind = inputs.raw.dtype
    wide = torch.promote_types(kind, torch.float32)
    expect_tensors(
        mixed=(inputs.mixed, (*lead, channels), wide),
        decay=(inputs.decay, (*lead, heads), wide),
        beta=(inputs.beta, (*lead, heads), wide),
        raw=(inputs.raw, (*lead, channels), kind),
    )
