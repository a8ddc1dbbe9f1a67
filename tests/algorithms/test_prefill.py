"""Prompts in chunks and tiles: the same drafts as in one piece, and no request waits for a whole prompt."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from algorithms.engine.scheduler import ABORTED, PrefillSegment
from algorithms.engine.session import Session
from algorithms.step.prefill_batch import PrefillBatch
from algorithms.step.sampling_params import SamplingNeeds
from tests.algorithms.device_operations import DeviceOperations
from tests.algorithms.drafters import ALL_MAKERS, KINDS, TARGET, Watched
from tests.algorithms.test_identity import CUTS
from tests.algorithms.toy import Setup, answers, autoregressive, changed, engine_of, requests, run

pytestmark = pytest.mark.usefixtures("random_drafters")


def drafted(maker: str, setup: Setup) -> dict[tuple[int, ...], list[int]]:
    """What the algorithm drafts behind each text, one request after another where their drafts depend on each other."""
    algorithm = ALL_MAKERS[maker]()
    watched = Watched(algorithm)
    setup = replace(setup, max_batch=1 if algorithm.learns else 5)
    run(algorithm, [requests(8, 3)[place] for place in (1, 3, 4, 6, 7)], setup, TARGET)
    return watched.by_text()


@pytest.mark.parametrize("maker", [name for name in KINDS if name != "autoregressive"])
def test_drafts_do_not_depend_on_the_cut(maker: str) -> None:
    """Catches features, keys and texts that are lost, doubled or out of place at the border of a tile."""
    whole = drafted(maker, Setup(prefill_tile=64))
    assert len(whole) > 9
    for cut in ("a tile a step", "tiles of one chunk"):
        assert drafted(maker, Setup(**CUTS[cut])) == whole


@pytest.mark.parametrize("graph", ["none", "step"])
def test_a_running_request_waits_for_one_chunk_at_most(monkeypatch: pytest.MonkeyPatch, graph: str) -> None:
    """Every call steps the running request and prefills a chunk of the long prompt, each token once and in order."""
    seen: dict[int, list[int]] = defaultdict(list)
    per_step: list[int] = []
    original = PrefillBatch.send

    def watched(self: PrefillBatch, pieces: Sequence[PrefillSegment]) -> None:
        per_step.append(sum(piece.num_tokens for piece in pieces))
        for running, start, count in pieces:
            seen[running.request.id] += range(start, start + count)
        original(self, pieces)

    monkeypatch.setattr(PrefillBatch, "send", watched)
    short, long, last = (requests(8)[i] for i in (1, 7, 4))
    engine = engine_of(autoregressive(TARGET), Setup(prefill_chunk=6, prefill_tile=3, graph=graph), TARGET)
    done = []
    with engine.session(SamplingNeeds()) as session:
        session.submit(short)
        done += session.step()
        session.submit(long)
        session.submit(last)
        for number in range(2, 7):
            done += session.step()
            assert engine.scheduler.begun is not None and engine.scheduler.begun.request is long
            assert session.report().emitted_tokens == number
        while not session.idle:
            done += session.step()
    assert max(per_step) == 6
    assert dict(seen) == {r.id: list(range(len(r.prompt_ids) - 1)) for r in (short, long, last)}
    expected = answers([short, long, last], Setup(), TARGET)
    assert [
        c.token_ids for c in sorted(done, key=lambda c: (short.id, long.id, last.id).index(c.request_id))
    ] == expected


def test_a_request_ends_during_its_prefill() -> None:
    """Its pages are free again, its row is padding, and the next prompt takes its place."""
    engine = engine_of(autoregressive(TARGET), Setup(prefill_chunk=4, prefill_tile=4, graph="step"), TARGET)
    short, long, other = (requests(8)[i] for i in (1, 7, 3))
    done = []
    with engine.session(SamplingNeeds()) as session:
        for request in (short, long, other):
            session.submit(request)
        for _ in range(3):
            done += session.step()
        free = engine.scheduler.num_free_pages
        ended = session.abort(long.id)
        assert ended is not None and (ended.finish_reason, ended.token_ids) == (ABORTED, [])
        assert engine.scheduler.num_free_pages == free + engine.scheduler.pages_for(long)
        assert engine.parts.state.active.tolist() == [1, 0, 0] and session.abort(long.id) is None
        while not session.idle:
            done += session.step()
    assert [c.token_ids for c in done] == answers([short, other], Setup(), TARGET)
    assert engine.scheduler.num_free_pages == engine.scheduler.num_pages


@pytest.mark.parametrize("maker", KINDS)
def test_warm_up_touches_nothing(maker: str) -> None:
    """Every size of forward runs without a token; the engine then serves as one that was never warmed up."""
    algorithm = ALL_MAKERS[maker]()
    engine = engine_of(algorithm, Setup(prefill_chunk=20, prefill_tile=4), TARGET)
    engine.generate(requests(3, 4))

    def kept() -> list[torch.Tensor]:
        state = engine.parts.state
        tensors = [state.history, state.lengths, state.page_table]
        tensors += [cache.kv for cache in engine.parts.resources.caches]
        if (rows := getattr(algorithm, "_kept", None)) is not None:
            tensors.append(rows.read(slice(0, state.max_batch)))
        for texts in engine.parts.resources.histories:
            tensors += texts.store
        return [tensor.clone() for tensor in tensors]

    before = kept()
    with torch.inference_mode():
        engine.prefiller.warm_up()
    assert all(torch.equal(one, two) for one, two in zip(kept(), before, strict=True))


class Unseen:
    """Stands for a CUDA graph, whose operations are not launched one by one."""

    replays: Counter[str] = Counter()

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        Unseen.replays[self._work.func.__name__] += 1  # type: ignore[attr-defined]
        with _disable_current_modes():
            self._work()


def test_the_host_launches_a_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that enter together cost one copy and one graph, however many they are, and a step one graph and the
    copy of its results. Requests that leave cost what puts the others in their rows, however many they are."""
    monkeypatch.setattr("tests.algorithms.toy.Replayed", Unseen)
    algorithm = ALL_MAKERS["eagle3_chain"]()
    engine = engine_of(algorithm, Setup(max_batch=4, prefill_tile=16, graph="step", async_steps=0), TARGET)
    first, *others = requests(4, 24)
    with engine.session(SamplingNeeds()) as session:
        session.submit(changed(first, max_new_tokens=12))
        session.step()  # the first draft is checked, one operation after the other
        for request in others:
            session.submit(request)
        Unseen.replays.clear()
        with DeviceOperations() as entered:
            session.step()
        assert entered.names == {"copy_": 2} and Unseen.replays == {"_forward": 1, "_run": 1}
        done: list[Any] = []
        while not done:
            with DeviceOperations() as left:
                done = session.step()
        assert done[0].request_id == 0 and left.names.total() <= 1 + 10, left.names


@pytest.mark.parametrize("maker", ["autoregressive", "eagle3_tree"])
def test_reading_first_gives_the_same_tokens_in_fewer_steps(monkeypatch: pytest.MonkeyPatch, maker: str) -> None:
    """No step is launched for a request that has ended while others wait for its row."""
    asked = requests(6, 5)
    steps = []
    for first in (False, True):
        monkeypatch.setattr(
            Session, "_reads_first", lambda self, first=first: first and len(self._scheduler.waiting) > 0
        )
        generation = run(ALL_MAKERS[maker](), asked, Setup(max_batch=1, async_steps=1), TARGET)
        assert [c.token_ids for c in generation.completions] == answers(asked, Setup(), TARGET)
        steps.append(generation.num_steps)
    assert steps[0] - steps[1] >= len(asked) - 2


def test_when_a_step_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wasted steps are weighed against the time that the host works, and only where a request waits for a row."""
    engine = engine_of(autoregressive(TARGET), Setup(max_batch=2, async_steps=1), TARGET)
    with engine.session(SamplingNeeds()) as session:
        session._loop_ms, session._readback.waited_ms = 100.0, 90.0
        session._num_finished, session._slot_steps = 2, 10
        assert not session._reads_first()
        for request in requests(2):
            session.submit(request)
        assert session._reads_first()
        with monkeypatch.context() as patch:
            patch.setattr("algorithms.engine.session.parallel", lambda: True)
            assert not session._reads_first()  # the ranks' clocks differ
        session._slot_steps = 50  # long answers: one step of 25 is wasted, the host works a tenth of the time
        assert not session._reads_first()
        session._slot_steps, session._readback.waited_ms = 10, 50.0
        assert not session._reads_first()
