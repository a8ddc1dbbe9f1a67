"""Captured steps, padding rows and late reading change only the time, and a step reads nothing back."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any

import pytest
import torch

from algorithms.algorithm import Algorithm, Resources
from algorithms.dflash import drafting as dflash
from algorithms.eagle.drafting import Eagle3
from algorithms.lookup import NGram, Suffix
from algorithms.mixed import Mixed
from algorithms.standalone import Standalone
from algorithms.step.batch import BatchState
from algorithms.step.prefill import Prefiller
from algorithms.step.runner import StepRunner
from algorithms.step.sampling_params import SamplingNeeds
from algorithms.step.step import PHASES, Step
from specdec_kernels.history import kernel as history_kernel
from specdec_kernels.tree import kernel as tree_kernel
from tests.algorithms.device_operations import OperationMode
from tests.algorithms.drafters import ALL_MAKERS, KINDS, TARGET
from tests.algorithms.toy import Scripted, Setup, answers, autoregressive, changed, engine_of, requests, run, scripts

pytestmark = pytest.mark.usefixtures("random_drafters")

ASKED = [changed(r, temperature=(0.0, 0.8)[r.id % 2]) for r in requests(5, max_new_tokens=8)]


@pytest.fixture
def drafter() -> dflash.DFlash:
    return dflash.DFlash(dflash.DFlash.Config(block_size=5), TARGET, "random")


@pytest.mark.parametrize(("max_batch", "level"), [(3, "none"), (5, "draft"), (5, "verify"), (1, "step"), (5, "step")])
def test_levels_give_the_same_tokens(drafter: dflash.DFlash, level: str, max_batch: int) -> None:
    """Catches padding rows that store, move or advance anything, parameters frozen at capture, and phases of a captured
    step that are booked under another name, not at all, or from the warm-up."""
    expected = answers(ASKED, Setup(), TARGET)
    for algorithm in (drafter, autoregressive(TARGET))[: 2 if level == "step" else 1]:
        began = time.perf_counter()
        generation = run(algorithm, ASKED, Setup(max_batch=max_batch, graph=level), TARGET)
        assert [c.token_ids for c in generation.completions] == expected
        phase_times = generation.phase_times_ms
        assert list(phase_times) == [*PHASES, "host"] and all(phase_times[phase] > 0 for phase in PHASES)
        assert phase_times["verify"] > phase_times["accept"]
        assert sum(phase_times.values()) == pytest.approx(generation.decode_ms, rel=0.02)
        assert generation.decode_ms < (time.perf_counter() - began) * 1e3


@pytest.mark.parametrize("async_steps", [1, 2])
@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
def test_late_reading_gives_the_same_tokens(async_steps: int, decoys: bool) -> None:
    """Requests end while later steps are in flight; their rows and pages go to the next ones meanwhile."""
    asked = requests(7, max_new_tokens=11)
    expected = answers(asked, Setup(), TARGET)
    stops = [changed(r, stop_token_ids=frozenset({ids[r.id]})) for r, ids in zip(asked, expected, strict=True)]
    alone = answers(stops, Setup(), TARGET)
    texts = scripts(asked, answers(requests(7, max_new_tokens=24), Setup(), TARGET))
    scripted = Scripted(texts, 3, lambda at, d: (at + d) % 3 != 0, decoys)
    scarce = max(-(-(r.max_length + 16) // 4) for r in asked) + 3
    setup = Setup(max_batch=3, page_size=4, num_pages=scarce, async_steps=async_steps)
    assert [c.token_ids for c in run(scripted, stops, setup, TARGET).completions] == alone


def test_late_reading_counts_as_early_reading_does(drafter: dflash.DFlash) -> None:
    """A step that was launched after the end of a request is not counted for it."""
    early, late = (run(drafter, ASKED, Setup(async_steps=n), TARGET).completions for n in (0, 1))
    for a, b in zip(early, late, strict=True):
        assert (a.accepted_counts, a.num_truncated, a.finish_reason) == (
            b.accepted_counts,
            b.num_truncated,
            b.finish_reason,
        )


class Reads(OperationMode):
    """Counts operations that wait for the device or whose result's shape depends on data."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        # A boolean index has to be counted on the host.
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in self.NAMES or any(isinstance(a, torch.Tensor) and a.dtype == torch.bool for a in indices):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class HostReads:
    """Counts the host's reads of tensors while `watching`, without those of the interpreter itself."""

    METHODS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.reads = Reads()
        self.watching = self.watching_assignments = False
        for name in self.METHODS:
            monkeypatch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))
        assign = torch.Tensor.__setitem__

        def assigned(tensor: torch.Tensor, index: Any, value: Any) -> None:
            if self.watching_assignments and not isinstance(value, torch.Tensor):
                self.seen.append("__setitem__")
            assign(tensor, index, value)

        monkeypatch.setattr(torch.Tensor, "__setitem__", assigned)
        # The interpreter runs a kernel on the host, so it reads all of its arguments.
        for module in (history_kernel, tree_kernel):
            monkeypatch.setattr(module, "launch", self._unwatched(module.launch))

    @contextmanager
    def watch(self, assignments: bool = False) -> Iterator[None]:
        """Reads, and `assignments` of numbers to elements, which wait for a GPU too."""
        self.watching, self.watching_assignments = True, assignments
        try:
            with self.reads:
                yield
        finally:
            self.watching = self.watching_assignments = False

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.watching:
                self.seen.append(name)
            return method(*args, **kwargs)

        return counted

    def _unwatched(self, launch: Callable[..., None]) -> Callable[..., None]:
        def unwatched(*args: Any, **kwargs: Any) -> None:
            before, kept, self.watching = self.watching, len(self.reads.seen), False
            launch(*args, **kwargs)
            self.watching = before
            del self.reads.seen[kept:]

        return unwatched


def by_kernels(kind: type[NGram] | type[Suffix], **settings: Any) -> Algorithm:
    """The reference reads texts on the host; its kernels are what runs on a device."""
    algorithm = kind(kind.Config(max_ngram=4, **settings), TARGET, None)
    bind = algorithm.bind
    algorithm.bind = lambda resources: bind(replace(resources, impl="triton"))  # type: ignore[method-assign]
    return algorithm


class KernelMixed(Mixed):
    """With the kernels of its first drafter, n-grams or suffixes, and of the union of two trees, whose reference is a
    walk on the host too."""

    def bind(self, resources: Resources) -> None:
        self.inner[0].bind(replace(resources, impl="triton"))
        self.inner[1].bind(resources)
        self._impl, self._needs_path_probs = "triton", resources.needs_path_probs


def kernel_mixed() -> KernelMixed:
    parts = {"first": {"name": "suffix", "num_nodes": 5, "max_ngram": 4, "histories": 1}, "second": {"name": "eagle3"}}
    return KernelMixed(KernelMixed.Config(**parts), TARGET, "random")


SAMPLED_DFLASH = dflash.DFlash.Config(block_size=4, topk=2, num_nodes=8, draft_sampling="sample")
STEPPED = {name: ALL_MAKERS[name] for name in KINDS if name not in ("eagle3_chain", "dflash_window", "suffix_own")} | {
    "mixed": kernel_mixed,
    "ngram": lambda: by_kernels(NGram, num_nodes=9, histories=1),
    "suffix": lambda: by_kernels(Suffix, num_nodes=9, histories=1),
    "standalone_block": lambda: Standalone(Standalone.Config(steps=3, rule="block"), TARGET, "random"),
    "standalone_rejection": lambda: Standalone(Standalone.Config(steps=3, rule="rejection"), TARGET, "random"),
    "eagle3_sampled": lambda: Eagle3(
        Eagle3.Config(steps=3, topk=2, draft_sampling="without_replacement"), TARGET, "random"
    ),
    "dflash_sampled": lambda: dflash.DFlash(SAMPLED_DFLASH, TARGET, "random"),
}
FILTERED = {
    "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "logit_bias": {3: 1.0}, "bad_words": ((5,), (7, 8)), "min_tokens": 2, "top_logprobs": 3,
}  # fmt: skip


WATCHED = [(StepRunner, "launch"), (Prefiller, "run"), (BatchState, "rearrange"), (BatchState, "clear")]


@pytest.mark.parametrize(
    ("backend", "maker"), [("fa4", maker) for maker in STEPPED] + [("torch", m) for m in ("eagle_tree", "dflash_tree")]
)
def test_nothing_is_read_back(maker: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps, in prefills, and where requests enter and leave. Greedy and sampled rows, with every penalty and filter
    on, and tokens forbidden; a prompt rides in a step where whole steps are captured."""
    host, called = HostReads(monkeypatch), set()

    def watched(method: Any, self: Any, *args: Any) -> Any:
        called.add(method.__name__)
        with host.watch(assignments=not isinstance(self, StepRunner)):
            return method(self, *args)

    for kind, name in WATCHED:
        monkeypatch.setattr(kind, name, partialmethod(partial(watched, getattr(kind, name))))
    monkeypatch.setattr("algorithms.step.step.check_draft", lambda *_: None)  # the first draft is read back
    asked = [changed(r, temperature=(0.0, 0.8)[r.id % 2], **FILTERED) for r in requests(3, 3)]
    graph = "none" if backend == "torch" else "step"
    setup = Setup(backend=backend, max_batch=2, graph=graph, prefill_chunk=8, prefill_tile=4)
    run(STEPPED[maker](), asked, setup, TARGET)
    assert (host.reads.seen, host.seen) == ([], []) and called == {name for _, name in WATCHED}


def test_reads_of_the_host_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    host, x = HostReads(monkeypatch), torch.arange(3)
    x.tolist()
    assert host.seen == []
    with host.watch():
        x.tolist(), x.cpu().numpy(), bool(x[0])
    assert host.seen == ["tolist", "cpu", "numpy", "__bool__"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can capture")
def test_levels_need_a_gpu() -> None:
    engine = engine_of(autoregressive(TARGET), Setup(), TARGET)
    with pytest.raises(ValueError, match="needs a CUDA device, got cpu; use runtime.graph=none"):
        StepRunner(engine.parts, "step", engine.runner.clock)


@pytest.mark.parametrize("maker", ["autoregressive", "eagle3_tree", "ngram"])
def test_steps_that_only_compile_leave_no_trace(maker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run for every size before the requests do, and change neither tokens nor what a drafter knows."""
    engines = [engine_of(ALL_MAKERS[maker](), Setup(max_batch=3), TARGET) for _ in range(2)]
    sizes: list[tuple[int, int]] = []
    draft = Step.draft

    def counted(self: Step) -> None:
        sizes.append((len(self._batch.lengths), self._batch.max_length))
        draft(self)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(Step, "draft", counted)
        for _ in range(2):
            engines[0].runner.compile(SamplingNeeds.of(r.sampling for r in ASKED))
    longest = max(bound for _, bound in sizes)
    assert sizes == [(size, bound) for size in (3, 2, 1) for bound in (1, 4, 16, 64, longest)]
    ours, plain = ([(c.token_ids, c.accepted_counts) for c in e.generate(ASKED).completions] for e in engines)
    assert ours == plain


def test_capture_is_reported() -> None:
    engine = engine_of(autoregressive(TARGET), Setup(max_batch=3, graph="verify"), TARGET)
    report = engine.generate(ASKED[:2]).graphs
    assert (report.level, report.buckets, report.num_graphs) == ("verify", (1, 2, 3), 6)
    assert report.warmup_ms > 0
