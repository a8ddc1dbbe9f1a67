"""A fused kernel rounds where the separate operations round, or its docstring says where it does not.

Products have few bits, so that float32 holds every sum of them, and its order is no matter. What remains are roundings:
a kernel that leaves one out, or has one more, differs from the separate operations in a large part of its results.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

import specdec_kernels as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, EPS = torch.float16, 1e-6
ROWS, INNER, WIDTH = 6, 256, 96


def eighths(seed: int, *shape: int, most: int = 15) -> Tensor:
    """Multiples of 1/8 from -most/8 to most/8."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-most, most + 1, shape, generator=generator) / 8).to(DEVICE, HALF)


X = eighths(0, ROWS, INNER, most=127)
WEIGHT, GATES = eighths(1, WIDTH, INNER), eighths(2, 2 * WIDTH, INNER) / 64
RESIDUAL, NORM = eighths(3, ROWS, WIDTH) / 16, eighths(4, WIDTH) + 3
WIDE_NORM = eighths(6, INNER) + 3
TABLE, TOKENS = eighths(5, 40, WIDTH), torch.arange(ROWS, device=DEVICE) * 5
ROPE = kernels.rope_table(32, 64, device=DEVICE)
POSITIONS = torch.arange(ROWS, device=DEVICE) * 7 + 1


def product(x: Tensor, weight: Tensor) -> Tensor:
    """[rows, columns] float32, exact."""
    return x.float() @ weight.float().T


def norm(x: Tensor, weight: Tensor, first: torch.dtype = HALF) -> Tensor:
    """RMSNorm of Hugging Face's decoders: the scaled row is rounded to `first`, and then multiplied by the weight."""
    wide = x.float()
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(first)
    return (weight.float() * scaled.float()).to(HALF)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate.float()).to(HALF) * up


def rotated(x: Tensor) -> Tensor:
    """[rows, heads, 32], in float32 and rounded once."""
    cos, sin = ROPE[POSITIONS][:, None].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(HALF)


def stored(impl: str) -> Sequence[Tensor]:
    """Queries, and keys from the pool."""
    pool = torch.zeros(2, 1, 8, 3, 32, dtype=HALF, device=DEVICE)
    heads, slots = RESIDUAL.view(ROWS, 3, 32), torch.arange(ROWS, device=DEVICE)
    weights = dict(q_norm=NORM[:32].contiguous(), k_norm=NORM[32:64].contiguous(), eps=EPS)
    q = kernels.write_kv(heads, heads, heads, pool, slots, POSITIONS, ROPE, **weights, impl=impl)
    return q, pool[0, 0, :ROWS], pool[1, 0, :ROWS]


SUM = (product(X, WEIGHT).to(HALF).float() + RESIDUAL.float()).to(HALF)
HEADS = RESIDUAL.view(ROWS, 3, 32)
CASES: dict[str, tuple[Callable[[str], Sequence[Tensor]], Sequence[Tensor], Sequence[Tensor]]] = {
    "silu_mul": (
        lambda impl: [kernels.silu_mul(GATES.T.contiguous(), impl=impl)],
        [gated(*GATES.T.chunk(2, -1))],
        [(silu(GATES.T.float().chunk(2, -1)[0]) * GATES.T.float().chunk(2, -1)[1]).to(HALF)],
    ),
    "add_rms_norm": (
        lambda impl: kernels.add_rms_norm(X, X.flip(0).contiguous(), WIDE_NORM, EPS, impl=impl),
        [norm(X + X.flip(0), WIDE_NORM), X + X.flip(0)],
        [norm(X + X.flip(0), WIDE_NORM, torch.float32)],
    ),
    "embed_rms_norm": (
        lambda impl: kernels.embed_rms_norm(TOKENS, TABLE, NORM, EPS, impl=impl),
        [norm(embedding(TOKENS, TABLE), NORM), embedding(TOKENS, TABLE)],
        [norm(embedding(TOKENS, TABLE), NORM, torch.float32)],
    ),
    "linear_silu_mul": (
        lambda impl: [kernels.linear_silu_mul(X, GATES, impl=impl)],
        [gated(*product(X, GATES).to(HALF).chunk(2, -1))],
        [gated(*product(X, GATES).chunk(2, -1)).to(HALF)],
    ),
    "linear_add_rms_norm": (
        lambda impl: kernels.linear_add_rms_norm(X, WEIGHT, RESIDUAL, NORM, EPS, impl=impl),
        [norm(SUM, NORM), SUM],
        [norm(SUM, NORM, torch.float32), (product(X, WEIGHT) + RESIDUAL.float()).to(HALF)],
    ),
    "write_kv": (
        stored,
        [rotated(norm(HEADS, NORM[:32])), rotated(norm(HEADS, NORM[32:64])), HEADS],
        [rotated(norm(HEADS, NORM[:32], torch.float32))],
    ),
}
"""Name: the fused kernel, the separate operations, and the same with a rounding left out."""


@pytest.mark.parametrize("name", CASES)
def test_a_fused_kernel_rounds_where_the_separate_operations_do(name: str, impl: str) -> None:
    """Only an inverse root or an exponential may lie on the other side of an edge between two numbers."""
    fused, separate, unrounded = CASES[name]
    results = fused(impl)
    for result, expected in zip(results, separate, strict=True):
        assert (result != expected).float().mean() < 0.02
    for expected, other in zip(separate, unrounded, strict=False):
        assert (expected != other).float().mean() > 0.05, "the inputs cannot tell"
