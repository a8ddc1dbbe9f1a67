"""What sampling parameters allow, and what a request asks of the sampler."""

from typing import Any

import pytest

from algorithms.step.sampling_params import MAX_BAD_WORD, MAX_TOP_LOGPROBS, SamplingNeeds, SamplingParams


@pytest.mark.parametrize(
    "change",
    [
        {"max_new_tokens": 1},
        {"top_k": 2**31 - 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"repetition_penalty": 1e-3},
        {"seed": 2**63 - 1},
        {"max_new_tokens": 3, "min_tokens": 3},
        {"top_logprobs": MAX_TOP_LOGPROBS},
        {"bad_words": ([0], "a", tuple(range(MAX_BAD_WORD)))},
    ],
)
def test_bounds_are_allowed(change: dict[str, Any]) -> None:
    SamplingParams(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected a finite number above 0"),
        ({"top_p": 0.0}, "top_p: expected above 0 and at most 1"),
        ({"top_k": 2**31}, r"top_k: expected 0 to 2147483647"),
        ({"top_p": 1.0001}, "top_p: expected above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p: expected 0"),
        ({"seed": -1}, "seed: expected 0 to"),
        ({"max_new_tokens": 3, "min_tokens": 4}, "min_tokens: expected 0 to max_new_tokens = 3, got 4"),
        ({"top_logprobs": MAX_TOP_LOGPROBS + 1}, r"top_logprobs: expected 0 to 64, got 65"),
        ({"bad_words": ([-1],)}, "bad_words: expected strings, or lists of 1 to 16 token ids"),
        ({"bad_words": ("",)}, "bad_words: expected"),
        ({"bad_words": ([True],)}, "bad_words: expected"),
        ({"bad_words": (tuple(range(MAX_BAD_WORD + 1)),)}, "bad_words: expected"),
        ({"bad_words": "word"}, "bad_words: expected"),
        ({"temperature": float("nan")}, "temperature: expected a finite number, at least 0, got nan"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty: expected a finite number"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias: expected finite numbers, got"),
        ({"stop_strings": ("",)}, "stop_strings: expected no empty string"),
        ({"grammar": {"regex": "a", "ebnf": "b"}}, "grammar: expected one of .*, got regex and ebnf"),
        ({"grammar": {"regex": "a"}, "min_tokens": 2}, "min_tokens: expected 0 with sampling.grammar, got 2"),
        ({"grammar": {"regex": "a"}, "ignore_eos": True}, "ignore_eos: expected false with sampling.grammar"),
        ({"grammar": {"regex": 3}}, "grammar.regex: expected text, got 3"),
        ({"grammar": {"json_schema": " "}}, "grammar.json_schema: expected text or a mapping, got ' '"),
    ],
)
def test_what_lies_outside_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^sampling\.{message}"):
        SamplingParams(**change)


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ({}, set()),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1}, set()),  # a greedy request filters nothing
        ({"temperature": 0.5}, {"sampled"}),
        ({"temperature": 0.5, "top_k": 1}, {"sampled", "filtered"}),
        ({"temperature": 0.5, "top_p": 0.9}, {"sampled", "filtered"}),
        ({"temperature": 0.5, "min_p": 0.1}, {"sampled", "filtered"}),
        ({"repetition_penalty": 1.1}, {"penalised"}),
        ({"presence_penalty": -0.5}, {"penalised"}),
        ({"frequency_penalty": 0.5}, {"penalised"}),
        ({"logit_bias": {3: 1.0}}, {"penalised"}),
        ({"min_tokens": 1}, {"forbids"}),
        ({"bad_words": ([3],)}, {"forbids"}),
        ({"grammar": {"regex": "a"}}, {"constrained"}),
        ({"logprobs": True}, {"logprobs"}),
        ({"top_logprobs": 1}, {"top_logprobs"}),
    ],
)
def test_a_request_asks_for_no_more_than_it_needs(change: dict[str, Any], asked: set[str]) -> None:
    needs = SamplingNeeds.of([SamplingParams(), SamplingParams(**change)])
    assert {name for name, value in vars(needs).items() if value} == asked
    assert needs.greedy == (not asked)


def test_steps_for_more_serve_those_who_ask_for_less() -> None:
    most = SamplingNeeds(sampled=True, logprobs=True, top_logprobs=3)
    assert most.covers(most) and most.covers(SamplingNeeds()) and most.covers(SamplingNeeds(top_logprobs=2))
    assert not most.covers(SamplingNeeds(top_logprobs=4)) and not most.covers(SamplingNeeds(sampled=True, forbids=True))
