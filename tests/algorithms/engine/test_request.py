"""What a request says of itself."""

import re
from typing import Any

import pytest

from algorithms.engine.request import Request
from algorithms.step.sampling_params import MAX_FORBIDDEN, SamplingParams
from tests.algorithms.toy import changed

REQUEST = Request(
    id=3, prompt_ids=(5, 6, 7), sampling=SamplingParams(max_new_tokens=10, min_tokens=4, bad_words=((8, 9),)),
    eos_token_ids=frozenset({2}), stop_token_ids=frozenset({1}),
)  # fmt: skip


def test_a_shorter_request_asks_for_no_more_than_before() -> None:
    found = [
        (most, short.sampling.max_new_tokens, short.sampling.min_tokens)
        for most in (2, 7, 30)
        for short in [REQUEST.shortened(most)]
    ]
    assert found == [(2, 2, 2), (7, 7, 4), (30, 10, 4)]
    assert REQUEST.shortened(2).prompt_ids == REQUEST.prompt_ids


def test_length_and_ends() -> None:
    assert REQUEST.max_length == 13
    assert REQUEST.ends == {1, 2} and REQUEST.with_sampling(ignore_eos=True).ends == {1}


def test_ends_are_forbidden_up_to_the_least_length_and_bad_words_for_ever() -> None:
    (first, second, word) = REQUEST.forbidden
    assert (first, second) == (((1,), 7), ((2,), 7)) and word[0] == (8, 9) and word[1] > 1 << 40
    assert REQUEST.with_sampling(min_tokens=0, bad_words=()).forbidden == []


def words(count: int) -> tuple[tuple[int, ...], ...]:
    """So many sequences that are not written."""
    return tuple((number // 100, number // 10 % 10, number % 10) for number in range(count))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prompt_ids": (0, 9)}, None),
        ({"prompt_ids": ()}, "the prompt has no tokens"),
        ({"prompt_ids": (0, 10, -1)}, r"prompt tokens outside the vocabulary of 10: \[10, -1\]"),
        ({"logit_bias": {0: 1.0, 9: 1.0}}, None),
        ({"logit_bias": {10: 1.0, -1: 2.0}}, r"sampling.logit_bias: expected .* of 10, got \[-1, 10\]"),
        ({"top_logprobs": 10}, None),
        ({"top_logprobs": 11}, "sampling.top_logprobs: expected at most the vocabulary of 10, got 11"),
        ({"grammar": {"regex": "a"}, "min_tokens": 0}, None),
        ({"grammar": {"regex": "a"}, "min_tokens": 0, "eos_token_ids": frozenset(), "stop_token_ids": frozenset()},
         "sampling.grammar: expected a stop token"),
        ({"bad_words": ((0, 9),)}, None),
        ({"bad_words": ((0, 10),)}, r"sampling.bad_words: expected token ids below the vocabulary of 10, got \[10\]"),
        ({"bad_words": ("word",)}, "expected token ids where no tokenizer is at hand, got .'word'"),
        ({"bad_words": words(MAX_FORBIDDEN - 2)}, None),  # two stop tokens are held back too
        ({"bad_words": words(MAX_FORBIDDEN - 1)}, "expected at most 256 sequences, got 257"),
        ({"bad_words": words(MAX_FORBIDDEN), "min_tokens": 0}, None),
    ],
)  # fmt: skip
def test_what_a_vocabulary_of_ten_cannot_serve(change: dict[str, Any], problem: str | None) -> None:
    found = changed(REQUEST, **change).problem(10)
    assert (found is None) if problem is None else re.search(problem, found or "")
