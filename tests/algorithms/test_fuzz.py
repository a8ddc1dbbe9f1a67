"""A few rounds of `make fuzz`, each from a seed that its error names."""

from __future__ import annotations

import random

import pytest

from algorithms.runtime.request import Request
from algorithms.runtime.sampling_params import SamplingParams
from tests.algorithms import fuzz
from tests.algorithms.fuzz import Round, may_follow, run_round, run_rounds
from tests.algorithms.fuzz_cases import MAKERS, draw_grammar
from tests.algorithms.test_constraints import grammars
from tests.algorithms.test_sampling_parameters import following
from tests.algorithms.toy import VOCAB, changed

ROUNDS = range(6)
PROMPT = (6, 7, 36, 17, 45, 33, 35, 56, 32, 15, 28, 45, 29, 7, 57, 42, 58, 1, 1, 18, 29)
PROMPT += (18, 5, 60, 23, 10, 15, 23, 17, 18, 50, 8, 30, 27, 48, 11, 44, 47, 50, 2, 58, 59)


@pytest.mark.parametrize("seed", ROUNDS)
def test_a_round(seed: int) -> None:
    print(f"seed {seed}")
    run_round(seed)


def test_rounds_cover_what_they_are_for() -> None:
    """Every algorithm, backend, level and kind of request comes up within a few hundred seeds."""
    rounds = [Round(seed) for seed in range(300)]
    assert {one.maker for one in rounds} == set(MAKERS)
    wanted = dict(backend=3, graph=4, overlap=3, page_size=4, max_batch=5, piggyback=2, prefill_ahead=3, fused=2)
    for name, values in (wanted | dict(adaptive=2, grammars=2)).items():
        assert len({getattr(one.setup, name) for one in rounds}) == values, name
    kinds = {request.sampling.grammar.kind for one in rounds for request in one._requests}
    assert kinds == {None, "regex", "ebnf", "json_schema"}


def test_every_grammar_that_is_drawn_can_be_compiled() -> None:
    for seed in range(40):
        grammars().matcher(draw_grammar(random.Random(seed)), frozenset({VOCAB - 1}))


def near_a_border() -> tuple[Request, list[int]]:
    """The draw behind this text lies 1.3e-7 beside the border of the cumulative distribution between tokens 11 and
    12."""
    words = ((24, 18, 56), (35, 49), (53,), (60,), (9, 2), (57, 52, 26), (30, 44), (43,), (28,))
    sampling = SamplingParams(max_new_tokens=13, temperature=1.0, seed=3, bad_words=words)
    return Request(5, PROMPT, sampling), [0, 8, 0, 31, 34]


def test_a_near_tie_is_one_of_the_two_tokens_beside_a_border() -> None:
    request, output = near_a_border()
    assert fuzz.is_near_tie(request, output, {11, 12})
    assert not fuzz.is_near_tie(request, output, {12, 13})
    assert not fuzz.is_near_tie(request, output[:4], {34, 35})
    greedy = changed(request, temperature=0.0)
    likeliest = following([*request.prompt_ids, *output]).argsort(descending=True)[:2].tolist()
    assert not fuzz.is_near_tie(greedy, output, set(likeliest))
    even = changed(greedy, logit_bias={likeliest[0]: -100.0, 11: 100.0, 12: 100.0}, bad_words=())
    gap = float(following([*request.prompt_ids, *output])[[11, 12]].diff())
    assert fuzz.is_near_tie(changed(even, logit_bias=even.sampling.logit_bias | {11: 100.0 + gap}), output, {11, 12})


def test_a_token_that_the_target_never_draws_is_found() -> None:
    request, output = near_a_border()
    ranked = following([*request.prompt_ids, *output]).argsort(descending=True).tolist()
    ranked = [token for token in ranked if (token,) not in request.sampling.bad_words]
    assert may_follow(request, output, ranked[-1]) and not may_follow(request, output, 53)
    filtered = changed(request, top_k=3)
    assert may_follow(filtered, output, ranked[2]) and not may_follow(filtered, output, ranked[3])
    filtered = changed(request, top_p=1e-6)
    assert may_follow(filtered, output, ranked[0]) and not may_follow(filtered, output, ranked[1])


def test_a_wrong_answer_names_the_command_that_shows_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learn = Round._learn

    def spoilt(self: Round, requests: list) -> None:
        learn(self, requests)
        for completion in self._alone.values():
            completion.token_ids[-1] = (completion.token_ids[-1] + 1) % VOCAB

    monkeypatch.setattr(Round, "_learn", spoilt)
    assert run_rounds(1, 1, 60.0) == [1]
    assert "run it again: python -m tests.algorithms.fuzz --seed 1 --rounds 1" in capsys.readouterr().err
