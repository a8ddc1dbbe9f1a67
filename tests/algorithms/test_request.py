"""What a request says of itself."""

from __future__ import annotations

from algorithms.runtime.request import Request
from algorithms.runtime.sampling_params import SamplingNeeds, SamplingParams

REQUEST = Request(
    id=3,
    prompt_ids=(5, 6, 7),
    sampling=SamplingParams(max_new_tokens=10, min_tokens=4, bad_words=((8, 9),)),
    eos_token_ids=frozenset({2}),
    stop_token_ids=frozenset({1}),
)


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
    assert REQUEST.ends_at(2) and not REQUEST.with_sampling(ignore_eos=True).ends_at(2)


def test_ends_are_forbidden_up_to_the_least_length_and_bad_words_for_ever() -> None:
    (first, second, word) = REQUEST.forbidden
    assert (first, second) == (((1,), 7), ((2,), 7)) and word[0] == (8, 9) and word[1] > 1 << 40
    assert REQUEST.with_sampling(min_tokens=0, bad_words=()).forbidden == []


def test_greedy_requests_ask_for_no_draw() -> None:
    greedy, drawn = SamplingParams(max_new_tokens=4), SamplingParams(max_new_tokens=4, temperature=0.5)
    assert SamplingNeeds.of([greedy]) == SamplingNeeds()
    assert SamplingNeeds.of([greedy, drawn]) == SamplingNeeds(sampled=True)
