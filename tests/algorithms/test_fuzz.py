"""A few rounds of `make fuzz`, each from a seed that its error names."""

import pytest

from tests.algorithms.fuzz import Round, run_round, run_rounds
from tests.algorithms.fuzz_cases import MAKERS
from tests.algorithms.toy import VOCAB

ROUNDS = range(2)


@pytest.mark.parametrize("seed", ROUNDS)
def test_a_round(seed: int) -> None:
    print(f"seed {seed}")
    run_round(seed)


def test_rounds_cover_what_they_are_for() -> None:
    """Every algorithm, backend, level and kind of request comes up within a few hundred seeds."""
    rounds = [Round(seed) for seed in range(300)]
    assert {one.maker for one in rounds} == set(MAKERS)
    wanted = dict(
        backend=3, graph=4, async_steps=3, page_size=4, max_batch=5, mixed_prefill=2, prefill_ahead=3, fused=2
    )
    for name, values in (wanted | dict(adaptive=2, grammars=2)).items():
        assert len({getattr(one.setup, name) for one in rounds}) == values, name
    kinds = {request.sampling.grammar.kind for one in rounds for request in one._requests}
    assert kinds == {None, "regex", "ebnf", "json_schema"}


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
