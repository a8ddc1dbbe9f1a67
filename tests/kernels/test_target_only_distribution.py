"""Sampling under `target_only` is judged by its distribution: the joint distribution of four tokens under two designs,
exact distributions on a grid of uniforms, and faults that both must refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec_kernels import (
    Accepted,
    SamplingTensors,
    TreeLinks,
    accept,
    build_chain,
    build_tree,
    pick_tokens,
)
from tests.kernels.distributions import (
    EMITTED,
    FILTER,
    OFF,
    SHAPES,
    AcceptFunction,
    Design,
    Filter,
    assert_distribution,
    banned_now_and_then,
    decode,
    greedy_at_a_temperature,
    greedy_continuation,
    make_design,
    replaced_bonus,
    sampling_fault,
    temperature_ignored,
)

ROWS = 60_000
FAULTY_ROWS = 40_000
KERNEL_ROWS = 1_500  # their tokens are also those of the reference, one by one
TEMPERATURE = 0.7
GRID = 1 << 18
GRID_VOCAB = 16
# Midpoints misplace each border of the cumulative distribution by half a step at most, so each share by one step.
GRID_BOUND = GRID_VOCAB / (2 * GRID)

if torch.cuda.is_available():
    pytest.skip("these run on the CPU, where reference and interpreter can be compared", allow_module_level=True)


def at(rows: int, temperature: float = TEMPERATURE) -> torch.Tensor:
    return torch.full((rows,), temperature)


@pytest.mark.parametrize("chosen", [OFF, FILTER], ids=["plain", "filtered"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("design", ["agreeing", "opposed"])
def test_joint_distribution(design: str, shape: str, chosen: Filter) -> None:
    made = make_design(design)
    assert_distribution(decode(accept, made, shape, at(ROWS), chosen=chosen), made, TEMPERATURE, chosen)


@pytest.mark.parametrize("chosen", [OFF, FILTER], ids=["plain", "filtered"])
@pytest.mark.parametrize("shape", SHAPES)
def test_joint_distribution_of_the_kernel(shape: str, chosen: Filter) -> None:
    made, rows = make_design("opposed"), KERNEL_ROWS if chosen == OFF else KERNEL_ROWS // 2
    tokens = decode(accept, made, shape, at(rows), impl="triton", chosen=chosen)
    assert_distribution(tokens, made, TEMPERATURE, chosen)
    assert torch.equal(tokens, decode(accept, made, shape, at(rows), chosen=chosen))


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
    assert torch.equal(decode(accept, made, shape, temperature), torch.stack(alone, 1))


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    made = make_design("agreeing")
    temperature = at(2 * FAULTY_ROWS)
    temperature[::2] = 0.0
    tokens = decode(accept, made, "tree", temperature)
    assert_distribution(tokens[1::2], made, TEMPERATURE)
    assert (tokens[::2] == greedy_continuation(made)).all()


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_seed_gives_its_tokens_at_any_batch_position(impl: str) -> None:
    made, rows = make_design("opposed"), 64
    whole = decode(accept, made, "tree", at(rows), first_seed=900, impl=impl)
    for row in (0, 17, rows - 1):
        assert torch.equal(decode(accept, made, "tree", at(1), first_seed=900 + row, impl=impl)[0], whole[row])


def off_by_one_bonus_row(*call: Any, sampling: SamplingTensors, impl: str) -> Accepted:
    """The bonus is drawn from the row before the last accepted node."""
    _, tokens, tree, logits, *_ = call
    right = accept(*call, sampling=sampling, impl=impl)
    last = right.num_accepted.long()[:, None]
    before = right.nodes.gather(1, (last - 1).clamp(min=0))[:, 0].long()
    here = right.nodes.gather(1, last)[:, 0].long()
    rows = torch.arange(len(tokens))
    wrong = pick_tokens(logits[rows, before], sampling, tree.positions[rows, here], impl=impl).tokens
    return replaced_bonus(right, wrong)


def siblings_swapped(rule: str, tokens: torch.Tensor, *call: Any, **keys: Any) -> Accepted:
    """A match continues at its sibling's node."""
    swapped = tokens.clone()
    swapped[:, 1], swapped[:, 2] = tokens[:, 2], tokens[:, 1]
    return accept(rule, swapped, *call, **keys)


def first_child_always_accepted(
    rule: str, tokens: torch.Tensor, tree: TreeLinks, logits: torch.Tensor, *call: Any, **keys: Any
) -> Accepted:
    forced = logits.clone()
    forced[:, 0] = float("-inf")
    forced[torch.arange(len(tokens)), 0, tokens[:, 1]] = 0.0
    return accept(rule, tokens, tree, forced, *call, **keys)


def uniform_shared_across_depths(rule: str, tokens: torch.Tensor, tree: TreeLinks, *call: Any, **keys: Any) -> Accepted:
    flat = tree._replace(positions=tree.positions[:, :1].expand_as(tree.positions).contiguous())
    return accept(rule, tokens, flat, *call, **keys)


def uniform_shared_across_steps(rule: str, tokens: torch.Tensor, tree: TreeLinks, *call: Any, **keys: Any) -> Accepted:
    return accept(rule, tokens, tree._replace(positions=tree.depth.long()), *call, **keys)


seed_ignored = sampling_fault("seed_ignored", lambda s: s._replace(seeds=torch.zeros_like(s.seeds)))
# The limit is taken from the distribution at temperature 1.
min_p_before_temperature = sampling_fault(
    "min_p_before_temperature", lambda s: s._replace(min_p=s.min_p ** (1 / s.temperature))
)
top_k_ignored = sampling_fault("top_k_ignored", lambda s: s._replace(top_k=None))
top_k_off_by_one = sampling_fault("top_k_off_by_one", lambda s: s._replace(top_k=s.top_k - 1))
# A token is kept only if the mass up to and with it is below p.
top_p_one_token_short = sampling_fault("top_p_one_token_short", lambda s: s._replace(top_p=s.top_p - 0.25))


def padding_is_a_sibling(
    rule: str, tokens: torch.Tensor, tree: TreeLinks, logits: torch.Tensor, lengths: torch.Tensor, *call: Any,
    impl: str, **keys: Any,
) -> Accepted:  # fmt: skip
    """Unused nodes hang under the root."""
    shape = next(parents for parents in SHAPES.values() if len(parents) == tokens.shape[1])
    parents = torch.tensor(shape, dtype=torch.int32).clamp(min=0).repeat(len(tokens), 1)
    linked = build_tree(parents, lengths, impl=impl)
    return accept(rule, tokens, linked, logits, lengths, *call, impl=impl, **keys)


FAULTS: list[tuple[AcceptFunction, str, str]] = [
    (off_by_one_bonus_row, "agreeing", "chain"),
    (off_by_one_bonus_row, "agreeing", "tree"),
    (siblings_swapped, "agreeing", "tree"),
    (first_child_always_accepted, "agreeing", "tree"),
    (first_child_always_accepted, "opposed", "chain"),
    (temperature_ignored, "agreeing", "chain"),
    (temperature_ignored, "opposed", "tree"),
    (uniform_shared_across_depths, "agreeing", "chain"),
    (uniform_shared_across_steps, "opposed", "chain"),
    (seed_ignored, "agreeing", "tree"),
    (greedy_at_a_temperature, "agreeing", "chain"),
    (banned_now_and_then, "opposed", "tree"),
    (padding_is_a_sibling, "agreeing", "chain"),
    (padding_is_a_sibling, "opposed", "tree"),
]


@pytest.mark.parametrize("fault, design, shape", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_the_distribution_refuses_a_fault(fault: AcceptFunction, design: str, shape: str) -> None:
    made = make_design(design)
    with pytest.raises(AssertionError, match="chi-square|banned token"):
        assert_distribution(decode(fault, made, shape, at(FAULTY_ROWS)), made, TEMPERATURE)


@pytest.mark.parametrize(
    "fault, design, shape",
    [
        (min_p_before_temperature, "agreeing", "tree"),
        (top_k_ignored, "agreeing", "chain"),
        (top_k_off_by_one, "opposed", "tree"),
        (top_p_one_token_short, "agreeing", "chain"),
        (temperature_ignored, "opposed", "chain"),
        (off_by_one_bonus_row, "agreeing", "chain"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_filtered_distribution_refuses_a_fault(fault: AcceptFunction, design: str, shape: str) -> None:
    made, chosen = make_design(design), Filter(top_k=4, top_p=0.95, min_p=0.1)
    assert_distribution(decode(accept, made, shape, at(FAULTY_ROWS), chosen=chosen), made, TEMPERATURE, chosen)
    with pytest.raises(AssertionError, match="chi-square|was emitted"):
        assert_distribution(decode(fault, made, shape, at(FAULTY_ROWS), chosen=chosen), made, TEMPERATURE, chosen)


def grid() -> torch.Tensor:
    """Midpoints of GRID equal parts of [0, 1)."""
    return (torch.arange(GRID) + 0.5).double() / GRID


def total_variation(tokens: torch.Tensor, expected: torch.Tensor) -> float:
    seen = torch.bincount(tokens, minlength=len(expected)).double() / len(tokens)
    return 0.5 * (seen - expected).abs().sum().item()


def drawn_on_the_grid(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[GRID] tokens, one per uniform of the grid."""
    rows, sampling = logits.expand(GRID, GRID_VOCAB), SamplingTensors(at(GRID, temperature))
    return pick_tokens(rows, sampling, uniforms=grid(), impl="reference").tokens


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_exact_distribution_of_a_draw(temperature: float) -> None:
    """Of the definition; `test_exact_distribution` measures the kernel's, to a finer bound."""
    logits = torch.randn(GRID_VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    drawn = drawn_on_the_grid(logits, temperature)
    assert total_variation(drawn, torch.softmax(logits.double() / temperature, -1)) <= GRID_BOUND


def test_the_exact_distribution_refuses_half_precision() -> None:
    """Logits rounded to bfloat16 shift it by more than the bound, though no sampling test could tell."""
    logits = torch.randn(GRID_VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    drawn = drawn_on_the_grid(logits.bfloat16().float(), 1.0)
    assert total_variation(drawn, torch.softmax(logits.double(), -1)) > 3 * GRID_BOUND


@pytest.mark.parametrize("drafted", [0, 7, 15])
def test_exact_distribution_of_both_rows_of_a_chain(drafted: int) -> None:
    """A grid at the root gives the first token's distribution whatever was drafted; at the draft, the bonus's."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(2, GRID_VOCAB, generator=generator) * 2
    lengths = torch.zeros(GRID, dtype=torch.int64)
    tree = build_chain(lengths, 2, impl="reference")
    tokens = torch.tensor([3, drafted]).repeat(GRID, 1)
    rows = logits.repeat(GRID, 1, 1)

    def emitted(uniforms: torch.Tensor) -> Accepted:
        sampling = SamplingTensors(at(GRID, 1.0))
        return accept(
            "target_only", tokens, tree, rows, lengths, 1, sampling, uniforms=uniforms, impl="reference"
        )  # fmt: skip

    expected = torch.softmax(logits.double(), -1)
    first = emitted(torch.stack([grid(), grid().flip(0)], 1)).tokens[:, 0]
    assert total_variation(first, expected[0]) <= GRID_BOUND
    inside = expected[0, :drafted].sum() + expected[0, drafted] / 2
    second = emitted(torch.stack([inside.expand(GRID), grid()], 1))
    assert (second.num_accepted == 1).all()
    assert total_variation(second.bonus, expected[1]) <= GRID_BOUND


def test_designs_exercise_what_they_claim() -> None:
    """Whole blocks are accepted in one design, misses and drafted banned tokens happen in the other."""
    counts: dict[str, torch.Tensor] = {}
    for name in ("agreeing", "opposed"):
        made: Design = make_design(name)

        def counting(*args, name: str = name, **keys) -> Accepted:
            accepted = accept(*args, **keys)
            seen = torch.bincount(accepted.num_accepted.long(), minlength=4).double()
            counts[name] = counts.get(name, torch.zeros(4, dtype=torch.float64)) + seen
            return accepted

        decode(counting, made, "chain", at(5000))
    assert counts["agreeing"][3] > 0.05 * counts["agreeing"].sum()
    assert counts["opposed"][0] > 0.5 * counts["opposed"].sum()
    assert (make_design("opposed").children == 5).any()
