"""What a session counts, how far it bounds lengths, and which chunks ride in its steps."""

from typing import Any

import pytest

from algorithms.engine.engine import Engine
from algorithms.step.sampling_params import SamplingNeeds
from tests.algorithms import toy

TARGET = toy.random_target()
ASKED = [toy.changed(request, max_new_tokens=count) for request, count in zip(toy.requests(3), (9, 4, 14), strict=True)]
DEPTH = 2


def scripted(async_steps: int, max_batch: int = 2) -> Engine:
    """An engine whose drafts are all accepted."""
    algorithm = toy.Scripted(toy.scripts(ASKED, toy.answers(ASKED, toy.Setup(), TARGET)), DEPTH)
    return toy.engine_of(algorithm, toy.Setup(max_batch=max_batch, async_steps=async_steps), TARGET)


def test_tokens_per_step_are_pooled_over_requests() -> None:
    engine, completions = scripted(0), []
    with engine.session(SamplingNeeds()) as session:
        assert session.report().tokens_per_step == 0
        for request in ASKED:
            session.submit(request)
        while not session.idle:
            completions += session.step()
            report = session.report()
            running = [running.completion for running in engine.scheduler.running]
            steps = sum(len(completion.accepted_counts) for completion in (*completions, *running))
            emitted = sum(count + 1 for each in (*completions, *running) for count in each.accepted_counts)
            assert (report.num_requests, report.num_finished) == (3, len(completions))
            assert report.emitted_tokens == emitted and report.tokens_per_step == emitted / steps
        assert session.generation(completions).num_steps == session.generation([]).num_steps > 3


@pytest.mark.parametrize("async_steps", [0, 1, 3])
def test_the_bound_of_lengths_is_what_steps_in_flight_may_accept(
    monkeypatch: pytest.MonkeyPatch, async_steps: int
) -> None:
    """Where all drafts are accepted it is the greatest length itself."""
    engine = scripted(async_steps, max_batch=1)
    bounds: list[tuple[int, int]] = []
    launch = engine.runner.launch

    def watched(num_rows: int, max_length: int, *arguments: Any) -> Any:
        bounds.append((int(engine.parts.state.lengths[:num_rows].max()), max_length))
        return launch(num_rows, max_length, *arguments)

    monkeypatch.setattr(engine.runner, "launch", watched)
    engine.generate([toy.changed(ASKED[2], max_new_tokens=14)])
    assert len(bounds) >= 5 and all(length == bound for length, bound in bounds[:4])


def test_a_request_is_filled_in_with_its_first_piece() -> None:
    """What penalties need of it is there before its first step, and is not filled in anew with the next piece."""
    asked = toy.changed(ASKED[2], presence_penalty=0.5, max_new_tokens=3)
    engine = toy.engine_of(toy.autoregressive(TARGET), toy.Setup(prefill_chunk=8, prefill_tile=4), TARGET)
    with engine.session(SamplingNeeds.of([asked.sampling])) as session:
        session.submit(asked)
        session.step()
        penalties = engine.parts.state.penalties
        assert penalties is not None and float(penalties.presence[0]) == 0.5
        penalties.presence[0] = 0.25
        session.step()
        assert engine.scheduler.running and float(penalties.presence[0]) == 0.25
