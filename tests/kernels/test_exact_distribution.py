"""The probability with which each token is sampled, to 1e-6 in total variation.

Counting samples cannot resolve 1e-6. These tests find, for every token, how many of the 2^52 uniforms sample it: a
sample is the inverse of a cumulative distribution, so the first uniform that samples a token after v is found by
bisection. A small vocabulary is measured whole, through the kernel and through the reference; on a GPU so is the
shipped vocabulary. Chosen tokens of it are checked everywhere.
"""

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from specdec_kernels import SamplingTensors, pick_tokens
from specdec_kernels.sampling import row_distribution

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL, SHIPPED = 197, 151_936
BITS = 52
REACHABLE = 2.0**-50
BOUND = 1e-6


@dataclass(frozen=True)
class Shape:
    """Logits of a row, and what it is sampled with; the first, the last and a middle token have no weight."""

    name: str
    temperature: float = 1.0
    top_p: float | None = None

    def logits(self, vocab: int) -> torch.Tensor:
        noise = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
        logits = {
            "flat": noise * 0, "hot": noise * 2, "plain": noise * 3, "peaked": noise * 2 - 12,
            "two_level": torch.where(torch.arange(vocab) % 37 == 5, 4.0, -9.0), "top_p": noise * 2,
        }[self.name]  # fmt: skip
        if self.name == "peaked":
            logits[vocab // 3] = 5.0
        logits[[0, vocab // 2, vocab - 1]] = float("-inf")
        return logits

    def sampling(self, rows: int) -> SamplingTensors:
        top_p = None if self.top_p is None else torch.full((rows,), self.top_p, device=DEVICE)
        return SamplingTensors(torch.full((rows,), self.temperature, device=DEVICE), top_p=top_p)

    def distribution(self, vocab: int) -> torch.Tensor:
        """[V] float64, by the definition."""
        logits = self.logits(vocab)[None].to(DEVICE)
        weights = row_distribution(logits, self.sampling(1)).weights[0].cpu()
        return weights / weights.sum()

    def draw(self, vocab: int, uniforms: torch.Tensor, impl: str) -> torch.Tensor:
        rows = self.logits(vocab).to(DEVICE).expand(len(uniforms), vocab)
        return pick_tokens(rows, self.sampling(len(uniforms)), uniforms=uniforms.to(DEVICE), impl=impl).tokens.cpu()


SHAPES = (
    Shape("flat"), Shape("hot", 1.5), Shape("plain"), Shape("peaked"), Shape("two_level"), Shape("top_p", 1.0, 0.9)
)  # fmt: skip
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)


def midpoints(steps: torch.Tensor) -> torch.Tensor:
    """The uniforms of the steps k < 2^52: (k + 1/2) / 2^52."""
    return (2 * steps + 1).double() * 2.0 ** -(BITS + 1)


NEAR = 1 << (BITS - 22)
"""Steps around the reference's edges in which the kernel's are looked for."""


@cache
def measured(shape: Shape, vocab: int, impl: str) -> torch.Tensor:
    """[V] float64: the share of all uniforms that draw each token, by bisection for every token at once."""
    low = torch.zeros(vocab - 1, dtype=torch.int64)
    high = torch.full_like(low, 1 << BITS)  # the first step that draws a token after v lies in [low, high]
    token = torch.arange(vocab - 1)

    def after(steps: torch.Tensor) -> torch.Tensor:
        return shape.draw(vocab, midpoints(steps.clamp(0, (1 << BITS) - 1)), impl) > token

    if impl == "triton" and vocab == SMALL:
        edges = (measured(shape, vocab, "reference").cumsum(0)[:-1] * 2.0**BITS).long()
        near, far = (edges - NEAR).clamp(min=0), (edges + NEAR).clamp(max=1 << BITS)
        low = torch.where(after(near) & (near > 0), low, near)
        high = torch.where(after(far) | (far == 1 << BITS), far, high)
    while (low < high).any():
        middle = (low + high) // 2
        is_after = after(middle)
        high = torch.where(is_after & (low < high), middle, high)
        low = torch.where(~is_after & (low < high), middle + 1, low)
    edges = torch.cat([torch.zeros(1, dtype=torch.int64), low, torch.full((1,), 1 << BITS)])
    return edges.diff().double() * 2.0**-BITS


def assert_exact(seen: torch.Tensor, expected: torch.Tensor, bound: float = BOUND) -> None:
    assert 0.5 * (seen - expected).abs().sum() <= bound
    assert (seen[expected >= REACHABLE] > 0).all(), "a token that no uniform draws"
    assert not seen[expected == 0].any(), "a token without weight is sampled"


@every_shape
def test_every_uniform_over_a_small_vocabulary(shape: Shape, impl: str) -> None:
    seen = measured(shape, SMALL, impl)
    assert_exact(seen, shape.distribution(SMALL), bound=1e-12 if impl == "reference" else BOUND)


@every_shape
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter would take hours")
def test_the_shipped_vocabulary(shape: Shape) -> None:
    assert_exact(measured(shape, SHIPPED, "triton"), shape.distribution(SHIPPED))


@every_shape
def test_chosen_tokens_of_the_shipped_vocabulary(shape: Shape) -> None:
    """Likely tokens, any tokens and the least likely reachable ones, each at a uniform of its own: the cumulative
    distribution at the sampled token is the uniform within the bound."""
    expected = shape.distribution(SHIPPED)
    generator = torch.Generator().manual_seed(1)
    reachable = (expected >= REACHABLE).nonzero()[:, 0]
    chosen = torch.cat([
        torch.multinomial(expected[reachable].float(), 1, generator=generator),
        torch.randint(len(reachable), (1,), generator=generator),
        expected[reachable].argsort()[:1],
    ])  # fmt: skip
    end = expected.cumsum(0)
    uniforms = (end - expected / 2)[reachable[chosen]].clamp(max=1 - 2.0**-BITS)
    sampled = shape.draw(SHIPPED, uniforms, "triton")
    assert (expected[sampled] > 0).all()
    assert (end[sampled] >= uniforms - BOUND).all()
    assert (end[sampled] - expected[sampled] <= uniforms + BOUND).all()
