"""Definition of the gated delta rule in plain torch: paths one by one, rows one by one."""

import torch
from torch import Tensor

from specdec_kernels.linear_attention.api import key_heads
from specdec_kernels.linear_attention.types import (
    CHUNK,
    LEAST_DECAY,
    Chunks,
    DeltaInputs,
    DeltaState,
    DeltaWeights,
    Paths,
    RowLinks,
    Trees,
)

_EPS = 1e-6


def delta_rule_inputs(
    qkv: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights, state: DeltaState, links: RowLinks, out: DeltaInputs
) -> None:
    wide, taps = out.mixed.dtype, weights.conv.shape[1]
    row, before = torch.arange(len(qkv), device=qkv.device), torch.zeros(len(qkv), dtype=torch.int64, device=qkv.device)
    total = qkv.to(wide) * weights.conv[:, -1].to(wide)
    for tap in range(taps - 2, -1, -1):
        # `before` counts the steps that led past the first row of the call, into the state.
        row = torch.where(row < 0, -1, links.parents[row.clamp(min=0)].long())
        before = before + (row < 0)
        kept = state.conv[links.slots.clamp(min=0), (taps - 1 - before).clamp(0, taps - 2)]
        kept = torch.where((links.slots < 0)[:, None], 0, kept)
        x = torch.where((row < 0)[:, None], kept, qkv[row.clamp(min=0)])
        total = total + x.to(wide) * weights.conv[:, tap].to(wide)
    active = _silu(total.to(qkv.dtype).to(wide)).to(qkv.dtype).to(wide)
    groups, dk = key_heads(state), state.ssm.shape[-2]
    heads = active[:, : 2 * groups * dk].unflatten(1, (2, groups, dk))
    normed = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _EPS)
    normed = torch.stack([normed[:, 0] * dk**-0.5, normed[:, 1]], 1)
    out.mixed.copy_(torch.cat([normed.flatten(1), active[:, 2 * groups * dk :]], 1))
    out.decay.copy_(torch.exp(-weights.a_log.exp() * _softplus(a.to(wide) + weights.dt_bias)))
    out.beta.copy_(1 / (1 + torch.exp(-b.to(wide))))
    out.raw.copy_(qkv)


def delta_rule(inputs: DeltaInputs, paths: Paths, state: DeltaState, out: Tensor | None = None) -> Tensor:
    _, heads, _, dv = state.ssm.shape
    out = inputs.raw.new_zeros((len(inputs.raw), heads, dv)) if out is None else out
    _follow(inputs, paths, state, out)
    return out


def delta_rule_chunks(inputs: DeltaInputs, chunks: Chunks, state: DeltaState) -> Tensor:
    groups, (heads, dk, dv) = key_heads(state), state.ssm.shape[1:]
    out = inputs.raw.new_zeros((len(inputs.raw), heads, dv))
    for first, count, start, end in zip(*(each.tolist() for each in chunks[:4]), strict=True):
        if not count:
            continue
        s = state.ssm[start] if start >= 0 else torch.zeros_like(state.ssm[0])
        for chunk in range(first, first + count):
            rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            heads_of = (_heads(mixed, groups, dk, heads) for mixed in inputs.mixed[rows])
            q, k, v = (torch.stack(each, 1) for each in zip(*heads_of, strict=True))
            o, s = _chunk(q, k, v, inputs.decay[rows].T, inputs.beta[rows].T, s)
            out[rows] = o.transpose(0, 1).to(out.dtype)
        state.ssm[end] = s
        state.conv[end] = inputs.raw[: (first + count) * CHUNK][-state.conv.shape[1] :]
    return out


def _chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and the state after a chunk, of all heads: q, k, v [HV, CHUNK, d], decay and beta [HV, CHUNK]."""
    total = decay.clamp(min=LEAST_DECAY).log().cumsum(1)
    gaps = (total[:, :, None] - total[:, None]).tril()
    shares = gaps.exp().tril()
    a = (beta[:, :, None] * shares * (k @ k.mT)).tril(-1)
    known = beta[:, :, None] * (v - total.exp()[:, :, None] * (k @ s))
    written = torch.linalg.solve_triangular(a, known, upper=False, unitriangular=True)
    o = total.exp()[:, :, None] * (q @ s) + (shares * (q @ k.mT)) @ written
    last = total[:, -1:]
    return o, last.exp()[:, :, None] * s + ((last - total).exp()[:, :, None] * k).mT @ written


def delta_rule_tree(inputs: DeltaInputs, trees: Trees, state: DeltaState) -> Tensor:
    """See `specdec_kernels.linear_attention.delta_rule_tree`: the state after each node from that after its parent."""
    out = inputs.raw.new_empty((len(inputs.raw), state.ssm.shape[1], state.ssm.shape[3]))
    for request, (slot, words) in enumerate(zip(trees.slots.tolist(), trees.mask[:, :, 0].tolist(), strict=True)):
        first = state.ssm[slot] if slot >= 0 else torch.zeros_like(state.ssm[0])
        after: list[Tensor] = []
        for node, word in enumerate(words):
            parent = (word & ((1 << node) - 1)).bit_length() - 1
            row = request * len(words) + node
            s, o = _step(inputs, row, after[parent] if parent >= 0 else first)
            after.append(s)
            out[row] = o.to(out.dtype)
    return out


def commit_delta_rule(inputs: DeltaInputs, paths: Paths, state: DeltaState) -> None:
    for layer in range(len(inputs.raw)):
        one = DeltaInputs(*(each[layer] for each in inputs))
        _follow(one, paths, DeltaState(state.ssm[layer], state.conv[layer]), None)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(wide)
    normed = weight * (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normed.to(wide) * _silu(gate.reshape(x.shape).to(wide))).to(x.dtype)


# Of exp and log alone: torch's own silu and softplus have other bits in the last elements of a tensor than before them.
def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20, x, torch.log(1 + torch.exp(x.clamp(max=20))))


def _follow(inputs: DeltaInputs, paths: Paths, state: DeltaState, out: Tensor | None) -> None:
    """Take the state of one layer along each path."""
    order, owners = paths.order.tolist(), None if paths.owners is None else paths.owners.tolist()
    ends = [-1] * len(paths.first) if paths.ends is None else paths.ends.tolist()
    plan = zip(paths.first.tolist(), paths.counts.tolist(), paths.starts.tolist(), ends, strict=True)
    for path, (first, count, start, end) in enumerate(plan):
        rows = order[first : first + count]
        s = state.ssm[start].clone() if start >= 0 else torch.zeros_like(state.ssm[0])
        tail = state.conv[start].clone() if start >= 0 else torch.zeros_like(state.conv[0])
        for row in rows:
            s, o = _step(inputs, row, s)
            if out is not None and owners is not None and owners[row] == path:
                out[row] = o.to(out.dtype)
        if end >= 0:
            state.ssm[end] = s
            state.conv[end] = torch.cat([tail, inputs.raw[rows]])[len(rows) :]


def _step(inputs: DeltaInputs, row: int, s: Tensor) -> tuple[Tensor, Tensor]:
    """The state [HV, dk, dv] after a row, and its output [HV, dv]."""
    heads, dk, dv = s.shape
    groups = (inputs.mixed.shape[-1] - heads * dv) // (2 * dk)
    q, k, v = _heads(inputs.mixed[row], groups, dk, heads)
    s = s * inputs.decay[row][:, None, None]
    update = inputs.beta[row][:, None] * (v - (s * k[..., None]).sum(1))
    s = s + k[..., None] * update[:, None]
    return s, (s * q[..., None]).sum(1)


def _heads(mixed: Tensor, groups: int, dk: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key [HV, dk] and value [HV, dv] of each value head of a row."""
    q, k, v = mixed.split([groups * dk, groups * dk, len(mixed) - 2 * groups * dk])
    repeat = heads // groups
    return (*(each.view(groups, dk).repeat_interleave(repeat, 0) for each in (q, k)), v.view(heads, -1))
