"""A long run of one engine under random traffic, with its invariants checked after every step.

    python -m tests.algorithms.soak --steps 20000 --model tiny

Requests arrive and are aborted at random, end inside blocks by stop tokens and lengths, and share a pool that holds
less than a full batch. Sessions are served to their end or closed before it. After every step: each page is free or
owned once, nothing is written to a free page (they hold a canary), the device's lengths, last tokens and texts are the
host's, and for each request emitted = sum(accepted + 1) - truncated. Every finished request has the tokens that the
target alone writes, and an aborted one a beginning of them.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from algorithms.registry import available
from algorithms.runtime.algorithm import Algorithm
from algorithms.runtime.engine import Engine
from algorithms.runtime.models.loading import Target, load_target
from algorithms.runtime.request import Completion, Request
from algorithms.runtime.sampling_params import SamplingNeeds, SamplingParams
from algorithms.runtime.scheduler import ABORTED, Scheduler
from algorithms.runtime.session import Session
from experiments.app.schema import REPO_ROOT
from tests.algorithms.toy import Setup, autoregressive, changed, engine_of, spell

CANARY = 777.0
STRETCH = 250
"""Steps of a session."""
EVERYTHING = SamplingNeeds(sampled=True, filtered=True, penalised=True, logprobs=True)


@dataclass(frozen=True)
class World:
    """A target, requests with its own answers to them, and algorithms that serve them."""

    target: Target
    known: Sequence[tuple[Request, Sequence[int]]]
    makers: Mapping[str, Callable[[], Algorithm]]
    longest: int
    """Tokens of the longest request, prompt and answer."""


def learn(target: Target, asked: Sequence[Request], setup: Setup) -> list[tuple[Request, list[int]]]:
    """Each request with its autoregressive answer, which must run to its full length."""
    engine = engine_of(autoregressive(target), replace(setup, max_batch=8, num_pages=None), target)
    written = [completion.token_ids for completion in engine.generate(asked).completions]
    assert all(len(ids) == request.sampling.max_new_tokens for request, ids in zip(asked, written, strict=True))
    return list(zip(asked, written, strict=True))


class Soak:
    """Random traffic over one engine. `counts` says what has happened so far."""

    def __init__(self, world: World, maker: str, setup: Setup, seed: int) -> None:
        self._world, self._random = world, random.Random(f"{maker} {seed}")
        algorithm = world.makers[maker]()
        roomy = replace(setup, max_length=world.longest, num_pages=None)
        pages = engine_of(algorithm, roomy, world.target).scheduler.pages_for(_largest(world))
        self._engine = engine_of(algorithm, replace(roomy, num_pages=2 * pages), world.target)
        self._scheduler, self._state = self._engine.scheduler, self._engine.parts.state
        self._depth, self._early = algorithm.max_depth, setup.overlap == 0
        self._live: dict[int, tuple[Request, list[int]]] = {}
        self._next_id = 0
        self._marked: set[int] = set()
        self.counts: Counter[str] = Counter()

    def run(self, steps: int) -> None:
        """`steps` steps with traffic, some more to drain."""
        while self.counts["steps"] < steps:
            with self._engine.session(EVERYTHING) as session:
                for _ in range(min(STRETCH, steps - self.counts["steps"])):
                    self._traffic(session)
                    self._step(session)
                if self.counts["sessions"] % 2 == 0 or self.counts["steps"] >= steps:
                    while not session.idle:
                        self._step(session)
                    assert not self._live
            self.counts["sessions"] += 1
            self.counts["broken off"] += len(self._live)
            self._live.clear()
            assert sorted(self._free_pages()) == list(range(self._scheduler.num_pages))
            assert not self._state.active.any()

    def _traffic(self, session: Session) -> None:
        while len(self._live) < 7 and self._random.random() < 0.45:
            request, written = self._draw()
            session.submit(request)
            self._live[request.id] = (request, written)
            self.counts["submitted"] += 1
        if self._live and self._random.random() < 0.06:
            victim = self._random.choice(list(self._live))
            completion = session.abort(victim)
            assert completion is not None and completion.finish_reason == ABORTED
            assert session.abort(victim) is None
            self._check_aborted(completion)
            check_pages(self._scheduler)

    def _draw(self) -> tuple[Request, list[int]]:
        """A known request with a random end, and the answer that it must get."""
        request, written = self._random.choice(self._world.known)
        chance, length = self._random.random(), self._random.randint(1, request.sampling.max_new_tokens)
        stop: dict[str, Any] = {}
        if chance < 0.4:
            stop = {"stop_token_ids": frozenset({self._random.choice(list(written))})}
        elif chance < 0.6:
            at = self._random.randrange(len(written) - 1)
            stop = {"stop_strings": (spell(written[at : at + 2]),)}
        self._next_id += 1
        asks = self._next_id % 2 == 1
        drawn = changed(request, id=self._next_id, max_new_tokens=length, logprobs=asks, **stop)
        ends = next(n for n in range(1, length + 1) if n == length or _stops(drawn, written[:n]))
        return drawn, list(written[:ends])

    def _step(self, session: Session) -> None:
        before = set(self._free_pages())
        self._mark(before)
        ended, taken = self._stepped(session)
        waiting = self._scheduler.num_waiting > 0 and len(self._scheduler.rows) < self._state.max_batch
        self.counts["steps"] += 1
        self.counts["steps with an exhausted pool"] += waiting
        untouched = before - taken
        self._check_canaries(untouched)
        self._marked &= untouched
        for completion in ended:
            self._check_ended(completion)
        check_pages(self._scheduler)
        check_rows(self._engine, self._early)
        for running in self._scheduler.rows:
            self._check_counts(running.completion)

    def _stepped(self, session: Session) -> tuple[list[Completion], set[int]]:
        """One step, and the pages it handed out: a short request may have given its own back already."""
        allocator, taken = self._scheduler._allocator, set[int]()
        allocate = allocator.allocate

        def watched(count: int) -> list[int]:
            pages = allocate(count)
            taken.update(pages)
            return pages

        with patch.object(allocator, "allocate", watched):
            return session.step(), taken

    def _mark(self, free: set[int]) -> None:
        fresh = sorted(free - self._marked)
        if fresh:
            self._engine.parts.cache.kv[:, :, fresh] = CANARY
            self._marked |= set(fresh)

    def _check_canaries(self, pages: set[int]) -> None:
        if pages:
            held = self._engine.parts.cache.kv[:, :, sorted(pages)]
            assert bool((held == CANARY).all()), "a free page was written"

    def _free_pages(self) -> list[int]:
        return list(self._scheduler._allocator._free)

    def _check_counts(self, completion: Completion) -> None:
        check_counts(completion, self._depth, logprobs=completion.request_id % 2 == 1)

    def _check_ended(self, completion: Completion) -> None:
        request, written = self._live.pop(completion.request_id)
        self._check_counts(completion)
        assert completion.token_ids == written, f"{request} wrote {completion.token_ids}, alone it writes {written}"
        assert (completion.finish_reason == "length") == (not _stops(request, written))
        self.counts["finished"] += 1
        self.counts["tokens"] += len(written)
        self.counts["ended inside a block"] += completion.num_truncated > 0

    def _check_aborted(self, completion: Completion) -> None:
        _, written = self._live.pop(completion.request_id)
        self._check_counts(completion)
        assert completion.token_ids == written[: len(completion.token_ids)]
        self.counts["aborted"] += 1


def check_pages(scheduler: Scheduler) -> None:
    """Every page is free or owned once."""
    free = scheduler._allocator._free
    owned = [page for running in scheduler.admitted for page in running.pages]
    assert len(set(owned)) == len(owned), "a page has two owners"
    assert sorted([*free, *owned]) == list(range(scheduler.num_pages)), "a page is lost, or free and owned"


def check_rows(engine: Engine, early: bool) -> None:
    """What the device holds of the running requests is what the host knows; `early`: no step is in flight."""
    state, rows = engine.parts.state, engine.scheduler.rows
    assert [running.row for running in rows] == list(range(len(rows)))
    assert state.active.tolist() == [1] * len(rows) + [0] * (state.max_batch - len(rows))
    lengths, history, last_tokens = state.lengths.tolist(), state.history.tolist(), state.last_tokens.tolist()
    for running in rows:
        text = [*running.request.prompt_ids, *running.completion.token_ids]
        assert running.length == len(text) - 1
        assert history[running.row][: len(text)] == text
        assert state.page_table[running.row, : len(running.pages)].tolist() == running.pages
        assert not running.completion.finish_reason
        if early:
            assert (lengths[running.row], last_tokens[running.row]) == (running.length, text[-1])
        else:
            assert lengths[running.row] >= running.length


def check_counts(completion: Completion, depth: int, logprobs: bool) -> None:
    """Tokens, accepted drafts and log-probabilities of an answer fit together."""
    emitted = sum(accepted + 1 for accepted in completion.accepted_counts)
    assert len(completion.token_ids) == emitted - completion.num_truncated
    assert len(completion.logprobs) == (len(completion.token_ids) if logprobs else 0)
    assert all(0 <= accepted <= depth for accepted in completion.accepted_counts)
    assert len(completion.emitted_at_ms) == len(completion.accepted_counts)


def _stops(request: Request, text: Sequence[int]) -> bool:
    """Whether `text` ends with its stop token or holds its stop string."""
    return text[-1] in request.stop_token_ids or any(stop in spell(text) for stop in request.sampling.stop_strings)


def _largest(world: World) -> Request:
    return max((request for request, _ in world.known), key=lambda r: r.max_length)


def varied(request: Request, vocab: int) -> Request:
    """Greedy, sampled, filtered and penalised requests in turn, by their number."""
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 12, "top_p": 0.9},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 0.6, "logit_bias": {vocab // 2: 2.0}},
    )
    return changed(request, ignore_eos=True, **changes[request.id % len(changes)])


TINY = REPO_ROOT / "assets/tiny"
TINY_METHODS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "autoregressive": (None, {}),
    "standalone": ("draft", {"steps": 4}),
    "standalone_tree": ("draft", {"steps": 3, "topk": 2, "num_nodes": 8}),
    "eagle": ("eagle", {"steps": 3}),
    "eagle_tree": ("eagle", {"steps": 4, "topk": 4, "num_nodes": 16}),
    "eagle3": ("eagle3", {"steps": 3}),
    "eagle3_tree": ("eagle3", {"steps": 4, "topk": 4, "num_nodes": 16}),
    "naive_eagle": ("eagle3", {}),
    "ngram": (None, {"texts": 8}),
    "suffix": (None, {"texts": 8}),
    "dflash": ("dflash", {}),
    "dflash_tree": ("dflash", {"topk": 4, "num_nodes": 24}),
}


def tiny_world(tokens: int = 40) -> World:
    """The shipped target with the shipped drafters, on word problems and beginnings of functions."""
    from algorithms.runtime.models.tokenizer import Tokenizer
    from experiments.app.task_schema import prompt_set
    from experiments.data.prompts import load_prompts

    target, tokenizer = load_target(TINY / "target", "cpu", torch.float32), Tokenizer.load(TINY / "target")
    sets = [prompt_set(name, 20, skip_long=False) for name in ("arithmetic", "code")]
    prompts = [p.encode(tokenizer)[-48:] for s in sets for p in load_prompts(s).prompts]
    vocab = target.config.vocab_size
    params = [SamplingParams(max_new_tokens=tokens, seed=seed) for seed in range(len(prompts))]
    asked = [varied(Request(i, tuple(ids), params[i]), vocab) for i, ids in enumerate(prompts)]
    longest = max(len(request.prompt_ids) for request in asked) + tokens

    def maker(method: str) -> Callable[[], Algorithm]:
        folder, settings = TINY_METHODS[method]
        kind = available()[method.removesuffix("_tree")]
        return lambda: kind(kind.Config(**settings), target, str(TINY / folder) if folder else None)

    known = learn(target, asked, Setup(max_length=longest))
    return World(target, known, {method: maker(method) for method in TINY_METHODS}, longest)


def plan(makers: Sequence[str], steps: int) -> list[tuple[str, Setup, int]]:
    """Every method, with page size, backend, capture and overlap changing from one to the next."""
    share = -(-steps // len(makers))
    setups = [
        Setup(
            backend=("fa4", "torch", "hybrid")[index % 3],
            page_size=(1, 16, 5)[(index // 2) % 3],
            max_batch=(4, 3)[index % 2],
            overlap=(index + index // 4) % 2,
            graph=("none", "step", "none", "none", "step")[index % 5],
            prefill_chunk=(8, 2048)[index % 2],
            prefill_tile=4,
        )
        for index in range(len(makers))
    ]
    return [(maker, setup, share) for maker, setup in zip(makers, setups, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.algorithms.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world, total, began = tiny_world(), Counter[str](), time.monotonic()
    for maker, setup, steps in plan(list(world.makers), arguments.steps):
        soak = Soak(world, maker, setup, arguments.seed)
        soak.run(steps)
        total += soak.counts
        done = ", ".join(f"{count:,} {name}" for name, count in soak.counts.items())
        where = f"{setup.backend}, page size {setup.page_size}, graph {setup.graph}, overlap {setup.overlap}"
        print(f"{maker} ({where}): {done}; {time.monotonic() - began:.0f} s", flush=True)
    print("all of them:", ", ".join(f"{count:,} {name}" for name, count in total.items()), flush=True)


if __name__ == "__main__":
    main()
