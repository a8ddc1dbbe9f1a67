"""Random requests, settings, aborts and faults against one engine at a time, each round from one seed.

    python -m tests.algorithms.fuzz --seconds 1800
    python -m tests.algorithms.fuzz --seed 17 --rounds 1

A round draws an algorithm over random models, a backend, sizes of pages, batch and pool, a level of capture, and some
requests with random sampling parameters, a few of which cannot be served. While they are served, requests are aborted,
rows of logits of some turn to NaN, at all nodes or at one, and now and then an allocation fails in the middle of a
step. Then these must hold: a request that can never be served is refused when it is submitted, and changes nothing; one
that waits for pages is served later; every answer is what the target alone writes, up to a token where rounding
decides, or a beginning of it where the request was aborted or its own logits broke; pages and rows are accounted for
after every step; a failed allocation ends its session, and the engine serves the next one.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

from algorithms.runtime.algorithm import Algorithm
from algorithms.runtime.engine import Engine, Session
from algorithms.runtime.request import Completion, EngineError, Request
from algorithms.runtime.sampling_params import SamplingNeeds, SamplingParams
from algorithms.runtime.scheduler import ABORTED, FAILED
from algorithms.runtime.step import Step
from algorithms.standalone import Standalone
from specdec_kernels import SamplingTensors
from specdec_kernels.sampling.reference import philox_uniform, pick_tokens
from tests.algorithms.drafters import ALL_MAKERS, TARGET, hinted, load_random_drafters
from tests.algorithms.soak import check_counts, check_pages, check_rows
from tests.algorithms.test_forbidden_tokens import forbidden
from tests.algorithms.test_sampling_parameters import following, penalised
from tests.algorithms.toy import VOCAB, Setup, autoregressive, engine_of, scripts, spell

NEAR_TIE = 1e-5
"""Rounding decides between two tokens whose logits, or whose places in the cumulative distribution, lie as near."""
LONGEST = 56
"""Tokens of a request that fits the context."""
MAKERS: dict[str, Callable[[], Algorithm]] = ALL_MAKERS | {
    f"standalone_{rule}": lambda rule=rule: Standalone(Standalone.Config(steps=3, rule=rule), TARGET, "random")
    for rule in ("rejection", "block")
}
EVERYTHING = SamplingNeeds(sampled=True, filtered=True, penalised=True, forbids=True, logprobs=True, top_logprobs=3)


class AllocationFailed(torch.OutOfMemoryError):
    """The error of torch's allocator, from here."""


def draw_setup(draw: random.Random) -> Setup:
    page_size = draw.choice((1, 3, 4, 16))
    return Setup(
        backend=draw.choice(("fa4", "torch", "hybrid")),
        page_size=page_size,
        max_batch=draw.randint(1, 5),
        num_pages=draw.choice((None, None, draw.randint(40, 200) // page_size + 1)),
        max_length=LONGEST,
        graph=draw.choice(("none", "draft", "verify", "step")),
        overlap=draw.randint(0, 2),
        prefill_chunk=draw.choice((3, 8, 64)),
        prefill_tile=draw.choice((2, 4, 16)),
    )


def draw_sampling(draw: random.Random) -> SamplingParams:
    """Mostly plain, sometimes at the ends of the ranges."""

    def sometimes(plain: Any, *others: Any) -> Any:
        return draw.choice(others) if draw.random() < 0.25 else plain

    text = spell(draw.choices(range(VOCAB), k=draw.randint(1, 3)))
    most = draw.randint(1, 20)
    words = [tuple(draw.choices(range(VOCAB), k=draw.randint(1, 3))) for _ in range(9)]
    return SamplingParams(
        max_new_tokens=most,
        bad_words=sometimes((), tuple(words), tuple((token,) for token in range(1, VOCAB, 2))),
        min_tokens=sometimes(0, most, (most + 1) // 2),
        temperature=draw.choice((0.0, 0.0, 0.7, 1.0, 3.0, 1e-4)),
        top_k=sometimes(0, 1, 5, VOCAB, 2**31 - 1),
        top_p=sometimes(1.0, 0.9, 0.3, 1e-6),
        min_p=sometimes(0.0, 0.05, 0.5, 1.0),
        repetition_penalty=sometimes(1.0, 0.5, 1.3, 5.0),
        presence_penalty=sometimes(0.0, -1.0, 0.6),
        frequency_penalty=sometimes(0.0, 0.4, -0.2),
        logit_bias=sometimes({}, {draw.randrange(VOCAB): 2.0}, {draw.randrange(VOCAB): -1e9}),
        seed=sometimes(draw.randrange(1000), 2**63 - 1),
        stop_strings=sometimes((), (text,), (text, spell([draw.randrange(VOCAB)]))),
        logprobs=draw.random() < 0.3,
        top_logprobs=sometimes(0, 1, 3),
    )


def draw_request(draw: random.Random, number: int) -> Request:
    sampling = draw_sampling(draw)
    most = LONGEST - sampling.max_new_tokens
    length = draw.choice((1, 2, draw.randint(1, most), draw.randint(1, most)))
    if draw.random() < 0.08:
        length = most + draw.randint(1, 4)
    stops = frozenset(draw.choices(range(VOCAB), k=draw.choice((0, 0, 1, 2))))
    return Request(number, tuple(draw.choices(range(VOCAB), k=length)), sampling, stop_token_ids=stops)


def is_near_tie(request: Request, output: list[int], tokens: set[int]) -> bool:
    """Whether rounding decides which of two `tokens` follows `output`."""
    text, sampling = [*request.prompt_ids, *output], request.sampling
    logits = penalised(following(text), request, output)
    logits[list(forbidden(request, output))] = -float("inf")
    if sampling.temperature == 0:
        values = logits[list(tokens)]
        return bool(values.max() == logits.max() and values.max() - values.min() < NEAR_TIE)
    drawn = SamplingTensors(
        temperature=torch.tensor([sampling.temperature]),
        top_k=torch.tensor([sampling.top_k], dtype=torch.int32),
        top_p=torch.tensor([sampling.top_p]),
        min_p=torch.tensor([sampling.min_p]),
    )
    place = philox_uniform(torch.tensor([sampling.seed]), torch.tensor([len(text) - 1]))
    around = [(place + step).clamp(0, 1) for step in (-NEAR_TIE, NEAR_TIE)]
    return tokens == {int(pick_tokens(logits.float()[None], drawn, uniforms=uniform).tokens) for uniform in around}


class Faults:
    """What is injected into an engine: logits of requests that turn to NaN, and one allocation that fails."""

    def __init__(self, engine: Engine, draw: random.Random, requests: list[Request]) -> None:
        self._engine = engine
        broken = [request for request in requests if draw.random() < 0.15]
        self.from_length = {r.id: len(r.prompt_ids) - 1 + draw.randrange(r.sampling.max_new_tokens) for r in broken}
        """Committed tokens from which on the logits of a request are NaN."""
        self._node = {request.id: draw.choice((None, 0, draw.randrange(8))) for request in broken}
        self._countdown: int | None = None

    def may_break(self, request: Request) -> bool:
        return request.id in self.from_length

    def fail_an_allocation_after(self, calls: int | None) -> None:
        self._countdown = calls

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Break logits behind every verification, and let allocations fail in the algorithm, the target and the
        backend."""
        parts, verify = self._engine.parts, Step.verify

        def verified(step: Step) -> None:
            verify(step)
            if step._parts is parts:
                self._poison(step)

        patch.setattr(Step, "verify", verified)
        for holder, name in (
            (parts.algorithm, "propose"),
            (parts.algorithm, "observe"),
            (parts.resources.target.model, "forward"),
            (parts.resources.target.model, "logits"),
            (parts.resources.backend, "plan"),
        ):
            patch.setattr(holder, name, self._may_fail(getattr(holder, name)))

    def _may_fail(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            if self._countdown is not None:
                self._countdown -= 1
                if self._countdown < 0:
                    self._countdown = None
                    raise AllocationFailed("an allocation of this round fails")
            return call(*arguments, **options)

        return called

    def _poison(self, step: Step) -> None:
        lengths = step._batch.lengths.tolist()
        for running in self._engine.scheduler.rows:
            number = running.request.id
            if running.row < len(lengths) and lengths[running.row] >= self.from_length.get(number, LONGEST + 99):
                node = self._node[number]
                nodes = slice(None) if node is None else min(node, step.logits.shape[1] - 1)
                step.logits[running.row, nodes] = float("nan")


class Round:
    """One seed, from its drawing to its end."""

    def __init__(self, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        self.maker = draw.choice(list(MAKERS))
        self.setup = draw_setup(draw)
        self._requests = [draw_request(draw, number) for number in range(draw.randint(3, 9))]
        self.counts: Counter[str] = Counter()
        self._alone: dict[int, list[int]] = {}

    def run(self) -> None:
        patch = pytest.MonkeyPatch()
        try:
            load_random_drafters(patch)
            fitting = [request for request in self._requests if request.max_length <= LONGEST]
            self._learn(fitting)
            self._algorithm = hinted(MAKERS[self.maker](), scripts(fitting, [self._alone[r.id] for r in fitting]))
            self._engine = self._built()
            self._faults = Faults(self._engine, self._draw, self._requests)
            self._faults.install(patch)
            for fails in (self._draw.random() < 0.4, False):
                self._serve(fails)
                assert self._engine.scheduler.num_free_pages == self._engine.scheduler.num_pages
                assert not self._engine.parts.state.active.any()
        finally:
            patch.undo()

    def _built(self) -> Engine:
        return engine_of(self._algorithm, self.setup, TARGET)

    def _learn(self, requests: list[Request]) -> None:
        """What the target alone writes, one request at a time."""
        engine = engine_of(autoregressive(TARGET), Setup(max_batch=1, max_length=LONGEST), TARGET)
        self._alone = {c.request_id: c.token_ids for r in requests for c in engine.generate([r]).completions}

    def _serve(self, fails: bool) -> None:
        """One session over all requests; `fails`: an allocation fails on the way, if the session lives that long."""
        waiting = self._draw.sample(self._requests, len(self._requests))
        self._live: dict[int, Request] = {}
        try:
            with self._engine.session(EVERYTHING) as session:
                self._faults.fail_an_allocation_after(self._draw.randint(0, 60) if fails else None)
                for _ in range(40 * LONGEST * len(waiting)):
                    while waiting and self._draw.random() < 0.5:
                        self._submit(session, waiting.pop())
                    self._step(session)
                    if not waiting and session.idle:
                        break
                assert not self._live, f"requests {sorted(self._live)} never end"
        except AllocationFailed:
            self.counts["failed allocations"] += 1
        finally:
            self._faults.fail_an_allocation_after(None)

    def _submit(self, session: Session, request: Request) -> None:
        scheduler = self._engine.scheduler
        served = request.max_length <= LONGEST and scheduler.pages_for(request) <= scheduler.num_pages
        for asked in (request, request):
            try:
                session.submit(asked)
            except EngineError as error:
                assert request.id in self._live or not served, f"{error}, and request {request.id} fits"
                known = ("context of", "KV pool has", "already here")
                assert any(text in str(error) for text in known), error
                self.counts["refused"] += request.id not in self._live
            else:
                assert served and request.id not in self._live, f"request {request.id} cannot be served"
                self._live[request.id] = request
        check_pages(scheduler)

    def _step(self, session: Session) -> None:
        if self._live and self._draw.random() < 0.04:
            completion = session.abort(self._draw.choice(list(self._live)))
            assert completion is not None
            self._check(completion)
        assert session.abort(-1) is None
        for completion in session.step():
            self._check(completion)
        check_pages(self._engine.scheduler)
        check_rows(self._engine, early=self.setup.overlap == 0)
        self.counts["steps"] += 1

    def _check(self, completion: Completion) -> None:
        """An answer against what the target alone writes."""
        request = self._live.pop(completion.request_id)
        alone, written, reason = self._alone[request.id], completion.token_ids, completion.finish_reason
        check_counts(completion, self._algorithm.max_depth, request.sampling.logprobs)
        self.counts[reason] += 1
        if reason == FAILED:
            assert self._faults.may_break(request) and completion.error, f"request {request.id} failed: {completion}"
            assert len(request.prompt_ids) + len(written) > self._faults.from_length[request.id]
        if self._algorithm.rule != "target_only" and request.sampling.temperature > 0:
            return
        whole = reason not in (FAILED, ABORTED)
        if written == (alone if whole else alone[: len(written)]):
            return
        same = next((at for at, (ours, its) in enumerate(zip(written, alone, strict=False)) if ours != its), None)
        assert same is not None and is_near_tie(request, alone[:same], {written[same], alone[same]}), (
            f"request {request.id}: {written}, alone {alone}"
        )
        self.counts["near ties"] += 1


def run_round(seed: int) -> Counter[str]:
    """One round; an error of it names the seed."""
    one = Round(seed)
    try:
        one.run()
    except Exception as error:
        again = f"python -m tests.algorithms.fuzz --seed {seed} --rounds 1"
        raise AssertionError(f"seed {seed}, {one.maker}, {one.setup}: {error!r}\nrun it again: {again}") from error
    return one.counts


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.algorithms.fuzz", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no round after this time")
    parser.add_argument("--rounds", type=int, help="stop after so many rounds")
    parser.add_argument("--seed", type=int, help="of the first round; the next ones count up (default: the time)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    first = int(time.time()) if arguments.seed is None else arguments.seed
    began, total = time.monotonic(), Counter[str]()
    for done in count():
        if done == arguments.rounds or time.monotonic() - began > arguments.seconds:
            break
        counts = run_round(first + done)
        total += counts
        print(f"seed {first + done}: " + ", ".join(f"{n} {name}" for name, n in counts.items() if n), flush=True)
    print("all of them:", ", ".join(f"{n:,} {name}" for name, n in total.items()), flush=True)


if __name__ == "__main__":
    main()
