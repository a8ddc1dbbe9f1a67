"""Sampling under `target_only` and the rules for sampled chains: the joint distribution of four tokens under several
relations of draft and target, and faults that it must refuse: a test of a distribution that has never failed proves
nothing."""

from typing import Any

import pytest
import torch

from specdec_kernels import Accepted, SamplingTensors, TreeLinks, accept, pick_tokens
from tests.kernels.distributions import (
    DEPTH,
    EMITTED,
    FILTERS,
    OFF,
    SHAPES,
    AcceptFunction,
    Filter,
    assert_distribution,
    decode,
    greedy_continuation,
    make_design,
    sampling_fault,
    temperature_ignored,
)

CHAINS = [("rejection", "chain"), ("block", "chain")]
WAYS = [("target_only", "chain"), ("target_only", "tree"), *CHAINS]
ROWS = 16_000
KERNEL_ROWS = 200  # their tokens are also those of the reference, one by one
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


@pytest.mark.parametrize("design, chosen", [("agreeing", FILTERS["agreeing"]), ("opposed", OFF)], ids=filtered_or_not)
@pytest.mark.parametrize("rule, shape", WAYS)
def test_joint_distribution_of_the_kernel(rule: str, shape: str, design: str, chosen: Filter) -> None:
    made, rows = make_design(design), at(KERNEL_ROWS if chosen == OFF else KERNEL_ROWS // 2)
    tokens = decode(accept, made, rule, rows, shape, impl="triton", chosen=chosen)
    assert_distribution(tokens, made, TEMPERATURE, chosen)
    assert torch.equal(tokens, decode(accept, made, rule, rows, shape, chosen=chosen))


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


def replaced_bonus(accepted: Accepted, bonus: torch.Tensor) -> Accepted:
    """The same outcome with another bonus token."""
    tokens = accepted.tokens.scatter(1, accepted.num_accepted[:, None].long(), bonus[:, None])
    return accepted._replace(tokens=tokens, bonus=bonus)


def banned_now_and_then(*call: Any, sampling: SamplingTensors, **keys: Any) -> Accepted:
    """The last token of the vocabulary comes out once in a thousand."""
    right = accept(*call, sampling=sampling, **keys)
    last = torch.full_like(right.bonus, call[3].shape[-1] - 1)
    return replaced_bonus(right, torch.where(sampling.seeds % 1000 == 0, last, right.bonus))


def bonus_of_the_row_before_the_end(*call: Any, sampling: SamplingTensors, impl: str) -> Accepted:
    _, tokens, tree, logits, *_ = call
    right = accept(*call, sampling=sampling, impl=impl)
    last = right.num_accepted.long()[:, None]
    before = right.nodes.gather(1, (last - 1).clamp(min=0))[:, 0].long()
    here = right.nodes.gather(1, last)[:, 0].long()
    rows = torch.arange(len(tokens))
    wrong = pick_tokens(logits[rows, before], sampling, tree.positions[rows, here], impl=impl).tokens
    return replaced_bonus(right, wrong)


def uniform_shared_across_depths(rule: str, tokens: torch.Tensor, tree: TreeLinks, *call: Any, **keys: Any) -> Accepted:
    flat = tree._replace(positions=tree.positions[:, :1].expand_as(tree.positions).contiguous())
    return accept(rule, tokens, flat, *call, **keys)


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
    """After a whole chain the bonus comes from the row before the last."""
    _, _, _, logits, lengths, _ = call
    right = accept(*call, sampling=sampling, draft_probs=draft_probs, impl=impl)
    before = pick_tokens(logits[:, DEPTH - 1], sampling, lengths, stream=9, impl=impl).tokens
    return replaced_bonus(right, torch.where(right.num_accepted == DEPTH, before, right.bonus))


def recorded_at_another_temperature(*call: Any, draft_probs: torch.Tensor, **keys: Any) -> Accepted:
    """The recorded distribution is not the one the drafts were sampled from."""
    flatter = draft_probs**0.7
    return accept(*call, draft_probs=flatter / flatter.sum(-1, keepdim=True), **keys)


greedy_at_a_temperature = sampling_fault(lambda s: s._replace(temperature=torch.zeros_like(s.temperature)))
unfiltered = sampling_fault(lambda s: s._replace(top_k=None, top_p=None, min_p=None))
top_k_ignored = sampling_fault(lambda s: s._replace(top_k=None))
# A token is kept only if the mass up to and with it is below p.
top_p_one_token_short = sampling_fault(lambda s: s._replace(top_p=s.top_p - 0.25))

FAULTS: list[tuple[str, str, AcceptFunction, str, Filter]] = [
    ("target_only", "chain", bonus_of_the_row_before_the_end, "agreeing", OFF),
    ("target_only", "tree", temperature_ignored, "opposed", OFF),
    ("target_only", "chain", uniform_shared_across_depths, "agreeing", OFF),
    ("target_only", "chain", greedy_at_a_temperature, "agreeing", OFF),
    ("target_only", "tree", banned_now_and_then, "opposed", OFF),
    ("target_only", "chain", top_k_ignored, "agreeing", FILTERS["agreeing"]),
    ("target_only", "chain", top_p_one_token_short, "agreeing", FILTERS["agreeing"]),
    ("target_only", "chain", temperature_ignored, "opposed", FILTERS["opposed"]),
    ("target_only", "chain", bonus_of_the_row_before_the_end, "agreeing", FILTERS["agreeing"]),
    *((rule, shape, residual_row_off_by_one, "opposed", OFF) for rule, shape in CHAINS),
    *((rule, shape, bonus_row_off_by_one, "agreeing", OFF) for rule, shape in CHAINS),
    ("rejection", "chain", residual_is_the_target, "opposed", OFF),
    ("block", "chain", recorded_at_another_temperature, "agreeing", OFF),
    ("rejection", "chain", unfiltered, "opposed", FILTERS["opposed"]),
    ("block", "chain", banned_now_and_then, "opposed", OFF),
]


@pytest.mark.parametrize("rule, shape, fault, design, chosen", FAULTS)
def test_the_distribution_refuses_a_fault(
    rule: str, shape: str, fault: AcceptFunction, design: str, chosen: Filter
) -> None:
    """Already with half of the rows."""
    made = make_design(design)
    tokens = decode(fault, made, rule, at(ROWS // 2), shape, chosen=chosen)
    with pytest.raises(AssertionError, match="chi-square|was emitted"):
        assert_distribution(tokens, made, TEMPERATURE, chosen)
