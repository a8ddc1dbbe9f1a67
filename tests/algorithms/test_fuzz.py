"""A minute of `make fuzz` at most: some rounds, each from a seed that its error names."""

from __future__ import annotations

import random

import pytest

from tests.algorithms import fuzz
from tests.algorithms.fuzz import Round, draw_setup, run_round

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


def test_a_wrong_answer_names_the_command_that_shows_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    learn = Round._learn

    def spoilt(self: Round, requests: list) -> None:
        learn(self, requests)
        self._alone = {number: [*ids[:-1], (ids[-1] + 1) % fuzz.VOCAB] for number, ids in self._alone.items()}

    monkeypatch.setattr(Round, "_learn", spoilt)
    with pytest.raises(AssertionError, match=r"python -m tests.algorithms.fuzz --seed 0 --rounds 1"):
        run_round(0)
