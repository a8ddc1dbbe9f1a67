"""The probability with which each token is drawn, to 1e-6 in total variation.

Counting draws cannot tell 1e-6. These tests find, for every token, how many of the 2^52 uniforms draw it: a draw is the
inverse of a cumulative distribution, so the first uniform that draws a token behind v is found by bisection. A small
vocabulary is measured whole this way, through the kernel and through the reference; on a GPU the shipped vocabulary
is too. Without one, a replica of the kernel's sums in numpy gives the distribution over the shipped vocabulary; it must
agree with the kernel uniform for uniform on the small one, and on chosen tokens of the shipped one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import triton

from specdec_kernels import SamplingTensors, pick_tokens
from specdec_kernels.sampling.configs import SELECTION
from specdec_kernels.sampling.reference import row_distribution

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL, SHIPPED = 197, 151_936
BITS = 52
REACHABLE = 2.0**-50
BOUND = 1e-6
STEP, LANES, ENTRIES = 256, 32, 8  # tokens of a step; its lanes, and the neighbours of a lane
STEPS = SELECTION["interpreter"].steps  # steps of a strip


@dataclass(frozen=True)
class Shape:
    """Logits of a row, and what it is drawn with; the first, the last and a middle token have no weight."""

    name: str
    temperature: float = 1.0
    top_p: float | None = None

    def logits(self, vocab: int) -> torch.Tensor:
        noise = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
        logits = {
            "flat": noise * 0,
            "hot": noise * 2,
            "plain": noise * 3,
            "peaked": noise * 2 - 12,
            "two_level": torch.where(torch.arange(vocab) % 37 == 5, 4.0, -9.0),
            "top_p": noise * 2,
        }[self.name]
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


def measured(shape: Shape, vocab: int, impl: str) -> torch.Tensor:
    """[V] float64: the share of all uniforms that draw each token, by bisection for every token at once."""
    low = torch.zeros(vocab - 1, dtype=torch.int64)
    high = torch.full_like(low, 1 << BITS)  # the first step that draws a token behind v lies in [low, high]
    token = torch.arange(vocab - 1)
    while (low < high).any():
        middle = (low + high) // 2
        behind = shape.draw(vocab, midpoints(middle.clamp(max=(1 << BITS) - 1)), impl) > token
        high = torch.where(behind & (low < high), middle, high)
        low = torch.where(~behind & (low < high), middle + 1, low)
    edges = torch.cat([torch.zeros(1, dtype=torch.int64), low, torch.full((1,), 1 << BITS)])
    return edges.diff().double() * 2.0**-BITS


class Replica:
    """The kernel's sums of an unfiltered row, or of one whose floor is known, in numpy.

    Strips of STEPS * STEP tokens have float32 masses. A draw goes by whole units of 2^-60 of the strips' total, and
    inside the strip by those of the strip's mass.
    """

    def __init__(self, shape: Shape, vocab: int) -> None:
        steps = min(STEPS, triton.next_power_of_2(-(-vocab // STEP)))
        self.length = steps * STEP
        strips = -(-vocab // self.length)
        values = np.full(strips * self.length, -np.inf, np.float32)
        values[:vocab] = shape.logits(vocab).numpy()
        kept = np.zeros(values.shape, bool)
        kept[:vocab] = shape.distribution(vocab).numpy() > 0
        values, kept = values.reshape(strips, -1), kept.reshape(strips, -1)
        scale = np.float32(1) / np.float32(shape.temperature) * np.float32(1.4426950408889634)
        peaks = values.max(1)
        top = peaks.max()
        weights = np.where(kept, np.exp2((values - top) * scale), np.float32(0))
        of_strips = weights.sum(1)
        if shape.top_p is None:
            over = np.where(np.isfinite(peaks), peaks, 0)[:, None]
            entries = np.exp2((values - over) * scale).reshape(strips, steps, LANES, ENTRIES)
            of_strips = entries.transpose(1, 0, 2, 3).sum(3).sum(0).sum(1) * np.exp2((peaks - top) * scale)
        padded = np.zeros((1, max(triton.next_power_of_2(strips), 8)), np.float32)
        padded[0, :strips] = of_strips
        self.vocab = vocab
        self.of_strips = self._units(padded, padded.sum(1))[0, :strips]
        self.of_tokens = self._units(weights, of_strips)

    @staticmethod
    def _units(weights: np.ndarray, total: np.ndarray) -> np.ndarray:
        inverse = (np.float32(1) / np.where(total > 0, total, np.float32(1)))[:, None]
        return (weights * inverse * np.float32(2.0**60)).astype(np.int64)

    def distribution(self) -> torch.Tensor:
        strip = self.of_strips / self.of_strips.sum()
        inside = self.of_tokens / np.maximum(self.of_tokens.sum(1, keepdims=True), 1)
        return torch.from_numpy((strip[:, None] * inside).ravel()[: self.vocab])

    def uniforms_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """A uniform in the middle of those that draw each token."""
        strip, place = tokens.numpy() // self.length, tokens.numpy() % self.length
        # np.longdouble, because the quotients need more bits than a float64 has.
        inside = self._share(self.of_tokens[strip], place, np.full(len(place), 0.5, np.longdouble))
        strips = np.broadcast_to(self.of_strips, (len(place), len(self.of_strips)))
        steps = self._share(strips, strip, inside) * np.longdouble(2.0**BITS)
        return midpoints(torch.from_numpy(steps.astype(np.int64)))

    @staticmethod
    def _share(held: np.ndarray, place: np.ndarray, inside: np.ndarray) -> np.ndarray:
        """Share of the units `held [R, E]` that lie before the point `inside` of entry `place` of each row."""
        before = np.where(np.arange(held.shape[1]) < place[:, None], held, 0).sum(1)
        own = held[np.arange(len(place)), place].astype(np.longdouble)
        return (before + own * inside) / held.sum(1).astype(np.longdouble)


def assert_exact(seen: torch.Tensor, expected: torch.Tensor, bound: float = BOUND) -> None:
    assert 0.5 * (seen - expected).abs().sum() <= bound
    assert (seen[expected >= REACHABLE] > 0).all(), "a token that no uniform draws"
    assert not seen[expected == 0].any(), "a token without weight is drawn"


@every_shape
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_every_uniform_over_a_small_vocabulary(shape: Shape, impl: str) -> None:
    seen = measured(shape, SMALL, impl)
    assert_exact(seen, shape.distribution(SMALL), bound=1e-12 if impl == "reference" else BOUND)
    if impl == "triton" and DEVICE == "cpu" and shape.top_p is None:
        assert (seen - Replica(shape, SMALL).distribution()).abs().max() <= 2.0 ** -(BITS - 2)


@every_shape
def test_the_shipped_vocabulary(shape: Shape) -> None:
    """The whole distribution, from the kernel on a GPU and else from the replica."""
    seen = measured(shape, SHIPPED, "triton") if DEVICE == "cuda" else Replica(shape, SHIPPED).distribution()
    assert_exact(seen, shape.distribution(SHIPPED))


@every_shape
def test_chosen_tokens_of_the_shipped_vocabulary(shape: Shape) -> None:
    """Through the kernel: likely tokens, any tokens and the least likely reachable ones, each at a uniform of its own.

    The replica tells every bit of an unfiltered draw in the interpreter. Elsewhere sums are rounded in another order:
    the cumulative distribution at the token is then the uniform within the bound.
    """
    expected = shape.distribution(SHIPPED)
    generator = torch.Generator().manual_seed(1)
    reachable = (expected >= REACHABLE).nonzero()[:, 0]
    chosen = torch.cat([
        torch.multinomial(expected[reachable].float(), 6, generator=generator).sort().values,
        torch.randint(len(reachable), (6,), generator=generator),
        expected[reachable].argsort()[:6],
    ])  # fmt: skip
    tokens = reachable[chosen]
    uniforms = Replica(shape, SHIPPED).uniforms_of(tokens)
    drawn = shape.draw(SHIPPED, uniforms, "triton")
    if DEVICE == "cpu" and shape.top_p is None:
        assert torch.equal(drawn, tokens)
    assert (expected[drawn] > 0).all()
    end = expected.cumsum(0)
    assert (end[drawn] >= uniforms - BOUND).all()
    assert (end[drawn] - expected[drawn] <= uniforms + BOUND).all()
