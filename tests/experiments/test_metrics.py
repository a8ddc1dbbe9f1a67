"""Figures against brute-force definitions: what was reached, what is pooled, what counts as identical."""

from collections.abc import Mapping
from dataclasses import replace
from statistics import stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.engine.request import Completion
from algorithms.engine.session import Generation
from algorithms.step.runner import GraphReport
from experiments.report import checks, intervals, summarize
from experiments.report.metrics import AcceptanceFigures, num_faults

DEPTH = 5
counts_of_steps = st.lists(st.integers(0, DEPTH), min_size=1, max_size=40)


def completion(index: int, accepted: list[int], truncated: int = 0, **changes: object) -> Completion:
    tokens = list(range(sum(a + 1 for a in accepted) - truncated))
    steps = dict(drafted_counts=[DEPTH for _ in accepted], ran_out=[count == DEPTH for count in accepted])
    fields: dict[str, object] = dict(request_id=index, token_ids=tokens, text=f"text {index}", finish_reason="length")
    fields |= dict(accepted_counts=accepted, num_truncated=truncated, ttft_ms=10.0 * (index + 1), total_ms=100.0)
    return Completion(**{**fields, **steps, **changes})  # type: ignore[arg-type]


def generation(*completions: Completion) -> Generation:
    phase_times = {"draft": 1.0, "verify": 2.0, "accept": 3.0, "commit": 4.0, "host": 5.0}
    steps = [40.0, 50.0, 50.0, 60.0]
    return Generation(list(completions), 4, 40.0, 200.0, 250.0, 8.0, steps, phase_times, GraphReport("none", ()))


def figures_of(steps: list[tuple[int, bool]]) -> AcceptanceFigures:
    """Figures of one request."""
    return summarize.acceptance_figures(steps, [sum(a + 1 for a, _ in steps)], [len(steps)], 0, DEPTH)


def rates_of(counts: list[int]) -> list[float | None]:
    """Acceptance by position of steps that always draft to the full depth."""
    return figures_of([(count, count == DEPTH) for count in counts])["acceptance_at"]


@given(st.lists(st.tuples(st.integers(0, DEPTH), st.booleans()), max_size=40))
def test_a_missing_draft_is_no_rejected_one(steps: list[tuple[int, bool]]) -> None:
    found = figures_of(steps)
    counts, rates = found["acceptance"], found["acceptance_at"]
    for i in range(DEPTH):
        reached = [step for step in steps if step[0] >= i]
        assert counts["accepted"][i] == sum(a > i for a, _ in reached)
        assert counts["no_draft"][i] == sum(a == i and ran_out for a, ran_out in reached)
        assert counts["accepted"][i] + counts["rejected"][i] + counts["no_draft"][i] == len(reached)
        drafted = [a for a, ran_out in reached if a > i or not ran_out]
        assert rates[i] == (pytest.approx(sum(a > i for a in drafted) / len(drafted)) if drafted else None)


def test_accepted_over_drafted_counts_every_drafted_token() -> None:
    done = completion(0, [3, 0, 1], drafted_counts=[4, 0, 4], ran_out=[False, True, False])
    method = summarize.summarize_method(generation(done), DEPTH)
    assert (method["num_accepted"], method["num_drafted"], method["acceptance_rate"]) == (4, 8, 0.5)
    assert method["acceptance"]["no_draft"] == [1, 0, 0, 0, 0] and method["acceptance_at"][0] == 1.0
    none = summarize.summarize_method(generation(completion(0, [0], drafted_counts=[0])), DEPTH)
    assert none["acceptance_rate"] is None


@given(counts_of_steps)
def test_mean_accepted_is_the_sum_of_products_of_acceptance(counts: list[int]) -> None:
    """E[a] = sum over i of P(a > i), and P(a > i) is the product of the conditional rates up to i."""
    rates = rates_of(counts)
    survive, expected = 1.0, 0.0
    for rate in rates:
        survive *= rate or 0.0
        expected += survive
    assert expected == pytest.approx(sum(counts) / len(counts))


def test_tokens_per_step_is_pooled_not_a_mean_of_means() -> None:
    method = summarize.summarize_method(generation(completion(0, [0]), completion(1, [5, 5, 5])), DEPTH)
    assert method["tokens_per_step"] == pytest.approx((1 + 18) / 4)
    assert method["num_accepted_histogram"] == [1, 0, 0, 0, 0, 3]


def test_truncated_tokens_count_for_acceptance_but_not_as_output() -> None:
    method = summarize.summarize_method(generation(completion(0, [3, 3], truncated=3)), DEPTH)
    assert (method["output_tokens"], method["num_truncated"]) == (5, 3)
    assert method["tokens_per_step"] == pytest.approx(4)
    assert method["decode_tokens_per_s"] == pytest.approx(5 / 0.2)
    assert method["wall_tokens_per_s"] == pytest.approx(5 / 0.25)


def test_times_are_quantiles_of_what_was_measured() -> None:
    method = summarize.summarize_method(generation(*(completion(i, [1]) for i in range(11))), DEPTH)
    assert method["ttft_ms"] == {"p50": pytest.approx(60.0), "p90": pytest.approx(100.0)}
    assert method["step_ms"]["median"] == pytest.approx(50.0)
    assert method["phase_times_ms"] == {"draft": 1.0, "verify": 2.0, "accept": 3.0, "commit": 4.0, "host": 5.0}


def test_identity_needs_every_token() -> None:
    plain = [completion(i, [2], token_ids=[7, 8, 9]) for i in range(3)]
    ours = [completion(i, [2], token_ids=tokens) for i, tokens in enumerate(([7, 8, 9], [7, 8, 10], [7, 8]))]
    result = summarize.lossless(ours, plain)
    assert (result["checked"], result["identical"]) == (3, 1)
    assert result["first_difference"] == {"request": 1, "position": 2, "token": 10, "baseline_token": 9}
    cut = summarize.lossless(ours[2:], plain[2:])["first_difference"]
    assert cut == {"request": 2, "position": 2, "token": None, "baseline_token": 9}
    assert summarize.lossless(plain, plain)["first_difference"] is None


@pytest.mark.parametrize(("possible", "looks", "near"), [(True, [1, 2], 1), (False, [1], 0)])
def test_differences_that_cannot_be_near_ties_are_not_looked_at(possible: bool, looks: list[int], near: int) -> None:
    seen: list[int] = []

    def look(index: int, found: Mapping[str, Any]) -> dict[str, Any]:
        seen.append(index)
        return {"gap": 0.5, "numerical_tie": index == 2}

    plain = [completion(i, [2], token_ids=[7, 8, 9]) for i in range(3)]
    ours = [completion(i, [2], token_ids=[7, 8, 9 + min(i, 1)]) for i in range(3)]
    result = summarize.lossless(ours, plain, look, possible)
    assert seen == looks and result["near_ties"] == near and result["identical"] == 1
    assert result["first_difference"]["request"] == 1 and result["first_difference"]["gap"] == 0.5


def test_accuracy_judges_each_text_with_its_own_prompt() -> None:
    done = [completion(i, [0], text=text, finish_reason="stop_token") for i, text in enumerate(("12", "13"))]
    found = summarize.accuracy(done, lambda index, text: text == ("12", "14")[index])
    assert found == {"accuracy": 0.5, "answers": {"right": 1, "wrong": 1, "cut": 0}}
    assert summarize.accuracy(done, None) == {"accuracy": None, "answers": None}


def test_a_text_that_was_cut_before_its_answer_is_not_wrong() -> None:
    ends = [("12", "length"), ("1", "length"), ("13", "stop_token")]
    done = [completion(i, [0], text=text, finish_reason=reason) for i, (text, reason) in enumerate(ends)]
    assert summarize.summarize_method(generation(*done), DEPTH)["num_cut"] == 2
    found = summarize.accuracy(done, lambda index, text: text == "12")
    assert found == {"accuracy": 0.5, "answers": {"right": 1, "wrong": 1, "cut": 1}}
    rows = [("a", {"answers": found["answers"]}), ("b", {"answers": None}), ("c", {"answers": found["answers"]})]
    (told,) = checks.warnings_of_all(rows)
    assert told == "answers truncated by sampling.max_new_tokens do not count in accuracy (a: 1 of 3; c: 1 of 3)"
    only_cut = summarize.accuracy(done[1:2], lambda index, text: False)
    assert only_cut == {"accuracy": None, "answers": {"right": 0, "wrong": 0, "cut": 1}}


def row(acceptance: list[float | None], identical: int, near_ties: int = 0) -> dict[str, object]:
    first = {"request": 2, "position": 7, "token": 5, "baseline_token": 9, "logit": 1.25, "baseline_logit": 1.5}
    first |= {"gap": 0.25, "bound": 0.5 if near_ties else 1e-4, "numerical_tie": bool(near_ties)}
    comparison = {"checked": 4, "identical": identical, "near_ties": near_ties, "first_difference": None}
    comparison |= {"first_difference": first} if identical < 4 else {}
    return {"acceptance_at": acceptance, "lossless": comparison}


def test_the_difference_that_is_told_is_no_near_tie_if_one_is_none() -> None:
    plain = [completion(i, [2], token_ids=[7, 8, 9]) for i in range(3)]
    ours = [completion(i, [2], token_ids=[7, 8 - i, 9]) for i in range(3)]
    comparison = summarize.lossless(ours, plain, lambda index, found: {"numerical_tie": index == 1})
    assert (comparison["checked"], comparison["identical"], comparison["near_ties"]) == (3, 1, 1)
    assert comparison["first_difference"]["request"] == 2 and num_faults(comparison) == 1
    comparison = summarize.lossless(ours, plain, lambda index, found: {"numerical_tie": True})
    assert comparison["near_ties"] == 2 and comparison["first_difference"]["request"] == 1


def test_low_acceptance_and_differences_are_called_out() -> None:
    assert checks.warnings(row([0.9], 4), "float32", True) == []
    assert checks.warnings(row([], 4), "float32", True) == []
    (low,) = checks.warnings(row([0.04], 4), "float32", True)
    assert "drafter" in low
    assert checks.warnings(row([0.9], 3), "float32", True) == []
    assert checks.failures(row([0.9], 4), "float32", True) == checks.failures(row([0.9], 3), "bfloat16", False) == []
    (exact,) = checks.failures(row([0.9], 3), "float32", True)
    assert exact == (
        "1 of 4 requests differ from autoregressive decoding in float32; request 2, position 7: token 5 (logit 1.25), "
        "the baseline has token 9 (logit 1.5), gap 0.25, a numerical tie in float32 is at most 0.0001"
    )
    (rounded,) = checks.warnings(row([0.9], 3), "bfloat16", False)
    assert "runtime.deterministic=true" in rounded and "0 at a numerical tie" in rounded and "gap 0.25" in rounded
    (wrong,) = checks.failures(row([0.9], 3), "bfloat16", True)
    assert wrong.startswith("1 of 4 requests differ from autoregressive decoding in bfloat16; request 2")


def test_near_ties_are_counted_and_no_failure() -> None:
    assert checks.failures(row([0.9], 3, near_ties=1), "float32", True) == []
    (told,) = checks.warnings(row([0.9], 3, near_ties=1), "float32", True)
    assert told.startswith("1 of 4 requests differ from autoregressive decoding, 1 at a numerical tie; first: req")
    both = row([0.9], 2, near_ties=1)
    assert checks.failures(both, "float32", True)[0].startswith("1 of 4")
    assert checks.warnings(both, "float32", True)[0].startswith("1 of 4 requests differ")


def test_compilations_under_the_clock_are_called_out() -> None:
    compiled = summarize.compilations(["_b_kernel", "_a_kernel", "_b_kernel"])
    assert compiled == {"compiled": 3, "compiled_kernels": ["_a_kernel", "_b_kernel"]}
    (late,) = checks.warnings(row([0.9], 4) | compiled, "float32", True)
    assert late.startswith("3 kernels were compiled") and late.endswith("_a_kernel, _b_kernel")
    assert checks.warnings(row([0.9], 4) | summarize.compilations([]), "float32", True) == []


def test_each_speedup_is_of_the_clock_in_its_name() -> None:
    slow = summarize.summarize_method(generation(completion(0, [0, 0])), DEPTH)
    fast = {**slow, "decode_tokens_per_s": 3 * slow["decode_tokens_per_s"], "wall_tokens_per_s": 25.0}
    found = summarize.against_baseline(fast, slow)
    assert found["speedup_decode"] == pytest.approx(3)
    assert found["speedup_wall"] == pytest.approx(25.0 / (2 / 0.25))


def rounds_of(*decode_ms: float) -> list[Generation]:
    return [replace(generation(completion(0, [4, 4])), decode_ms=ms) for ms in decode_ms]


def test_rates_of_rounds_are_pooled_and_their_interval_is_students() -> None:
    """All tokens over all time, and t(2) = 4.303 times the standard error around it."""
    method = summarize.summarize_method(generation(completion(0, [4, 4])), DEPTH, rounds_of(100.0, 200.0, 200.0))
    rates = [100.0, 50.0, 50.0]
    assert method["rounds"]["decode_tokens_per_s"] == rates
    assert method["decode_tokens_per_s"] == pytest.approx(30 / 0.5)
    assert method["decode_ms"] == pytest.approx(500 / 3) and method["step_ms"]["mean"] == pytest.approx(500 / 12)
    from scipy.special import stdtrit  # slow to import

    half = 4.303 * stdev(rates) / 3**0.5
    assert method["decode_tokens_per_s_interval"] == [0.0, pytest.approx(60 + half)]
    assert [stdtrit(n, 0.975) for n in range(1, 11)] == pytest.approx(intervals._T_95, abs=6e-4)
    alone = summarize.summarize_method(generation(completion(0, [4, 4])), DEPTH)
    assert alone["decode_tokens_per_s_interval"] is None


def test_speedups_of_rounds_are_taken_within_each_round() -> None:
    """A machine that halves its speed between two rounds does so for both sides, and the interval is narrow."""
    slow, fast = (
        summarize.summarize_method(generation(completion(0, [4, 4])), DEPTH, rounds_of(*times))
        for times in ((200.0, 400.0, 400.0), (100.0, 200.0, 200.0))
    )
    found = summarize.against_baseline(fast, slow)
    assert found["speedup_decode"] == pytest.approx(2) and found["speedup_decode_interval"] == pytest.approx([2, 2])
    predicted = found["prediction"]
    assert found["speedup_decode"] == pytest.approx(predicted["predicted"] * predicted["occupancy"] * predicted["kept"])


def test_times_that_cannot_be_trusted_are_called_out() -> None:
    fine = {"rounds": {"decode_tokens_per_s": [100.0, 110.0]}, "speedup_decode": 2.9, "tokens_per_step": 3.0}
    assert list(checks._time_warnings(fine)) == []
    spread = fine | {"rounds": {"decode_tokens_per_s": [100.0, 130.0, 100.0]}}
    (told,) = checks.warnings_of_all([("a", fine), ("b", spread), ("c", spread), ("d", {})])
    assert "differ by more than 20% of their mean between rounds (b: 27%; c: 27%): end other programs" in told
    assert checks.several(list("abcdefghijkl")).endswith("; j; and 2 more")
    assert checks.warnings_of_all([("a", fine)]) == []
    (above,) = checks._time_warnings(fine | {"speedup_decode": 3.1})
    assert above.startswith("a decode speedup of 3.10× is above its 3.00 tokens/step")
    (texts,) = checks._time_warnings(fine | {"differing_rounds": 1})
    assert texts == "rounds with other outputs than the first: 1"


def test_tokens_per_step_have_an_interval_over_requests() -> None:
    ended = [completion(i, [2, i]) for i in range(4)]
    found = summarize.summarize_method(generation(*ended), DEPTH)
    assert found["tokens_per_step_interval"] == intervals.ratio_interval([4, 5, 6, 7], [2, 2, 2, 2])
    low, high = found["tokens_per_step_interval"]
    assert low < found["tokens_per_step"] == 2.75 < high
    assert summarize.summarize_method(generation(*ended[:3]), DEPTH)["tokens_per_step_interval"] is None
    alone = [completion(i, [0, 0]) for i in range(4)]
    assert summarize.summarize_method(generation(*alone), 0)["tokens_per_step_interval"] is None


def test_the_share_that_is_kept_and_the_interval_of_a_position() -> None:
    """Three of eight tokens lie past the end; the baseline keeps all of its own."""
    ours = summarize.summarize_method(generation(completion(0, [3, 3], truncated=3)), DEPTH)
    plain = summarize.summarize_method(generation(completion(0, [0] * 5)), 0)
    found = summarize.against_baseline(ours, plain)
    assert found["prediction"]["kept"] == pytest.approx(5 / 8)
    factors = found["prediction"]
    assert found["speedup_decode"] == pytest.approx(factors["predicted"] * factors["occupancy"] * factors["kept"])
    assert ours["acceptance_at_interval"][3] == intervals.wilson(0, 2) == pytest.approx([0.0, 0.6576], abs=1e-4)
    assert ours["acceptance_at_interval"][4] is None, "no step reached the fifth draft"
