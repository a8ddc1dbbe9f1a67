"""The rules for drawn drafts, `rejection` and `block`, judged by their distribution: joint distributions under several
relations of draft and target, the exact distribution of two tokens on a grid of uniforms, and faults that both must
refuse."""

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
    filtered_probs,
    pick_tokens,
)
from tests.kernels.distributions import (
    DEPTH,
    FILTER,
    OFF,
    AcceptFunction,
    Filter,
    assert_distribution,
    banned_now_and_then,
    decode_drawn,
    greedy_at_a_temperature,
    greedy_continuation,
    make_design,
    replaced_bonus,
    sampling_fault,
    temperature_ignored,
)

RULES = ["rejection", "block"]
ROWS = 40_000
FAULTY_ROWS = 30_000
KERNEL_ROWS = 1_500  # their tokens are also those of the reference, one by one
TEMPERATURE = 0.7

if torch.cuda.is_available():
    pytest.skip("these run on the CPU, where reference and interpreter can be compared", allow_module_level=True)


def at(rows: int) -> torch.Tensor:
    return torch.full((rows,), TEMPERATURE)


@pytest.mark.parametrize("chosen", [OFF, FILTER], ids=["plain", "filtered"])
@pytest.mark.parametrize("design", ["agreeing", "opposed"])
@pytest.mark.parametrize("rule", RULES)
def test_joint_distribution(rule: str, design: str, chosen: Filter) -> None:
    made = make_design(design)
    assert_distribution(decode_drawn(accept, made, rule, at(ROWS), chosen=chosen), made, TEMPERATURE, chosen)


@pytest.mark.parametrize("design", ["identical", "disjoint"])
@pytest.mark.parametrize("rule", RULES)
def test_joint_distribution_at_the_ends(rule: str, design: str) -> None:
    """A draft that is the target (all is accepted, residuals are rounding) and one that never agrees."""
    made = make_design(design)
    seen: list[torch.Tensor] = []

    def watched(*args: Any, **keys: Any) -> Accepted:
        accepted = accept(*args, **keys)
        seen.append(accepted.num_accepted)
        return accepted

    tokens = decode_drawn(watched, made, rule, at(ROWS // 2), draft_temperature=TEMPERATURE)
    assert_distribution(tokens, made, TEMPERATURE)
    counts = torch.cat(seen)
    assert (counts == (DEPTH if design == "identical" else 0)).all()


@pytest.mark.parametrize("design, chosen", [("agreeing", FILTER), ("opposed", OFF)], ids=["filtered", "plain"])
@pytest.mark.parametrize("rule", RULES)
def test_joint_distribution_of_the_kernel(rule: str, design: str, chosen: Filter) -> None:
    made, rows = make_design(design), KERNEL_ROWS if chosen == OFF else KERNEL_ROWS // 2
    tokens = decode_drawn(accept, made, rule, at(rows), impl="triton", chosen=chosen)
    assert_distribution(tokens, made, TEMPERATURE, chosen)
    assert torch.equal(tokens, decode_drawn(accept, made, rule, at(rows), chosen=chosen))


@pytest.mark.parametrize("rule", RULES)
def test_greedy_and_sampled_rows_share_a_batch(rule: str) -> None:
    made = make_design("agreeing")
    temperature = at(2 * FAULTY_ROWS)
    temperature[::2] = 0.0
    tokens = decode_drawn(accept, made, rule, temperature)
    assert_distribution(tokens[1::2], made, TEMPERATURE)
    assert (tokens[::2] == greedy_continuation(made)).all()


def test_block_accepts_no_fewer_than_rejection() -> None:
    lengths = {}
    for rule in RULES:
        total = [0, 0]

        def counted(*args: Any, total: list[int] = total, **keys: Any) -> Accepted:
            accepted = accept(*args, **keys)
            total[0] += int(accepted.num_accepted.sum())
            total[1] += len(accepted.num_accepted)
            return accepted

        decode_drawn(counted, make_design("agreeing"), rule, at(FAULTY_ROWS))
        lengths[rule] = total[0] / total[1]
    assert lengths["block"] > lengths["rejection"] > 1


def residual_is_the_target(*call: Any, sampling: SamplingTensors, impl: str, draft_probs: torch.Tensor) -> Accepted:
    """A rejected draft is replaced by a draw from the whole target distribution."""
    _, tokens, _, logits, lengths, _ = call
    right = accept(*call, sampling=sampling, draft_probs=draft_probs, impl=impl)
    last, rows = right.num_accepted.long(), torch.arange(len(tokens))
    fresh = pick_tokens(logits[rows, last], sampling, lengths, stream=9, impl=impl).tokens
    return replaced_bonus(right, torch.where(last < DEPTH, fresh, right.bonus))


def residual_row_off_by_one(*call: Any, draft_probs: torch.Tensor, **keys: Any) -> Accepted:
    rolled = torch.cat([draft_probs[:, 1:], draft_probs[:, -1:]], 1).contiguous()
    right = accept(*call, draft_probs=draft_probs, **keys)
    wrong = accept(*call, draft_probs=rolled, **keys)
    same = right.num_accepted == wrong.num_accepted
    return replaced_bonus(right, torch.where(same, wrong.bonus, right.bonus))


def bonus_row_off_by_one(*call: Any, sampling: SamplingTensors, impl: str, draft_probs: torch.Tensor) -> Accepted:
    """Behind a whole chain the bonus comes from the row before the last."""
    _, _, _, logits, lengths, _ = call
    right = accept(*call, sampling=sampling, draft_probs=draft_probs, impl=impl)
    before = pick_tokens(logits[:, DEPTH - 1], sampling, lengths, stream=9, impl=impl).tokens
    return replaced_bonus(right, torch.where(right.num_accepted == DEPTH, before, right.bonus))


def recorded_at_another_temperature(*call: Any, draft_probs: torch.Tensor, **keys: Any) -> Accepted:
    """The recorded distribution is not the one the drafts were drawn from."""
    flatter = draft_probs**0.7
    return accept(*call, draft_probs=flatter / flatter.sum(-1, keepdim=True), **keys)


def recorded_unfiltered(*call: Any, draft_probs: torch.Tensor, **keys: Any) -> Accepted:
    """The drafts were drawn under filters, the recorded distribution is without them."""
    made = make_design("agreeing")
    drafting = SamplingTensors(torch.full((5,), 0.9))
    recorded = filtered_probs(made.draft_logits, drafting, impl="reference")[call[1][:, :-1]]
    return accept(*call, draft_probs=recorded.contiguous(), **keys)


def random_uniforms(tokens: torch.Tensor, sampling: SamplingTensors) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(sampling.seeds[0]))
    return torch.rand(len(tokens), tokens.shape[1] + 1, dtype=torch.float64, generator=generator)


def judging_uniform_recovers(*call: Any, sampling: SamplingTensors, **keys: Any) -> Accepted:
    """A uniform that rejected is used again to draw the token in place of the draft."""
    rule, tokens, *_ = call
    uniforms = random_uniforms(tokens, sampling)
    uniforms[:, tokens.shape[1] - 1] = uniforms[:, 0 if rule == "rejection" else DEPTH - 1]
    return accept(*call, sampling=sampling, uniforms=uniforms, **keys)


def one_uniform_for_all(*call: Any, sampling: SamplingTensors, **keys: Any) -> Accepted:
    uniforms = random_uniforms(call[1], sampling)
    uniforms[:, : call[1].shape[1] - 1] = uniforms[:, :1]
    return accept(*call, sampling=sampling, uniforms=uniforms, **keys)


def padding_is_judged(
    rule: str, tokens: torch.Tensor, tree: TreeLinks, logits: torch.Tensor, lengths: torch.Tensor, *call: Any,
    **keys: Any,
) -> Accepted:  # fmt: skip
    """The unused node behind the chain is taken for a draft."""
    return accept(rule, tokens, build_chain(lengths, tokens.shape[1]), logits, lengths, *call, **keys)


target_unfiltered = sampling_fault("target_unfiltered", lambda s: s._replace(top_k=None, top_p=None, min_p=None))

FAULTS: list[tuple[AcceptFunction, str, Filter]] = [
    (residual_is_the_target, "opposed", OFF),
    (residual_row_off_by_one, "opposed", OFF),
    (bonus_row_off_by_one, "agreeing", OFF),
    (recorded_at_another_temperature, "agreeing", OFF),
    (recorded_unfiltered, "agreeing", FILTER),
    (judging_uniform_recovers, "agreeing", OFF),
    (one_uniform_for_all, "agreeing", OFF),
    (temperature_ignored, "opposed", OFF),
    (greedy_at_a_temperature, "agreeing", OFF),
    (target_unfiltered, "opposed", FILTER),
    (padding_is_judged, "agreeing", OFF),
    (banned_now_and_then, "opposed", OFF),
]


@pytest.mark.parametrize("fault, design, chosen", FAULTS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("rule", RULES)
def test_the_distribution_refuses_a_fault(rule: str, fault: AcceptFunction, design: str, chosen: Filter) -> None:
    made = make_design(design)
    with pytest.raises(AssertionError, match="chi-square|was emitted"):
        assert_distribution(decode_drawn(fault, made, rule, at(FAULTY_ROWS), chosen=chosen), made, TEMPERATURE, chosen)


GRID = {"reference": 1 << 13, "triton": 1 << 8}
VOCAB = 4
NEVER = 1 - 2.0**-53


def grid_size(impl: str, chosen: Filter) -> int:
    """With filters the interpreter takes seven times as long for a row."""
    return GRID[impl] // 2 if impl == "triton" and chosen != OFF else GRID[impl]


def grid_bound(impl: str, chosen: Filter = OFF) -> float:
    """Every share is read from midpoints, which misplace each border by half a step; at most 2 + VOCAB meet."""
    return (2 + VOCAB) / (2 * grid_size(impl, chosen))


def two_token_distribution(
    rule: str, target: torch.Tensor, draft: torch.Tensor, recorded: torch.Tensor, impl: str, chosen: Filter = OFF
) -> torch.Tensor:
    """[V, V] float64: exact distribution of the first two tokens of a chain of two drafts and the steps behind it.

    `target` and `recorded` are logits and distributions of the three rows by context [V, V], drafts are drawn from
    `draft`. A step that emits one token goes on with the target's own distribution, which the next step is to show.
    """
    size = grid_size(impl, chosen)
    grid = (torch.arange(size) + 0.5).double() / size
    own = torch.softmax(target.double(), -1)
    own = torch.tensor([chosen(row) for row in own.tolist()], dtype=torch.float64)
    pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    tokens = torch.cat([torch.zeros(len(pairs), 1, dtype=torch.int64), pairs], 1).repeat_interleave(size, 0)
    lengths = torch.zeros(len(tokens), dtype=torch.int64)
    tree = build_chain(lengths, 3, impl="reference")

    def run(first: Any, second: Any, recover: Any) -> Accepted:
        columns = [torch.as_tensor(c, dtype=torch.float64).expand(size) for c in (first, second, recover, 0.5)]
        return accept(
            rule, tokens, tree, target[tokens], lengths, 2,
            SamplingTensors(torch.ones(len(tokens)), **chosen.arguments(len(tokens))),
            uniforms=torch.stack(columns, 1).repeat(len(pairs), 1), draft_probs=recorded[tokens[:, :2]],
            return_logprobs=False, impl=impl,
        )  # fmt: skip

    def share(accepted: Accepted, count: int) -> torch.Tensor:
        return (accepted.num_accepted >= count).double().view(VOCAB, VOCAB, size).mean(-1)

    def tokens_of(accepted: Accepted) -> torch.Tensor:
        return torch.nn.functional.one_hot(accepted.bonus, VOCAB).double().view(VOCAB, VOCAB, size, VOCAB).mean(2)

    one, two = share(run(grid, NEVER, 0.5), 1), share(run(0.0, grid, 0.5), 2)
    both = two if rule == "block" else one * two
    none = (1 - one) * (1 - two) if rule == "block" else 1 - one
    # A run whose uniforms cannot give its number of accepted drafts counts with weight zero.
    first, second = tokens_of(run(NEVER, NEVER, grid)), tokens_of(run(0.0, NEVER, grid))
    weight = draft[0][:, None].double() * draft.double()
    joint = weight * both
    joint += ((weight * (1 - both - none))[..., None] * second).sum(1)
    return joint + (weight * none)[..., None].mul(first).sum((0, 1))[:, None] * own


def grid_models(seed: int, chosen: Filter = OFF) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Target logits [V, V], draft distributions [V, V], and the target's joint distribution of two tokens."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    drafted = target + torch.randn(VOCAB, VOCAB, generator=generator)
    draft = filtered_probs(drafted, SamplingTensors(torch.ones(VOCAB), **chosen.arguments(VOCAB)), impl="reference")
    steps = torch.tensor([chosen(row) for row in torch.softmax(target.double(), -1).tolist()], dtype=torch.float64)
    return target, draft, steps[0][:, None] * steps


@pytest.mark.parametrize("chosen", [OFF, Filter(top_k=3)], ids=["plain", "filtered"])
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("rule", RULES)
def test_exact_distribution_of_two_tokens(rule: str, impl: str, chosen: Filter) -> None:
    target, draft, expected = grid_models(3, chosen)
    seen = two_token_distribution(rule, target, draft, draft, impl, chosen)
    assert 0.5 * (seen - expected).abs().sum() <= grid_bound(impl, chosen)
    assert not seen[expected == 0].any()


@pytest.mark.parametrize("rule", RULES)
def test_the_exact_distribution_refuses_a_rounded_draft(rule: str) -> None:
    """Draft distributions recorded in eight bits move the result by more than the bound."""
    target, draft, expected = grid_models(3)
    rounded = draft.to(torch.float8_e4m3fn).float()
    seen = two_token_distribution(rule, target, draft, rounded, "reference")
    assert 0.5 * (seen - expected).abs().sum() > 3 * grid_bound("reference")
