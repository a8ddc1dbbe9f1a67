"""The rules for drawn drafts, `rejection` and `block`, judged by their law: joint laws under several relations of
draft and target, the exact law of two tokens on a grid of uniforms, and faults that both must refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec_kernels import Accepted, accept, build_chain, filtered_probs, pick_tokens
from tests.kernels.laws import (
    DEPTH,
    EMITTED,
    FILTER,
    OFF,
    Filter,
    assert_law,
    decode_drawn,
    make_design,
    replaced_bonus,
)

RULES = ["rejection", "block"]
ROWS = 40_000
FAULTY_ROWS = 30_000
KERNEL_ROWS = 3_000
TEMPERATURE = 0.7

if torch.cuda.is_available():
    pytest.skip("the laws are run on the CPU, where reference and interpreter are at hand", allow_module_level=True)


def warm(rows: int) -> torch.Tensor:
    return torch.full((rows,), TEMPERATURE)


@pytest.mark.parametrize("chosen", [OFF, FILTER], ids=["plain", "filtered"])
@pytest.mark.parametrize("design", ["agreeing", "opposed"])
@pytest.mark.parametrize("rule", RULES)
def test_joint_law(rule: str, design: str, chosen: Filter) -> None:
    made = make_design(design)
    assert_law(decode_drawn(accept, made, rule, warm(ROWS), chosen=chosen), made, TEMPERATURE, chosen)


@pytest.mark.parametrize("design", ["identical", "disjoint"])
@pytest.mark.parametrize("rule", RULES)
def test_joint_law_at_the_ends(rule: str, design: str) -> None:
    """A draft that is the target (all is accepted, residuals are rounding) and one that never agrees."""
    made = make_design(design)
    seen: list[torch.Tensor] = []

    def watched(*args: Any, **keys: Any) -> Accepted:
        accepted = accept(*args, **keys)
        seen.append(accepted.num_accepted)
        return accepted

    tokens = decode_drawn(watched, made, rule, warm(ROWS // 2), draft_temperature=TEMPERATURE)
    assert_law(tokens, made, TEMPERATURE)
    counts = torch.cat(seen)
    assert (counts == (DEPTH if design == "identical" else 0)).all()


@pytest.mark.parametrize("design, chosen", [("agreeing", FILTER), ("opposed", OFF)], ids=["filtered", "plain"])
@pytest.mark.parametrize("rule", RULES)
def test_joint_law_of_the_kernel(rule: str, design: str, chosen: Filter) -> None:
    made = make_design(design)
    tokens = decode_drawn(accept, made, rule, warm(KERNEL_ROWS), impl="triton", chosen=chosen)
    assert_law(tokens, made, TEMPERATURE, chosen)
    assert torch.equal(tokens, decode_drawn(accept, made, rule, warm(KERNEL_ROWS), chosen=chosen))


@pytest.mark.parametrize("rule", RULES)
def test_greedy_and_sampled_rows_share_a_batch(rule: str) -> None:
    made = make_design("agreeing")
    temperature = warm(2 * FAULTY_ROWS)
    temperature[::2] = 0.0
    tokens = decode_drawn(accept, made, rule, temperature)
    assert_law(tokens[1::2], made, TEMPERATURE)
    greedy, context = [], 0
    for _ in range(EMITTED):
        context = int(made.logits[context].argmax())
        greedy.append(context)
    assert (tokens[::2] == torch.tensor(greedy)).all()


def test_block_accepts_no_fewer_than_rejection() -> None:
    lengths = {}
    for rule in RULES:
        total = [0, 0]

        def counted(*args: Any, total: list[int] = total, **keys: Any) -> Accepted:
            accepted = accept(*args, **keys)
            total[0] += int(accepted.num_accepted.sum())
            total[1] += len(accepted.num_accepted)
            return accepted

        decode_drawn(counted, make_design("agreeing"), rule, warm(FAULTY_ROWS))
        lengths[rule] = total[0] / total[1]
    assert lengths["block"] > lengths["rejection"] > 1


def residual_is_the_target(rule, tokens, tree, logits, lengths, max_depth, *, temperature, seeds, **keys) -> Accepted:
    """A rejected draft is replaced by a draw from the whole target law."""
    keys = dict(temperature=temperature, seeds=seeds, **keys)
    right = accept(rule, tokens, tree, logits, lengths, max_depth, **keys)
    last, rows = right.num_accepted.long(), torch.arange(len(tokens))
    keys.pop("draft_probs")
    fresh = pick_tokens(logits[rows, last], positions=lengths, stream=9, **keys).tokens
    return replaced_bonus(right, torch.where(last < DEPTH, fresh, right.bonus))


def residual_row_off_by_one(rule, tokens, tree, logits, lengths, max_depth, *, draft_probs, **keys) -> Accepted:
    rolled = torch.cat([draft_probs[:, 1:], draft_probs[:, -1:]], 1).contiguous()
    right = accept(rule, tokens, tree, logits, lengths, max_depth, draft_probs=draft_probs, **keys)
    wrong = accept(rule, tokens, tree, logits, lengths, max_depth, draft_probs=rolled, **keys)
    same = right.num_accepted == wrong.num_accepted
    return replaced_bonus(right, torch.where(same, wrong.bonus, right.bonus))


def bonus_row_off_by_one(rule, tokens, tree, logits, lengths, max_depth, *, temperature, seeds, **keys) -> Accepted:
    """Behind a whole chain the bonus comes from the row before the last."""
    keys = dict(temperature=temperature, seeds=seeds, **keys)
    right = accept(rule, tokens, tree, logits, lengths, max_depth, **keys)
    keys.pop("draft_probs")
    before = pick_tokens(logits[:, DEPTH - 1], positions=lengths, stream=9, **keys).tokens
    return replaced_bonus(right, torch.where(right.num_accepted == DEPTH, before, right.bonus))


def recorded_at_another_temperature(rule, tokens, tree, logits, lengths, max_depth, *, draft_probs, **keys) -> Accepted:
    """The recorded law is not the one the drafts were drawn from."""
    flatter = draft_probs**0.7
    flatter = flatter / flatter.sum(-1, keepdim=True)
    return accept(rule, tokens, tree, logits, lengths, max_depth, draft_probs=flatter, **keys)


def recorded_unfiltered(rule, tokens, tree, logits, lengths, max_depth, *, draft_probs, **keys) -> Accepted:
    """Drafts were drawn under filters that the recorded law knows nothing of."""
    made = make_design("agreeing")
    laws = filtered_probs(made.draft_logits, torch.full((5,), 0.9), impl="reference")[tokens[:, :-1]]
    return accept(rule, tokens, tree, logits, lengths, max_depth, draft_probs=laws.contiguous(), **keys)


def coin_recovers(rule, tokens, tree, logits, lengths, max_depth, *, seeds, **keys) -> Accepted:
    """A coin that rejected is used again to draw the token in place of the draft."""
    uniforms = torch.rand(len(tokens), tokens.shape[1] + 1, generator=torch.Generator().manual_seed(int(seeds[0])))
    uniforms[:, tokens.shape[1] - 1] = uniforms[:, 0 if rule == "rejection" else DEPTH - 1]
    return accept(rule, tokens, tree, logits, lengths, max_depth, uniforms=uniforms, **keys)


def one_coin_for_all(rule, tokens, tree, logits, lengths, max_depth, *, seeds, **keys) -> Accepted:
    uniforms = torch.rand(len(tokens), tokens.shape[1] + 1, generator=torch.Generator().manual_seed(int(seeds[0])))
    uniforms[:, : tokens.shape[1] - 1] = uniforms[:, :1]
    return accept(rule, tokens, tree, logits, lengths, max_depth, uniforms=uniforms, **keys)


def temperature_of_the_target_ignored(
    rule, tokens, tree, logits, lengths, max_depth, *, temperature, **keys
) -> Accepted:
    one = torch.ones_like(temperature)
    return accept(rule, tokens, tree, logits, lengths, max_depth, temperature=one, **keys)


def greedy_at_a_temperature(rule, tokens, tree, logits, lengths, max_depth, *, temperature, **keys) -> Accepted:
    return accept(rule, tokens, tree, logits, lengths, max_depth, temperature=0 * temperature, **keys)


def target_unfiltered(rule, tokens, tree, logits, lengths, max_depth, *, top_k, top_p, min_p, **keys) -> Accepted:
    return accept(rule, tokens, tree, logits, lengths, max_depth, **keys)


def padding_is_judged(rule, tokens, tree, logits, lengths, max_depth, **keys) -> Accepted:
    """The unused node behind the chain is taken for a draft."""
    return accept(rule, tokens, build_chain(lengths, tokens.shape[1]), logits, lengths, max_depth, **keys)


def banned_now_and_then(rule, tokens, tree, logits, lengths, max_depth, *, seeds, **keys) -> Accepted:
    right = accept(rule, tokens, tree, logits, lengths, max_depth, seeds=seeds, **keys)
    last = torch.full_like(right.bonus, logits.shape[-1] - 1)
    return replaced_bonus(right, torch.where(seeds % 1000 == 0, last, right.bonus))


FAULTS: list[tuple[Callable[..., Accepted], str, Filter]] = [
    (residual_is_the_target, "opposed", OFF),
    (residual_row_off_by_one, "opposed", OFF),
    (bonus_row_off_by_one, "agreeing", OFF),
    (recorded_at_another_temperature, "agreeing", OFF),
    (recorded_unfiltered, "agreeing", FILTER),
    (coin_recovers, "agreeing", OFF),
    (one_coin_for_all, "agreeing", OFF),
    (temperature_of_the_target_ignored, "opposed", OFF),
    (greedy_at_a_temperature, "agreeing", OFF),
    (target_unfiltered, "opposed", FILTER),
    (padding_is_judged, "agreeing", OFF),
    (banned_now_and_then, "opposed", OFF),
]


@pytest.mark.parametrize("fault, design, chosen", FAULTS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("rule", RULES)
def test_the_law_refuses_a_fault(rule: str, fault: Callable[..., Accepted], design: str, chosen: Filter) -> None:
    made = make_design(design)
    with pytest.raises(AssertionError, match="chi-square|was emitted"):
        assert_law(decode_drawn(fault, made, rule, warm(FAULTY_ROWS), chosen=chosen), made, TEMPERATURE, chosen)


GRID = {"reference": 1 << 13, "triton": 1 << 9}
VOCAB = 4
NEVER = 1 - 2.0**-24


def grid_bound(impl: str) -> float:
    """Every share is read from midpoints, which misplace each border by half a step; at most 2 + VOCAB meet."""
    return (2 + VOCAB) / (2 * GRID[impl])


def two_token_law(
    rule: str, target: torch.Tensor, draft: torch.Tensor, recorded: torch.Tensor, impl: str, chosen: Filter = OFF
) -> torch.Tensor:
    """[V, V] float64: exact law of the first two tokens that come of a chain of two drafts and the steps behind it.

    `target` and `recorded` are logits and laws of the three rows by context [V, V], drafts are drawn from `draft`.
    A step that emits one token goes on with the target's own law, which is what is to be shown of the next step.
    """
    size = GRID[impl]
    grid = ((torch.arange(size) + 0.5) / size).float()
    own = torch.softmax(target.double(), -1)
    own = torch.tensor([chosen(row) for row in own.tolist()], dtype=torch.float64)
    pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    tokens = torch.cat([torch.zeros(len(pairs), 1, dtype=torch.int64), pairs], 1).repeat_interleave(size, 0)
    lengths = torch.zeros(len(tokens), dtype=torch.int64)
    tree = build_chain(lengths, 3, impl="reference")

    def run(first: Any, second: Any, recover: Any) -> Accepted:
        columns = [torch.as_tensor(c, dtype=torch.float32).expand(size) for c in (first, second, recover, 0.5)]
        return accept(
            rule, tokens, tree, target[tokens], lengths, 2, temperature=torch.ones(len(tokens)),
            uniforms=torch.stack(columns, 1).repeat(len(pairs), 1), draft_probs=recorded[tokens[:, :2]],
            return_logprobs=False, impl=impl, **chosen.arguments(len(tokens)),
        )  # fmt: skip

    def share(accepted: Accepted, count: int) -> torch.Tensor:
        return (accepted.num_accepted >= count).double().view(VOCAB, VOCAB, size).mean(-1)

    def tokens_of(accepted: Accepted) -> torch.Tensor:
        return torch.nn.functional.one_hot(accepted.bonus, VOCAB).double().view(VOCAB, VOCAB, size, VOCAB).mean(2)

    one, two = share(run(grid, NEVER, 0.5), 1), share(run(0.0, grid, 0.5), 2)
    both = two if rule == "block" else one * two
    none = (1 - one) * (1 - two) if rule == "block" else 1 - one
    # A run whose coins cannot bring about its number of accepted drafts counts with weight zero.
    first, second = tokens_of(run(NEVER, NEVER, grid)), tokens_of(run(0.0, NEVER, grid))
    weight = draft[0][:, None].double() * draft.double()
    law = weight * both
    law += ((weight * (1 - both - none))[..., None] * second).sum(1)
    return law + (weight * none)[..., None].mul(first).sum((0, 1))[:, None] * own


def grid_models(seed: int, chosen: Filter = OFF) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Target logits [V, V], draft laws [V, V], and the target's joint law of two tokens."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    drafted = target + torch.randn(VOCAB, VOCAB, generator=generator)
    laws = filtered_probs(drafted, torch.ones(VOCAB), **chosen.arguments(VOCAB), impl="reference")
    steps = torch.tensor([chosen(row) for row in torch.softmax(target.double(), -1).tolist()], dtype=torch.float64)
    return target, laws, steps[0][:, None] * steps


@pytest.mark.parametrize("chosen", [OFF, Filter(top_k=3)], ids=["plain", "filtered"])
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("rule", RULES)
def test_exact_law_of_two_tokens(rule: str, impl: str, chosen: Filter) -> None:
    target, draft, law = grid_models(3, chosen)
    seen = two_token_law(rule, target, draft, draft, impl, chosen)
    assert 0.5 * (seen - law).abs().sum() <= grid_bound(impl)
    assert not seen[law == 0].any()


@pytest.mark.parametrize("rule", RULES)
def test_the_exact_law_refuses_a_rounded_draft_law(rule: str) -> None:
    """Draft laws recorded in eight bits move the law by more than the bound."""
    target, draft, law = grid_models(3)
    rounded = draft.to(torch.float8_e4m3fn).float()
    seen = two_token_law(rule, target, draft, rounded, "reference")
    assert 0.5 * (seen - law).abs().sum() > 3 * grid_bound("reference")
