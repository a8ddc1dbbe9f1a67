"""Captured steps, padding rows and late reading change nothing but the time; and a step reads nothing back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from algorithms import dflash
from algorithms.runtime.graphs import LEVELS, StepRunner, buckets
from algorithms.runtime.step import SamplingNeeds
from tests.algorithms.toy import (
    Scripted,
    Setup,
    answers,
    autoregressive,
    engine_of,
    random_drafter,
    random_target,
    requests,
    run,
    scripts,
)

TARGET = random_target()
ASKED = [replace(r, temperature=(0.0, 0.8)[r.id % 2]) for r in requests(6)]


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> dflash.DFlash:
    monkeypatch.setattr("algorithms.runtime.models.loading.load_dflash", lambda *_: random_drafter())
    return dflash.DFlash(dflash.DFlash.Config(block_size=5), TARGET, "random")


def test_buckets_cover_every_batch() -> None:
    assert [buckets(n) for n in (1, 2, 5, 8)] == [(1,), (1, 2), (1, 2, 4, 5), (1, 2, 4, 8)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("max_batch", [1, 3, 5])
def test_levels_give_the_same_tokens(drafter: dflash.DFlash, level: str, max_batch: int) -> None:
    """Catches padding rows that store, move or advance anything, and parameters frozen at capture."""
    expected = answers(ASKED, Setup(max_batch=max_batch), TARGET)
    setup = Setup(max_batch=max_batch, graph=level)
    for algorithm in (drafter, autoregressive(TARGET)):
        assert [c.token_ids for c in run(algorithm, ASKED, setup, TARGET).completions] == expected


@pytest.mark.parametrize("read_behind", [1, 2])
@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
def test_late_reading_gives_the_same_tokens(read_behind: int, decoys: bool) -> None:
    """Requests end while later steps are in flight; their rows and pages go to the next ones meanwhile."""
    asked = requests(7, max_new_tokens=11)
    expected = answers(asked, Setup(), TARGET)
    stops = [replace(r, stop_token_ids=frozenset({ids[r.id]})) for r, ids in zip(asked, expected, strict=True)]
    alone = answers(stops, Setup(), TARGET)
    texts = scripts(asked, answers(requests(7, max_new_tokens=24), Setup(), TARGET))
    scripted = Scripted(texts, 3, lambda at, d: (at + d) % 3 != 0, decoys)
    scarce = max(-(-(len(r.prompt_ids) + r.max_new_tokens + 16) // 4) for r in asked) + 3
    setup = Setup(max_batch=3, page_size=4, num_pages=scarce, read_behind=read_behind)
    assert [c.token_ids for c in run(scripted, stops, setup, TARGET).completions] == alone


def test_late_reading_counts_as_early_reading_does(drafter: dflash.DFlash) -> None:
    """A step that was launched for nothing appears in no figure of its request."""
    early, late = (run(drafter, ASKED, Setup(read_behind=n), TARGET).completions for n in (0, 1))
    for a, b in zip(early, late, strict=True):
        assert (a.accepted_counts, a.num_truncated, a.finish_reason) == (
            b.accepted_counts,
            b.num_truncated,
            b.finish_reason,
        )


class Reads(TorchDispatchMode):
    """Counts operations that wait for the device or whose result's shape depends on data."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.__name__.split(".")[0]
        if name in self.NAMES or any(
            isinstance(a, torch.Tensor) and a.dtype == torch.bool for a in _indices(name, args)
        ):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def _indices(name: str, args: tuple) -> list:
    """Index tensors of an indexing call; a boolean one has to be counted on the host."""
    return list(args[1]) if name in ("index", "index_put", "index_put_") else []


@pytest.mark.parametrize("algorithm", ["dflash", "autoregressive"])
def test_a_step_reads_nothing_back(drafter: dflash.DFlash, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads()
    launch = StepRunner.launch

    def watched(self: StepRunner, num_rows: int, max_length: int, needs: SamplingNeeds) -> torch.Tensor:
        with reads:
            return launch(self, num_rows, max_length, needs)

    monkeypatch.setattr(StepRunner, "launch", watched)
    chosen = drafter if algorithm == "dflash" else autoregressive(TARGET)
    run(chosen, ASKED[:2], Setup(), TARGET)
    assert reads.seen == []


def test_reads_are_seen() -> None:
    """The counter above notices what it is there for."""
    with Reads() as reads:
        x = torch.arange(4)
        x[x > 2].sum().item()
    assert {"index", "_local_scalar_dense"} <= set(reads.seen)


def test_levels_need_a_gpu_and_a_known_name() -> None:
    engine = engine_of(autoregressive(TARGET), Setup(), TARGET)
    parts, clock = engine.runner._parts, engine.runner.clock
    with pytest.raises(ValueError, match="none, draft, verify, step, got 'all'"):
        StepRunner(parts, "all", clock)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs a CUDA device, got cpu; use runtime.graph=none"):
            StepRunner(parts, "step", clock)


def test_capture_is_reported() -> None:
    engine = engine_of(autoregressive(TARGET), Setup(max_batch=3, graph="verify"), TARGET)
    report = engine.generate(ASKED[:2]).graphs
    assert (report.level, report.buckets, report.num_graphs) == ("verify", (1, 2, 3), 6)
    assert report.warmup_ms > 0
