"""A minute of `make fuzz` at most: some rounds, each from a seed that its error names."""

from __future__ import annotations

import random

import pytest

from tests.algorithms import fuzz
from tests.algorithms.fuzz import Round, draw_setup, run_round
from tests.algorithms.test_sampling_parameters import following
from tests.algorithms.toy import changed

ROUNDS = range(16)


@pytest.mark.parametrize("seed", ROUNDS)
def test_a_round(seed: int) -> None:
    print(f"seed {seed}")
    run_round(seed)


def test_rounds_cover_what_they_are_for() -> None:
    """Every algorithm, backend, level and kind of fault comes up within a few hundred seeds."""
    rounds = [Round(seed) for seed in range(300)]
    assert {one.maker for one in rounds} == set(fuzz.MAKERS)
    setups = [draw_setup(random.Random(seed)) for seed in range(300)]
    for name, values in dict(backend=3, graph=4, overlap=3, page_size=4, max_batch=5).items():
        assert len({getattr(setup, name) for setup in setups}) == values, name


def test_a_near_tie_is_one_of_the_two_tokens_beside_a_border() -> None:
    """A draw of this seed lies 1.3e-7 beside the border of the cumulative distribution between tokens 11 and 12."""
    request, output = Round(1000216)._requests[5], [0, 8, 0, 31, 34]
    assert fuzz.is_near_tie(request, output, {11, 12})
    assert not fuzz.is_near_tie(request, output, {12, 13})
    assert not fuzz.is_near_tie(request, output[:4], {34, 35})
    greedy = changed(request, temperature=0.0)
    likeliest = following([*request.prompt_ids, *output]).argsort(descending=True)[:2].tolist()
    assert not fuzz.is_near_tie(greedy, output, set(likeliest))
    even = changed(greedy, logit_bias={likeliest[0]: -100.0, 11: 100.0, 12: 100.0}, bad_words=())
    gap = float(following([*request.prompt_ids, *output])[[11, 12]].diff())
    assert fuzz.is_near_tie(changed(even, logit_bias=even.sampling.logit_bias | {11: 100.0 + gap}), output, {11, 12})


def test_a_wrong_answer_names_the_command_that_shows_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    learn = Round._learn

    def spoilt(self: Round, requests: list) -> None:
        learn(self, requests)
        self._alone = {number: [*ids[:-1], (ids[-1] + 1) % fuzz.VOCAB] for number, ids in self._alone.items()}

    monkeypatch.setattr(Round, "_learn", spoilt)
    with pytest.raises(AssertionError, match=r"python -m tests.algorithms.fuzz --seed 0 --rounds 1"):
        run_round(0)
