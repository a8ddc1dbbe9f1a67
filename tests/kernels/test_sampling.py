"""The random stream bit by bit, rows that do not depend on their batch, and rows that cannot be sampled."""

import pytest
import torch
import triton
import triton.language as tl

from specdec_kernels import (
    ACCEPT_STREAM,
    BONUS_STREAM,
    DRAFT_STREAM,
    RECOVER_STREAM,
    TARGET_STREAM,
    SamplingTensors,
    pick_tokens,
)
from specdec_kernels.cases import Maker
from specdec_kernels.sampling import device
from specdec_kernels.sampling.cases import CASES
from specdec_kernels.sampling.reference import inverse_cdf, philox_uniform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXTREMES = [0, 1, -1, 2**32 - 1, 2**32, -(2**32), 2**63 - 1, -(2**63), 123456789012345678]


@triton.jit
def _uniforms_kernel(seeds, positions, out, size, BLOCK: tl.constexpr, STREAM: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    seed = tl.load(seeds + lane, mask=lane < size, other=0)
    position = tl.load(positions + lane, mask=lane < size, other=0)
    tl.store(out + lane, device.philox_uniform(seed, position, STREAM), mask=lane < size)


@pytest.mark.parametrize("stream", [0, 3])
def test_kernel_and_reference_share_one_random_stream(stream: int) -> None:
    seeds, positions = (
        grid.flatten().to(DEVICE)
        for grid in torch.meshgrid(torch.tensor(EXTREMES), torch.tensor(EXTREMES), indexing="ij")
    )
    out = torch.empty(len(seeds), dtype=torch.float64, device=DEVICE)
    _uniforms_kernel[(1,)](seeds, positions, out, len(seeds), 128, stream)
    assert torch.equal(out, philox_uniform(seeds, positions, stream))


@triton.jit
def _next_below_kernel(values, out, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    tl.store(out + lane, device.next_below(tl.load(values + lane)))


def test_the_next_float_below() -> None:
    """Zeros of both signs are one value, and the next one below it is the largest negative one."""
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([1.0, -1.0, 2.0**-149, 0.0, -0.0, -(2.0**-149), largest, 2.0], device=DEVICE)
    out = torch.empty_like(values)
    _next_below_kernel[(1,)](values, out, 8)
    assert torch.equal(out, torch.nextafter(values + 0.0, torch.full_like(values, -torch.inf)))


def test_a_goal_that_rounds_to_the_whole_is_the_last_token_with_weight() -> None:
    weights = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    assert inverse_cdf(weights, torch.ones(2, dtype=torch.float64)).tolist() == [1, 2]


def test_streams_of_random_numbers_are_disjoint() -> None:
    """Two uses that share a stream would be correlated wherever their keys meet, which few distributions show."""
    streams = [TARGET_STREAM, DRAFT_STREAM, ACCEPT_STREAM, RECOVER_STREAM, BONUS_STREAM]
    assert len(set(streams)) == len(streams)


def test_known_answer() -> None:
    """First words of Philox 4x32-10 for key 0 and counter 0, from the generator's published test vectors: the upper
    52 bits, and half a step."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert philox_uniform(zero, zero).item() == (0x6627E8D5E169C58D >> 12) / 2**52 + 2.0**-53


def test_uniforms_fill_the_unit_interval_and_streams_differ() -> None:
    positions = torch.arange(50_000)
    streams = [philox_uniform(torch.full_like(positions, 4), positions, stream) for stream in range(5)]
    streams += [philox_uniform(torch.full_like(positions, 4), positions, 2, torch.full_like(positions, 1))]
    for uniforms in streams:
        assert uniforms.min() > 0 and uniforms.max() < 1
        assert (uniforms * 2**53 % 2 == 1).all()  # midpoints: neither 0 nor 1 has one
        assert len(uniforms.unique()) == len(uniforms)
        counts = torch.histc(uniforms, 64, 0, 1)
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 140  # 63 degrees of freedom, one in a million
    correlation = torch.corrcoef(torch.stack(streams))
    assert (correlation - torch.eye(6)).abs().max() < 0.025


@pytest.mark.parametrize("name", ["pick_tile_plus_one", "pick_filtered_slots"])
def test_a_row_does_not_depend_on_its_batch(name: str, impl: str) -> None:
    inputs = next(case for case in CASES if case.name == name).build(Maker.seeded(DEVICE))
    logits, sampling, positions = inputs["logits"], inputs["sampling"], inputs["positions"]

    def picked(rows: slice) -> torch.Tensor:
        chosen = SamplingTensors(*(None if tensor is None else tensor[rows] for tensor in sampling))
        return pick_tokens(logits[rows], chosen, positions[rows], impl=impl).tokens

    whole, alone = picked(slice(None)), [picked(slice(row, row + 1)) for row in (1, 2, 4, len(logits) - 1)]
    assert torch.equal(whole[[1, 2, 4, -1]], torch.cat(alone))


def test_rows_without_a_usable_logit_are_marked(impl: str) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan] * 3, [-inf] * 3, [nan, -inf, 2.0], [1.0, inf, inf], [1.0, nan, 1.0]]).to(DEVICE)
    ones = torch.ones(5, device=DEVICE)
    for temperature in (None, ones):
        picked = pick_tokens(logits, SamplingTensors(temperature), uniforms=ones.double() * 0.25, impl=impl)
        assert picked.valid.tolist() == [False, False, True, True, True]
        assert picked.tokens.tolist() == [0, 0, 2, 1, 0]
