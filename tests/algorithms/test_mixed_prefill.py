"""Prompts in captured steps: the tokens are those of prompts in chunks of their own, whoever arrives when."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import algorithms.engine.session as session_module
from algorithms.algorithm import Observation
from algorithms.engine.engine import Engine, prompts_ahead
from algorithms.engine.request import Completion, Request
from algorithms.engine.scheduler import PrefillSegment
from algorithms.engine.settings import RuntimeSettings
from algorithms.step.prefill import Prefiller
from algorithms.step.prefill_batch import PrefillBatch
from algorithms.step.runner import StepRunner
from algorithms.step.sampling_params import SamplingNeeds
from tests.algorithms.drafters import ALL_MAKERS, KINDS, TARGET, hinted
from tests.algorithms.test_identity import reference
from tests.algorithms.toy import Setup, answers, autoregressive, changed, engine_of, requests, run

pytestmark = pytest.mark.usefixtures("random_drafters")

RIDING = Setup(graph="step", prefill_chunk=12, prefill_tile=4, page_size=4)


def served(engine: Engine, asked: Sequence[Request], seed: int) -> list[Completion]:
    """`asked` in order, each submitted after a random number of steps."""
    draw, waiting, done = random.Random(seed), list(asked), []
    with engine.session(SamplingNeeds.of(request.sampling for request in asked)) as session:
        while waiting or not session.idle:
            for _ in range(draw.choice((0, 0, 1, 2))):
                if waiting:
                    session.submit(waiting.pop(0))
            done += session.step()
    return sorted(done, key=lambda completion: completion.request_id)


class Rides:
    """Counts the prompt tokens that are prefilled in steps, and between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_steps = self.between = 0
        launch, send, between = StepRunner.launch, PrefillBatch.send, Prefiller.run
        held: list[int] = []

        def sent(chunk: PrefillBatch, pieces: Sequence[PrefillSegment]) -> None:
            held.append(sum(piece.num_tokens for piece in pieces))
            send(chunk, pieces)

        def launched(runner: StepRunner, *arguments: Any) -> torch.Tensor:
            if arguments[-1] is not None:
                self.in_steps += held[-1]
            return launch(runner, *arguments)

        def prefilled(prefiller: Prefiller, pieces: Sequence[PrefillSegment]) -> None:
            self.between += sum(piece.num_tokens for piece in pieces)
            between(prefiller, pieces)

        monkeypatch.setattr(PrefillBatch, "send", sent)
        monkeypatch.setattr(StepRunner, "launch", launched)
        monkeypatch.setattr(Prefiller, "run", prefilled)


@pytest.mark.parametrize("maker", [name for name in KINDS if name not in ("dflash_window", "suffix_own")])
def test_requests_that_arrive_at_any_time_get_the_targets_own_text(monkeypatch: pytest.MonkeyPatch, maker: str) -> None:
    """Prompts longer than a chunk, of one token and of one tile, beside greedy and sampled requests that end in every
    way. Catches rows that take part before their prompts are complete, or are lost on their way up."""
    asked, alone, texts = reference()
    seed = sum(map(ord, maker))
    setup = Setup(
        graph="step", page_size=4, max_batch=2 + seed % 2, prefill_chunk=12, prefill_tile=4, async_steps=seed % 3 % 2
    )
    engine = engine_of(hinted(ALL_MAKERS[maker](), texts), setup, TARGET)
    rides = Rides(monkeypatch)
    got = served(engine, asked, seed)
    for ours, plain in zip(got, alone, strict=True):
        assert (ours.token_ids, ours.text, ours.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
    assert engine.scheduler.num_free_pages == engine.scheduler.num_pages
    assert rides.in_steps > 0 and rides.in_steps + rides.between == sum(len(r.prompt_ids) - 1 for r in asked)


@pytest.mark.parametrize("maker", ["eagle3_chain", "dflash_chain", "standalone_tree"])
def test_drafters_learn_the_same(maker: str) -> None:
    """What a drafter keeps of a prompt does not depend on whether the prompt rode in a step: it accepts the same."""
    asked, _, texts = reference()
    counts = []
    for setup in (RIDING, Setup(graph="step", prefill_tile=64)):
        engine = engine_of(hinted(ALL_MAKERS[maker](), texts), setup, TARGET)
        counts.append([completion.accepted_counts for completion in served(engine, asked, 5)])
    assert counts[0] == counts[1]


def test_a_prompt_is_prefilled_before_a_row_is_free() -> None:
    """The next request waits with a complete prompt, and runs in the step after the one that freed its row."""
    first, second, third = (changed(request, max_new_tokens=4) for request in requests(3))
    engine = engine_of(autoregressive(TARGET), Setup(max_batch=1, graph="step", async_steps=0, prefill_tile=16), TARGET)
    assert engine.parts.state.max_batch == 1 and engine.parts.resources.max_batch == 1 + prompts_ahead(
        RuntimeSettings(max_batch=1)
    )
    done = []
    with engine.session(SamplingNeeds()) as session:
        for request in (first, second, third):
            session.submit(request)
        for emitted in range(1, 4):
            assert session.step() == [] and session.report().emitted_tokens == emitted
            # The step of the second prompt is the first one that has a request to ride with.
            assert [running.is_complete for running in engine.scheduler.held] == [True] * min(1, emitted - 1)
        done += session.step()
        assert [c.request_id for c in done] == [0] and [r.request.id for r in engine.scheduler.running] == [1]
        done += session.step()
        assert session.report().emitted_tokens == 5
        while not session.idle:
            done += session.step()
    assert [c.token_ids for c in done] == answers([first, second, third], Setup(), TARGET)
    assert all(c.ttft_ms <= c.total_ms for c in done)


def test_a_long_prompt_runs_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another request runs, in as many chunks as it needs, with a step after each. A shorter one still rides."""
    monkeypatch.setattr(session_module, "_LONG_PROMPT", 20)
    first, other, short, long = requests(4, max_new_tokens=12)
    short, long = (
        replace(short, prompt_ids=short.prompt_ids[:6]),
        replace(long, prompt_ids=(long.prompt_ids * 2)[:40]),
    )
    setup = replace(RIDING, max_batch=4, async_steps=0)
    engine = engine_of(autoregressive(TARGET), setup, TARGET)
    done = []
    with engine.session(SamplingNeeds()) as session:
        session.submit(first)
        session.step()
        rides = Rides(monkeypatch)
        session.submit(short)
        session.step()
        assert (rides.in_steps, rides.between) == (5, 0)
        session.submit(long)
        before = session.report().emitted_tokens
        for chunk in range(1, 4):
            done += session.step()
            assert (rides.in_steps, rides.between) == (5, 12 * chunk)
        assert session.report().emitted_tokens - before == 6, "both requests go on"
        while not session.idle:
            done += session.step()
    assert (rides.in_steps, rides.between) == (5, 39)
    found = [c.token_ids for c in sorted(done, key=lambda completion: completion.request_id)]
    assert found == answers([first, short, long], Setup(), TARGET)


def test_a_waiting_request_can_be_aborted() -> None:
    """Its pages and its row are free again, and the one behind it is next."""
    asked = [changed(request, max_new_tokens=5) for request in requests(4)]
    engine = engine_of(autoregressive(TARGET), Setup(max_batch=1, graph="step", prefill_tile=16), TARGET)
    done = []
    with engine.session(SamplingNeeds()) as session:
        for request in asked:
            session.submit(request)
        session.step()
        session.step()
        assert [running.request.id for running in engine.scheduler.held] == [1]
        assert session.abort(1) is not None and not engine.scheduler.held
        while not session.idle:
            done += session.step()
    assert [c.request_id for c in done] == [0, 2, 3]
    assert [c.token_ids for c in done] == answers([asked[0], asked[2], asked[3]], Setup(), TARGET)


@pytest.mark.parametrize(
    ("setup", "rides"),
    [
        (Setup(graph="step"), True),
        (Setup(graph="verify"), False),
        (Setup(graph="none"), False),
        (Setup(graph="step", mixed_prefill=False), False),
    ],
)
def test_where_prompts_ride(monkeypatch: pytest.MonkeyPatch, setup: Setup, rides: bool) -> None:
    """Only in steps that are one graph. Elsewhere nothing is prefilled before there is a row."""
    counted, asked = Rides(monkeypatch), requests(5, 4)
    engine = engine_of(autoregressive(TARGET), setup, TARGET)
    generation = engine.generate(asked)
    assert [c.token_ids for c in generation.completions] == answers(asked, Setup(), TARGET)
    assert (counted.in_steps > 0) == rides == bool(generation.graphs.step_tiles)
    assert engine.parts.resources.max_batch == setup.max_batch + (
        prompts_ahead(RuntimeSettings(max_batch=setup.max_batch)) if rides else 0
    )


def test_steps_of_several_sizes_have_room_in_the_largest_batch_alone() -> None:
    """And for every second size of a chunk, and the largest: each is captured with every number of nodes."""
    of_one, of_several = (
        engine_of(
            ALL_MAKERS["ngram"](), Setup(max_batch=4, graph="step", adaptive=adaptive, max_length=96), TARGET
        ).runner
        for adaptive in (False, True)
    )
    needs = SamplingNeeds()
    sizes = [chunk.size for chunk in of_one.mixed_prefills(needs, 4)]
    assert [chunk.size for chunk in of_one.mixed_prefills(needs, 1)] == sizes[(len(sizes) - 1) % 2 :: 2]
    assert len(sizes) % 2 == 0 and [chunk.size for chunk in of_several.mixed_prefills(needs, 4)] == [
        *sizes[::2],
        sizes[-1],
    ]
    assert [bool(of_several.mixed_prefills(needs, rows)) for rows in (1, 2, 3, 4)] == [False, False, True, True]


def test_phase_times_add_up_with_prompts_in_steps() -> None:
    """What a chunk adds to a step counts as prefill, not as decoding."""
    engine = engine_of(autoregressive(TARGET), RIDING, TARGET)
    generation = engine.generate(requests(8, 8))
    assert sum(generation.phase_times_ms.values()) == pytest.approx(generation.decode_ms, rel=0.05)
    added = engine.runner.mixed_ms
    assert added["verify"] > 0 and set(added) == {"draft", "verify", "accept", "commit"}
    assert generation.prefill_ms > sum(added.values())


def test_prompts_are_observed_behind_the_step_they_rode_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter sees the tokens of a step, and then the prompts that rode in it."""
    algorithm, prompts = autoregressive(TARGET), []

    def observe(seen: Observation) -> None:
        if bool(seen.counts.any()):
            prompts.append(seen.is_prefill)

    monkeypatch.setattr(algorithm, "observe", observe)
    run(algorithm, requests(2, 3), Setup(max_batch=1, graph="step"), TARGET)
    assert prompts == [True, False, False, True, False, False, False, False]
