"""Sampling is judged by its law: the joint law of four tokens under two designs, exact laws on a grid of
uniforms.

Each design is also run on acceptance functions with a known fault, and must refuse them: a law test that has
never failed proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specdec_kernels import Accepted, TreeLinks, accept, build_chain, build_tree, pick_tokens
from tests.kernels.laws import (
    EMITTED,
    FILTER,
    OFF,
    SHAPES,
    Design,
    Filter,
    assert_law,
    decode,
    make_design,
    replaced_bonus,
)

ROWS = 60_000
FAULTY_ROWS = 40_000
KERNEL_ROWS = 12_000
TEMPERATURE = 0.7
GRID = 1 << 18
GRID_VOCAB = 16
# Midpoints misplace each border of the cumulative law by half a step at most, so each share by one step.
GRID_BOUND = GRID_VOCAB / (2 * GRID)

if torch.cuda.is_available():
    pytest.skip("the laws are run on the CPU, where reference and interpreter are at hand", allow_module_level=True)


def warm(rows: int, temperature: float = TEMPERATURE) -> torch.Tensor:
    return torch.full((rows,), temperature)


@pytest.mark.parametrize("chosen", [OFF, FILTER], ids=["plain", "filtered"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("design", ["agreeing", "opposed"])
def test_joint_law(design: str, shape: str, chosen: Filter) -> None:
    made = make_design(design)
    assert_law(decode(accept, made, shape, warm(ROWS), chosen=chosen), made, TEMPERATURE, chosen)


@pytest.mark.parametrize("chosen", [OFF, FILTER], ids=["plain", "filtered"])
@pytest.mark.parametrize("shape", SHAPES)
def test_joint_law_of_the_kernel(shape: str, chosen: Filter) -> None:
    made, rows = make_design("opposed"), KERNEL_ROWS if chosen == OFF else KERNEL_ROWS // 4
    tokens = decode(accept, made, shape, warm(rows), impl="triton", chosen=chosen)
    assert_law(tokens, made, TEMPERATURE, chosen)
    assert torch.equal(tokens, decode(accept, made, shape, warm(rows), chosen=chosen))


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_autoregressive_sampling(shape: str) -> None:
    made, rows = make_design("agreeing"), 4000
    temperature = warm(rows)
    temperature[::3] = 0.0
    context = torch.zeros(rows, dtype=torch.int64)
    alone = []
    for step in range(EMITTED):
        positions = torch.full((rows,), 3 + step)
        context = pick_tokens(made.logits[context], temperature, torch.arange(rows), positions, impl="reference").tokens
        alone.append(context)
    assert torch.equal(decode(accept, made, shape, temperature), torch.stack(alone, 1))


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    made = make_design("agreeing")
    temperature = warm(2 * FAULTY_ROWS)
    temperature[::2] = 0.0
    tokens = decode(accept, made, "tree", temperature)
    assert_law(tokens[1::2], made, TEMPERATURE)
    greedy, context = [], 0
    for _ in range(EMITTED):
        context = int(made.logits[context].argmax())
        greedy.append(context)
    assert (tokens[::2] == torch.tensor(greedy)).all()


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_seed_gives_its_tokens_at_any_batch_position(impl: str) -> None:
    made, rows = make_design("opposed"), 64
    whole = decode(accept, made, "tree", warm(rows), first_seed=900, impl=impl)
    for row in (0, 17, rows - 1):
        assert torch.equal(decode(accept, made, "tree", warm(1), first_seed=900 + row, impl=impl)[0], whole[row])


def off_by_one_bonus_row(
    rule, tokens, tree, logits, lengths, max_depth, *, temperature, seeds, impl, **filters
) -> Accepted:
    """The bonus is drawn from the row before the last accepted node."""
    keys = dict(temperature=temperature, seeds=seeds, impl=impl, **filters)
    right = accept(rule, tokens, tree, logits, lengths, max_depth, **keys)
    last = right.num_accepted.long()[:, None]
    before = right.nodes.gather(1, (last - 1).clamp(min=0))[:, 0].long()
    here = right.nodes.gather(1, last)[:, 0].long()
    rows = torch.arange(len(tokens))
    wrong = pick_tokens(logits[rows, before], positions=tree.positions[rows, here], **keys).tokens
    return replaced_bonus(right, wrong)


def siblings_swapped(rule, tokens, tree, logits, lengths, max_depth, **keys) -> Accepted:
    """A match continues at its sibling's node."""
    swapped = tokens.clone()
    swapped[:, 1], swapped[:, 2] = tokens[:, 2], tokens[:, 1]
    return accept(rule, swapped, tree, logits, lengths, max_depth, **keys)


def first_child_always_accepted(rule, tokens, tree, logits, lengths, max_depth, **keys) -> Accepted:
    forced = logits.clone()
    forced[:, 0] = float("-inf")
    forced[torch.arange(len(tokens)), 0, tokens[:, 1]] = 0.0
    return accept(rule, tokens, tree, forced, lengths, max_depth, **keys)


def temperature_ignored(rule, tokens, tree, logits, lengths, max_depth, *, temperature, **keys) -> Accepted:
    one = torch.ones_like(temperature)
    return accept(rule, tokens, tree, logits, lengths, max_depth, temperature=one, **keys)


def coin_shared_across_depths(rule, tokens, tree: TreeLinks, logits, lengths, max_depth, **keys) -> Accepted:
    flat = tree._replace(positions=tree.positions[:, :1].expand_as(tree.positions).contiguous())
    return accept(rule, tokens, flat, logits, lengths, max_depth, **keys)


def coin_shared_across_steps(rule, tokens, tree: TreeLinks, logits, lengths, max_depth, **keys) -> Accepted:
    by_depth = tree._replace(positions=tree.depth.long())
    return accept(rule, tokens, by_depth, logits, lengths, max_depth, **keys)


def seed_ignored(rule, tokens, tree, logits, lengths, max_depth, *, seeds, **keys) -> Accepted:
    return accept(rule, tokens, tree, logits, lengths, max_depth, seeds=torch.zeros_like(seeds), **keys)


def greedy_at_a_temperature(rule, tokens, tree, logits, lengths, max_depth, *, temperature, **keys) -> Accepted:
    return accept("greedy", tokens, tree, logits, lengths, max_depth, **keys)


def banned_now_and_then(rule, tokens, tree, logits, lengths, max_depth, *, seeds, **keys) -> Accepted:
    """The last token of the vocabulary comes out once in a thousand."""
    right = accept(rule, tokens, tree, logits, lengths, max_depth, seeds=seeds, **keys)
    last = torch.full_like(right.bonus, logits.shape[-1] - 1)
    return replaced_bonus(right, torch.where(seeds % 1000 == 0, last, right.bonus))


def min_p_before_temperature(rule, tokens, tree, logits, lengths, max_depth, *, min_p, temperature, **keys) -> Accepted:
    """The limit is taken from the law at temperature 1."""
    moved = min_p ** (1 / temperature)
    return accept(rule, tokens, tree, logits, lengths, max_depth, min_p=moved, temperature=temperature, **keys)


def top_k_ignored(rule, tokens, tree, logits, lengths, max_depth, *, top_k, **keys) -> Accepted:
    return accept(rule, tokens, tree, logits, lengths, max_depth, **keys)


def top_k_off_by_one(rule, tokens, tree, logits, lengths, max_depth, *, top_k, **keys) -> Accepted:
    return accept(rule, tokens, tree, logits, lengths, max_depth, top_k=top_k - 1, **keys)


def top_p_one_token_short(rule, tokens, tree, logits, lengths, max_depth, *, top_p, **keys) -> Accepted:
    """A token is kept only if the mass up to and with it is below p."""
    return accept(rule, tokens, tree, logits, lengths, max_depth, top_p=top_p - 0.25, **keys)


def padding_is_a_sibling(rule, tokens, tree, logits, lengths, max_depth, *, impl, **keys) -> Accepted:
    """Unused nodes hang under the root."""
    shape = next(parents for parents in SHAPES.values() if len(parents) == tokens.shape[1])
    parents = torch.tensor(shape, dtype=torch.int32).clamp(min=0).repeat(len(tokens), 1)
    linked = build_tree(parents, lengths, impl=impl)
    return accept(rule, tokens, linked, logits, lengths, max_depth, impl=impl, **keys)


FAULTS: list[tuple[Callable[..., Accepted], str, str]] = [
    (off_by_one_bonus_row, "agreeing", "chain"),
    (off_by_one_bonus_row, "agreeing", "tree"),
    (siblings_swapped, "agreeing", "tree"),
    (first_child_always_accepted, "agreeing", "tree"),
    (first_child_always_accepted, "opposed", "chain"),
    (temperature_ignored, "agreeing", "chain"),
    (temperature_ignored, "opposed", "tree"),
    (coin_shared_across_depths, "agreeing", "chain"),
    (coin_shared_across_steps, "opposed", "chain"),
    (seed_ignored, "agreeing", "tree"),
    (greedy_at_a_temperature, "agreeing", "chain"),
    (banned_now_and_then, "opposed", "tree"),
    (padding_is_a_sibling, "agreeing", "chain"),
    (padding_is_a_sibling, "opposed", "tree"),
]


@pytest.mark.parametrize("fault, design, shape", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_the_law_refuses_a_fault(fault: Callable[..., Accepted], design: str, shape: str) -> None:
    made = make_design(design)
    with pytest.raises(AssertionError, match="chi-square|banned token"):
        assert_law(decode(fault, made, shape, warm(FAULTY_ROWS)), made, TEMPERATURE)


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
def test_the_filtered_law_refuses_a_fault(fault: Callable[..., Accepted], design: str, shape: str) -> None:
    made, chosen = make_design(design), Filter(top_k=4, top_p=0.95, min_p=0.1)
    assert_law(decode(accept, made, shape, warm(FAULTY_ROWS), chosen=chosen), made, TEMPERATURE, chosen)
    with pytest.raises(AssertionError, match="chi-square|was emitted"):
        assert_law(decode(fault, made, shape, warm(FAULTY_ROWS), chosen=chosen), made, TEMPERATURE, chosen)


def grid() -> torch.Tensor:
    """Midpoints of GRID equal parts of [0, 1), all exact in float32."""
    return (torch.arange(GRID) + 0.5) / GRID


def total_variation(tokens: torch.Tensor, law: torch.Tensor) -> float:
    seen = torch.bincount(tokens, minlength=len(law)).double() / len(tokens)
    return 0.5 * (seen - law).abs().sum().item()


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_exact_law_of_a_draw(temperature: float, impl: str) -> None:
    logits = torch.randn(GRID_VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    law = torch.softmax(logits.double() / temperature, -1)
    drawn = pick_tokens(logits.expand(GRID, GRID_VOCAB), warm(GRID, temperature), uniforms=grid(), impl=impl).tokens
    assert total_variation(drawn, law) <= GRID_BOUND


def test_the_exact_law_refuses_half_precision() -> None:
    """Logits rounded to bfloat16 shift the law by more than the bound, though no sampling test could tell."""
    logits = torch.randn(GRID_VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    rounded = logits.bfloat16().float()
    drawn = pick_tokens(rounded.expand(GRID, GRID_VOCAB), warm(GRID, 1.0), uniforms=grid(), impl="reference").tokens
    assert total_variation(drawn, torch.softmax(logits.double(), -1)) > 3 * GRID_BOUND


@pytest.mark.parametrize("drafted", [0, 7, 15])
def test_exact_law_of_both_rows_of_a_chain(drafted: int) -> None:
    """A grid at the root gives the first token's law whatever was drafted; at the draft, the bonus's."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(2, GRID_VOCAB, generator=generator) * 2
    lengths = torch.zeros(GRID, dtype=torch.int64)
    tree = build_chain(lengths, 2, impl="reference")
    tokens = torch.tensor([3, drafted]).repeat(GRID, 1)
    rows = logits.repeat(GRID, 1, 1)

    def emitted(uniforms: torch.Tensor) -> Accepted:
        return accept(
            "target_only",
            tokens,
            tree,
            rows,
            lengths,
            1,
            temperature=warm(GRID, 1.0),
            uniforms=uniforms,
            impl="reference",
        )

    laws = torch.softmax(logits.double(), -1)
    first = emitted(torch.stack([grid(), grid().flip(0)], 1)).tokens[:, 0]
    assert total_variation(first, laws[0]) <= GRID_BOUND
    inside = laws[0, :drafted].sum() + laws[0, drafted] / 2
    second = emitted(torch.stack([inside.float().expand(GRID), grid()], 1))
    assert (second.num_accepted == 1).all()
    assert total_variation(second.bonus, laws[1]) <= GRID_BOUND


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

        decode(counting, made, "chain", warm(5000))
    assert counts["agreeing"][3] > 0.05 * counts["agreeing"].sum()
    assert counts["opposed"][0] > 0.5 * counts["opposed"].sum()
    assert (make_design("opposed").children == 5).any()
