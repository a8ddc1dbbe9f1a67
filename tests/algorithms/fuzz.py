"""Random requests, settings, aborts and faults against one engine at a time, each round from one seed.

    python -m tests.algorithms.fuzz --seconds 1800
    python -m tests.algorithms.fuzz --seed 17 --rounds 1

A round draws an algorithm over random models, a backend, sizes of pages, batch and pool, a level of capture, whether
prompts ride in steps, whether the size of steps changes at random, and some requests with random sampling parameters
and grammars, a few of which cannot be served. While they are served, requests are aborted, rows of logits of some turn
to NaN, at all nodes or at one, and now and then an allocation fails in the middle of a step. Then these must hold: a
request that can never be served is refused when it is submitted, and changes nothing; one that waits for pages is
served later; every answer is what the target alone writes, up to a token where rounding decides, or a beginning of it
where the request was aborted or its own logits broke; tokens that depend on drawn drafts are tokens that the target
may draw; an answer that has ended is in its grammar; pages and slots are accounted for after every step, and nothing
is written to a free page; a failed allocation ends its session, and the engine serves the next one.
"""

import argparse
import random
import time
import traceback
from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
import torch

from algorithms.engine.request import Completion, EngineError, Request
from algorithms.engine.scheduler import ABORTED, FAILED
from algorithms.engine.session import Session
from algorithms.step.sampling_params import SamplingNeeds
from experiments.tasks.numerical_tie import distance_of_uniform
from specdec_kernels import SamplingTensors
from specdec_kernels.sampling import row_distribution
from tests.algorithms.drafters import LOADING, TARGET, blurred_target, hinted, load_random_drafters
from tests.algorithms.fuzz_cases import LONGEST, MAKERS, SAMPLED, draw_requests, draw_setup, in_grammar
from tests.algorithms.fuzz_checks import Canaries, check_counts, check_pages, check_rows
from tests.algorithms.fuzz_faults import AllocationFailed, Faults
from tests.algorithms.reference_loop import logits_after
from tests.algorithms.test_adaptive import COLUMNS, Random, paced, sizes_of
from tests.algorithms.test_constraints import allowed, read
from tests.algorithms.toy import Setup, autoregressive, engine_of, random_drafter, scripts, time_once

NEAR_TIE = 1e-5
"""Rounding decides between two tokens whose logits, or whose places in the cumulative distribution, lie as near."""
EVERYTHING = SamplingNeeds(sampled=True, filtered=True, penalised=True, forbids=True, logprobs=True, top_logprobs=3)


def is_near_tie(request: Request, output: list[int], tokens: set[int]) -> bool:
    """Whether rounding decides which of two `tokens` follows `output`."""
    logits = logits_after(request, output, allowed)
    if request.sampling.temperature == 0:
        values = logits[list(tokens)]
        return bool(values.max() == logits.max() and values.max() - values.min() < NEAR_TIE)
    return distance_of_uniform(logits.float(), request, len(output), list(tokens)) < NEAR_TIE


def may_follow(request: Request, output: list[int], token: int) -> bool:
    """Whether a sampled request may write `token` behind `output`, if rounding is on its side."""
    logits, sampling = logits_after(request, output, allowed), request.sampling
    logits[token] += NEAR_TIE
    around = SamplingTensors(
        temperature=torch.tensor([sampling.temperature]),
        top_k=torch.tensor([sampling.top_k], dtype=torch.int32),
        top_p=torch.tensor([min(1.0, sampling.top_p + NEAR_TIE)]),
        min_p=torch.tensor([sampling.min_p * (1 - NEAR_TIE)]),
    )
    return bool(row_distribution(logits.float()[None], around).weights[0, token] > 0)


class Round:
    """One seed, from its drawing to its end."""

    def __init__(self, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        self.maker = draw.choice(list(MAKERS))
        constrained = draw.random() < 0.4
        self.setup = draw_setup(draw, self.maker, constrained)
        self._requests = draw_requests(draw, constrained)
        self.counts: Counter[str] = Counter()
        self._alone: dict[int, Completion] = {}

    def run(self) -> None:
        patch = pytest.MonkeyPatch()
        try:
            self._patch_models(patch)
            fitting = [request for request in self._requests if request.max_length <= LONGEST]
            self._learn(fitting)
            self._build(scripts(fitting, [self._alone[r.id].token_ids for r in fitting]))
            self._faults = Faults(self._engine, self._draw, self._requests)
            self._faults.install(patch)
            for fails in (self._draw.random() < 0.4, False):
                self._serve(fails)
                assert self._engine.scheduler.num_free_pages == self._engine.scheduler.num_pages
                assert not self._engine.parts.state.active.any()
        finally:
            patch.undo()

    def _patch_models(self, patch: pytest.MonkeyPatch) -> None:
        """Random drafters, some of them nearly the target; they observe at least every few plain steps."""
        load_random_drafters(patch)
        time_once(patch)
        if self._draw.random() < 0.5:
            patch.setattr(f"{LOADING}.load_draft", lambda *_: blurred_target())
        if "markov" in self.maker:
            patch.setattr("algorithms.dflash.loading.load_dflash", lambda *_: random_drafter(markov_rank=5))
        for module in ("context", "runner"):
            patch.setattr(f"algorithms.step.{module}.COLUMNS", COLUMNS)

    def _build(self, texts: list[list[int]]) -> None:
        """The engine; drawn drafts stay as they were drawn half of the time, all others are often right."""
        algorithm = MAKERS[self.maker]()
        keep = self.maker in SAMPLED and self._draw.random() < 0.5
        self._algorithm = algorithm if keep else hinted(algorithm, texts)
        self._engine = engine_of(self._algorithm, self.setup, TARGET)
        if self._engine.parts.sizing is not None:
            paced(self._engine, Random(sizes_of(self._engine), self._draw.randrange(1000)))

    def _learn(self, requests: list[Request]) -> None:
        """What the target alone writes, one request at a time."""
        setup = Setup(max_batch=1, max_length=LONGEST, grammars=self.setup.grammars)
        engine = engine_of(autoregressive(TARGET), setup, TARGET)
        self._alone = {c.request_id: c for r in requests for c in engine.generate([r]).completions}

    def _serve(self, fails: bool) -> None:
        """One session over all requests; `fails`: an allocation fails on the way, if the session lives that long."""
        waiting = self._draw.sample(self._requests, len(self._requests))
        self._live: dict[int, Request] = {}
        self._canaries = Canaries(self._engine)
        try:
            with self._engine.session(replace(EVERYTHING, constrained=self.setup.grammars is not None)) as session:
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
        for completion in self._canaries.step(session):
            self._check(completion)
        check_pages(self._engine.scheduler)
        check_rows(self._engine, early=self.setup.async_steps == 0)
        self.counts["steps"] += 1

    def _check(self, completion: Completion) -> None:
        """An answer against what the target alone writes."""
        request = self._live.pop(completion.request_id)
        alone, reason = self._alone[request.id], completion.finish_reason
        check_counts(completion, self._algorithm.max_depth, request.sampling.logprobs)
        self.counts[reason] += 1
        if reason == FAILED:
            self._check_failed(request, completion)
        if completion.parsed:
            text = read([token for token in completion.token_ids if token not in request.ends])
            assert in_grammar(request.sampling.grammar, text), f"{request}: {text}"
            self.counts["parsed"] += 1
        if self._algorithm.rule != "target_only" and request.sampling.temperature > 0:
            written = completion.token_ids
            for place, token in enumerate(written):
                assert may_follow(request, written[:place], token), f"request {request.id}: {written} at {place}"
        else:
            self._check_text(request, completion, alone)

    def _check_failed(self, request: Request, completion: Completion) -> None:
        """Only what was broken fails, and what the target alone cannot end either."""
        assert completion.error, f"request {request.id} failed without a reason"
        if self._alone[request.id].finish_reason == FAILED:
            return
        if self._faults.may_break(request):
            assert len(request.prompt_ids) + len(completion.token_ids) > self._faults.from_length[request.id]
        else:
            # Drawn drafts lead to other texts than the target's own, and bad words may leave none of a grammar.
            sampling, other = request.sampling, self._algorithm.rule != "target_only"
            stuck = other and sampling.temperature > 0 and sampling.constrained and sampling.bad_words
            assert stuck, f"request {request.id} failed: {completion}"

    def _check_text(self, request: Request, completion: Completion, alone: Completion) -> None:
        written, reason = completion.token_ids, completion.finish_reason
        whole = reason != ABORTED and not (reason == FAILED and self._faults.may_break(request))
        expected = alone.token_ids if whole else alone.token_ids[: len(written)]
        if written == expected and (not whole or reason == alone.finish_reason):
            return
        same = next((at for at, (ours, its) in enumerate(zip(written, expected, strict=False)) if ours != its), None)
        assert same is not None and is_near_tie(request, written[:same], {written[same], expected[same]}), (
            f"request {request.id}: {written} ({reason}), alone {alone.token_ids} ({alone.finish_reason})"
        )
        self.counts["near ties"] += 1


def command(seed: int) -> str:
    return f"python -m tests.algorithms.fuzz --seed {seed} --rounds 1"


def run_round(seed: int) -> Counter[str]:
    """One round; an error of it names the seed."""
    one = Round(seed)
    try:
        one.run()
    except Exception as error:
        where = f"seed {seed}, {one.maker}, {one.setup}"
        raise AssertionError(f"{where}: {error!r}\nrun it again: {command(seed)}") from error
    return one.counts


def run_rounds(first: int, rounds: int | None, seconds: float) -> list[int]:
    """Rounds from the seed `first` on, no more than `rounds`, none begun after `seconds`. Returns the seeds that
    failed; each round is printed."""
    began, total, failed = time.monotonic(), Counter[str](), []
    for seed in count(first):
        if seed - first == rounds or time.monotonic() - began > seconds:
            break
        try:
            counts = run_round(seed)
        except AssertionError:
            traceback.print_exc()
            failed.append(seed)
            continue
        total += counts
        print(f"seed {seed}: " + ", ".join(f"{n} {name}" for name, n in counts.items() if n), flush=True)
    print(f"{seed - first:,} rounds:", ", ".join(f"{n:,} {name}" for name, n in total.items()), flush=True)
    return failed


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
    failed = run_rounds(first, arguments.rounds, arguments.seconds)
    if failed:
        raise SystemExit("\n".join([f"{len(failed)} rounds failed; run them again:", *map(command, failed)]))


if __name__ == "__main__":
    main()
