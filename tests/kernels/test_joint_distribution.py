"""Sampling under `target_only` and the rules for sampled chains: the joint distribution of four tokens under several
relations of draft and target. `tests/mutants/acceptance.txt` has faults that it must refuse."""

from typing import Any

import pytest
import torch

from specdec_kernels import Accepted, SamplingTensors, accept, pick_tokens
from tests.kernels.distributions import (
    DEPTH,
    EMITTED,
    FILTERS,
    OFF,
    SHAPES,
    Filter,
    assert_distribution,
    decode,
    greedy_continuation,
    make_design,
)

CHAINS = [("rejection", "chain"), ("block", "chain")]
WAYS = [("target_only", "chain"), ("target_only", "tree"), *CHAINS]
ROWS = 16_000
TEMPERATURE = 0.7

if torch.cuda.is_available():
    pytest.skip("these run on the CPU, where reference and interpreter can be compared", allow_module_level=True)


def at(rows: int) -> torch.Tensor:
    return torch.full((rows,), TEMPERATURE)


def filtered_or_not(value: str | Filter) -> str:
    return value if isinstance(value, str) else "plain" if value == OFF else "filtered"


@pytest.mark.parametrize(
    "design, chosen", [(design, chosen) for design in FILTERS for chosen in (OFF, FILTERS[design])], ids=filtered_or_not
)
@pytest.mark.parametrize("rule, shape", WAYS)
def test_joint_distribution(rule: str, shape: str, design: str, chosen: Filter) -> None:
    made = make_design(design)
    assert_distribution(decode(accept, made, rule, at(ROWS), shape, chosen=chosen), made, TEMPERATURE, chosen)


@pytest.mark.parametrize("rule, shape", WAYS)
def test_the_kernel_emits_the_tokens_of_the_reference(rule: str, shape: str) -> None:
    """All of them: parity passes over a sampled row at the border of two tokens."""
    made = make_design("opposed")
    tokens = decode(accept, made, rule, at(200), shape, impl="triton")
    assert torch.equal(tokens, decode(accept, made, rule, at(200), shape))


@pytest.mark.parametrize("design", ["identical", "disjoint"])
@pytest.mark.parametrize("rule, shape", CHAINS)
def test_joint_distribution_at_the_ends(rule: str, shape: str, design: str) -> None:
    """A draft that is the target (all is accepted, residuals are rounding) and one that never agrees."""
    made, seen = make_design(design), []

    def watched(*args: Any, **keys: Any) -> Accepted:
        seen.append(accept(*args, **keys))
        return seen[-1]

    tokens = decode(watched, made, rule, at(ROWS // 2), shape, draft_temperature=TEMPERATURE)
    assert_distribution(tokens, made, TEMPERATURE)
    assert all((step.num_accepted == (DEPTH if design == "identical" else 0)).all() for step in seen)


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_autoregressive_sampling(shape: str) -> None:
    made, rows = make_design("agreeing"), 4000
    temperature = at(rows)
    temperature[::3] = 0.0
    context = torch.zeros(rows, dtype=torch.int64)
    alone = []
    for step in range(EMITTED):
        positions = torch.full((rows,), 3 + step)
        sampling = SamplingTensors(temperature, seeds=torch.arange(rows))
        context = pick_tokens(made.logits[context], sampling, positions, impl="reference").tokens
        alone.append(context)
    assert torch.equal(decode(accept, made, "target_only", temperature, shape), torch.stack(alone, 1))


@pytest.mark.parametrize("rule, shape", WAYS[1:])
def test_greedy_and_sampled_rows_share_a_batch(rule: str, shape: str) -> None:
    made, temperature = make_design("agreeing"), at(2 * ROWS)
    temperature[::2] = 0.0
    tokens = decode(accept, made, rule, temperature, shape)
    assert_distribution(tokens[1::2], made, TEMPERATURE)
    assert (tokens[::2] == greedy_continuation(made)).all()


def test_a_seed_gives_its_tokens_at_any_batch_position(impl: str) -> None:
    made, rows = make_design("opposed"), 64
    whole = decode(accept, made, "target_only", at(rows), "tree", first_seed=900, impl=impl)
    for row in (0, 17, rows - 1):
        alone = decode(accept, made, "target_only", at(1), "tree", first_seed=900 + row, impl=impl)
        assert torch.equal(alone[0], whole[row])


def test_block_accepts_no_fewer_than_rejection() -> None:
    lengths = {}
    for rule, shape in CHAINS:
        counts: list[torch.Tensor] = []

        def counted(*args: Any, counts: list[torch.Tensor] = counts, **keys: Any) -> Accepted:
            accepted = accept(*args, **keys)
            counts.append(accepted.num_accepted)
            return accepted

        decode(counted, make_design("agreeing"), rule, at(ROWS), shape)
        lengths[rule] = torch.cat(counts).double().mean()
    assert lengths["block"] > lengths["rejection"] > 1
