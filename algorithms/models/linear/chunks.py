"""The gated delta rule over whole sequences, in chunks, through which gradients flow: for training and as the plain
definition of whole texts. The recurrence of `specdec_kernels.linear_attention` goes token by token and gives the same
but for rounding.

With S the state [dk, dv] before a chunk, G_i the sum of its log decays up to row i, and its rows as matrices,

    A_ij = beta_i exp(G_i - G_j) k_i . k_j  for j < i,      (1 + A) [U W] = [beta V, beta exp(G) K],
    D = U - W S,
    O_i = exp(G_i) q_i S + sum over j <= i of exp(G_i - G_j) (q_i . k_j) D_j,
    S after the chunk = exp(G_last) S + sum over j of exp(G_last - G_j) k_j D_j.

Source: Gated DeltaNet (arXiv 2412.06464), section 3.3.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels import CHUNK, DeltaWeights

_EPS = 1e-6


def short_convolution(qkv: Tensor, weight: Tensor) -> Tensor:
    """SiLU of the causal convolution of every channel of `qkv [B, T, C]` by its taps `weight [C, taps]`, the last of
    which multiplies the row itself; float32 products, both results rounded to the dtype of `qkv`."""
    wide, taps = torch.promote_types(qkv.dtype, torch.float32), weight.shape[1]
    padded = F.pad(qkv.to(wide).mT, (taps - 1, 0))
    total = F.conv1d(padded, weight.to(wide)[:, None], groups=len(weight)).mT
    return F.silu(total.to(qkv.dtype).to(wide)).to(qkv.dtype)


def log_decay(a: Tensor, weights: DeltaWeights) -> Tensor:
    """[..., HV] float32: the logarithm of what is left of the state before each row."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return -weights.a_log.exp() * F.softplus(a.to(wide) + weights.dt_bias)


def normed(x: Tensor) -> Tensor:
    """Rows `x [..., D]` of length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def delta_rule_in_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """`[B, T, H, dv]` from states of zeros.

    `q`, `k [B, T, H, dk]` and `v [B, T, H, dv]` one per value head, `decay` (a logarithm) and `beta [B, T, H]`, all
    float32 or float64.
    """
    batch, length, heads, dv = v.shape
    count = -(-length // CHUNK)
    q, k, v, decay, beta = (_chunks(part) for part in (q, k, v, decay[..., None], beta[..., None]))
    total = decay.cumsum(2)  # [B H, N, C, 1]
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    ratio = (total - total.mT).masked_fill(~lower, float("-inf")).exp()
    both = torch.cat([k * beta, q], 2) @ k.mT  # [B H, N, 2 C, C]
    ahead, own = both[:, :, :CHUNK] * ratio, both[:, :, CHUNK:] * ratio
    grown = total.exp()
    solved = torch.linalg.solve_triangular(ahead, torch.cat([v, k * grown], -1) * beta, upper=False, unitriangular=True)
    values, reading = solved.split([dv, k.shape[-1]], -1)
    kept, last = k * (total[:, :, -1:] - total).exp(), grown[:, :, -1:]
    state, states, written = values.new_zeros(len(q), k.shape[-1], dv), [], []
    for index in range(count):
        states.append(state)
        written.append(torch.baddbmm(values[:, index], reading[:, index], state, alpha=-1))
        state = torch.baddbmm(state * last[:, index], kept[:, index].mT, written[-1])
    out = (q * grown) @ torch.stack(states, 1) + own @ torch.stack(written, 1)
    return out.unflatten(0, (batch, heads)).flatten(2, 3).transpose(1, 2)[:, :length].contiguous()


def _chunks(x: Tensor) -> Tensor:
    """`x [B, T, H, D]` as [B H, N, C, D], with zeros behind the last row: those write nothing."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return padded.transpose(1, 2).flatten(0, 1).unflatten(1, (-1, CHUNK))
