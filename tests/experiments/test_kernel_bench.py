"""The timer and the unit benchmark: what is counted, what is refused, and that no wrong kernel gets a
time."""

import io
import json
import sys
import time
from functools import partial
from inspect import signature
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import specdec_kernels
from experiments import kernel_bench
from experiments.bench import measure_case, peers
from experiments.bench.roofline import Ceilings, work_of
from experiments.bench.selection import DeviceMaker, chosen_cases, named
from experiments.bench.timing import Limits, cold_copies, time_calls, time_function, time_interleaved
from experiments.kernel_bench import KernelBenchConfig
from specdec_kernels import FAMILIES, SamplingTensors, paged_attention, paged_attention_with_lse, parity
from specdec_kernels.attention.cases import COMPARISON
from specdec_kernels.attention.cases_inputs import attention_inputs, changed
from specdec_kernels.cases import Case, Comparison, Maker
from specdec_kernels.compat import sglang
from specdec_kernels.compat.sglang.cases import CASES as SGLANG_CASES
from specdec_kernels.parity import bytes_in
from specdec_kernels.sampling.cases import CASES as SAMPLING_CASES

CPU = torch.device("cpu")


def test_the_median_is_of_the_repeats_after_the_warm_up() -> None:
    calls: list[int] = []

    def work(pause_s: float) -> None:
        calls.append(len(calls))
        time.sleep(pause_s * (50 if len(calls) <= 2 else 1))

    timing = time_function(work, [dict(pause_s=0.002)], CPU, Limits(warmup=2, repeats=5))
    assert len(calls) == 7 and timing.repeats == 5 and timing.clock == "perf_counter"
    assert 2 <= timing.low_ms <= timing.median_ms <= timing.high_ms
    assert timing.low_ms < 100, "the slow warm-up calls were counted"


def test_sides_of_a_ratio_take_turns() -> None:
    """A side that is measured first finds a device that was idle. So do the arguments of a side."""
    seen: list[str] = []
    sides = [(lambda name, pause_s=pause_s: (seen.append(name), time.sleep(pause_s)), [dict(name=n) for n in names])
             for names, pause_s in ((("ours",), 0.0), (("theirs", "again"), 0.002))]  # fmt: skip
    ours, theirs = time_interleaved(sides, CPU, Limits(warmup=1, repeats=3))
    assert seen == ["ours", "again", "ours", "theirs"] * 2
    assert ours.repeats == 3 and theirs.median_ms > max(2.0, ours.median_ms)


def test_a_wrong_kernel_is_noticed() -> None:
    """Too large an error, a wrong integer, a stray NaN, and a wrong write to an argument."""

    def kernel(fault: str, values: torch.Tensor, impl: str) -> Any:
        out, index = values * 2, torch.arange(3)
        if impl == "triton" and fault == "float":
            out[1] += 1e-3
        if impl == "triton" and fault == "integer":
            index[2] = 7
        if impl == "triton" and fault == "nan":
            out[0] = float("nan")
        if impl == "triton" and fault == "argument":
            values[0] = 5.0
        return out, index

    assert parity.disagreement(kernel, dict(fault="none", values=torch.ones(3))) is None
    for fault in ("float", "integer", "nan", "argument"):
        assert parity.disagreement(kernel, dict(fault=fault, values=torch.ones(3))) is not None, fault


def test_without_a_gpu_one_small_case_a_family() -> None:
    found = chosen_cases(FAMILIES, "full", on_gpu=False)
    assert [family for family, _ in found] == list(FAMILIES)
    assert all("large" not in case.tags for _, case in found)


def test_sets_and_patterns_choose_cases() -> None:
    chosen = [[case for _, case in chosen_cases(("attention",), shapes, on_gpu=True)] for shapes in ("full", "quick")]
    full, quick = ([case.name for case in each if case.function == "paged_attention"] for each in chosen)
    assert len(quick) == 4 < len(full) and set(quick) <= set(full)
    assert quick[0] == full[0] and quick[-1] == full[-1]
    assert [case.name for _, case in chosen_cases(("tree",), "tree_6?", on_gpu=False)] == ["tree_64", "tree_65"]
    with pytest.raises(ValueError, match="no case of tree is called 'oak_[*]'"):
        chosen_cases(("tree",), "oak_*", on_gpu=True)
    with pytest.raises(ValueError, match="too large for the interpreter"):
        chosen_cases(("sampling",), "*qwen*", on_gpu=False)


def test_the_timed_shapes_are_those_of_the_plan() -> None:
    """Batch 1, 8, 64 by query rows 1, 4, 16, 64 by context 1k to 128k; trees of 32 and 64; 152k tokens."""
    wanted = {(b, q, c) for b in (1, 8, 64) for q in (1, 4, 16, 64) for c in (1024, 8192, 32768, 131072)}
    seen, trees = set(), set()
    for _, case in chosen_cases(("attention",), "full", on_gpu=True):
        options = getattr(case.build, "keywords", {})
        if options.get("mode") == "tree":
            trees.add(options["num_nodes"])
        elif options.get("heads") == (32, 8) and options.get("head_dim") == 128:
            seen.add((len(options["lengths"]), options["num_nodes"], max(options["lengths"])))
    assert wanted <= seen and {32, 64} <= trees
    assert any("qwen" in case.name for _, case in chosen_cases(("sampling",), "full", on_gpu=True))


def test_names_are_joined_by_plus() -> None:
    assert named("peers", "all", ("a", "b")) == ("a", "b") and named("peers", "none", ("a", "b")) == ()
    assert named("peers", "b+a+b", ("a", "b")) == ("b", "a")
    with pytest.raises(ValueError, match="peers: expected one of all, none, a, b, or several joined by [+], got 'c'"):
        named("peers", "a+c", ("a", "b"))


def test_work_is_counted_by_the_family_or_as_every_tensor_once() -> None:
    inputs = attention_inputs(Maker.seeded(), "chain", 3, (5, 40))
    counted = work_of("attention", "paged_attention", inputs, None)
    keys = 5 + 40 + 2 * 3
    assert counted.work_counted == "family"
    assert counted.moved_bytes == 2 * keys * 2 * 16 * 4 + 2 * inputs["q"].numel() * 4
    default = work_of("attention", "unheard_of", dict(x=torch.zeros(8)), torch.zeros(4, dtype=torch.int64))
    assert default == (64, 0, "every tensor once")


def test_the_larger_of_two_floors_is_the_ceiling() -> None:
    rates = Ceilings(bytes_per_s=1e12, flop_per_s=1e14)
    assert rates.floor_us(2_000_000, 1) == (2.0, "memory")
    assert rates.floor_us(2_000_000, 400_000_000) == (4.0, "compute")


def test_floats_of_a_gpu_are_sampled_there() -> None:
    maker = DeviceMaker(CPU, torch.bfloat16, torch.Generator(), torch.Generator().manual_seed(3))
    drawn = maker.normal(40, 50, scale=2.0)
    assert drawn.dtype == torch.bfloat16 and 1.8 < drawn.float().std() < 2.2


def test_a_reference_that_does_not_fit_compares_some_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and last request are compared, and a fault in one of them is seen."""
    inputs = attention_inputs(Maker.seeded(), "tree", 4, (5, 40, 11))
    monkeypatch.setattr(parity, "_REFERENCE_LIMIT_BYTES", 60_000)
    found = parity.check(paged_attention_with_lse, inputs, COMPARISON)
    assert found.problem is None and not found.reference_fits and found.scope.startswith("requests [0, 2] of 3")

    def faulty(impl: str, **arguments: Any) -> Any:
        out, lse = paged_attention_with_lse(**arguments, impl="reference")
        if impl == "triton":
            out[2] += 1e-3
        return out, lse

    assert parity.check(faulty, inputs, COMPARISON).problem is not None


def test_a_sample_on_a_border_is_named_and_more_is_refused() -> None:
    """One row of forty may draw another token; two may not, and without a temperature not even one."""

    def pick_tokens(wrong: int, sampling: SamplingTensors, impl: str) -> Any:
        tokens = torch.arange(40)
        tokens[:wrong] += impl == "triton"
        return tokens, torch.ones(40, dtype=torch.bool)

    draws, drawn = Comparison(draws=("pick_tokens",)), SamplingTensors(temperature=torch.ones(40))
    found = parity.check(pick_tokens, dict(wrong=1, sampling=drawn), draws)
    assert found.problem is None and found.scope.endswith("1 of 40 rows drew another token")
    assert parity.check(pick_tokens, dict(wrong=2, sampling=drawn), draws).problem is not None
    for temperature in (None, torch.zeros(40)):
        greedy = SamplingTensors(temperature=temperature)
        assert parity.check(pick_tokens, dict(wrong=1, sampling=greedy), draws).problem is not None


@pytest.mark.parametrize("mode", ["chain", "block", "tree"])
@pytest.mark.parametrize("lengths", [(33, 33), (5, 40)])
def test_torch_attention_is_a_peer_of_every_mode(mode: str, lengths: tuple[int, ...]) -> None:
    inputs = attention_inputs(Maker.seeded(), mode, 5, lengths)
    ours = paged_attention(**inputs, impl="reference")
    assert parity.difference([peers.prepare("sdpa", "paged_attention", inputs)()], [ours]) is None


def test_what_a_peer_cannot_do_is_named() -> None:
    inputs = attention_inputs(Maker.seeded(), "tree", 5, (7,))
    with pytest.raises(peers.Unavailable, match="takes no tree mask"):
        peers.prepare("flash_attention_3", "paged_attention", inputs)
    with pytest.raises(peers.Unavailable, match="nothing like build_tree"):
        peers.prepare("sdpa", "build_tree", {})
    for package in ("flashinfer", "flash_attention_4"):
        with pytest.raises(peers.Unavailable, match=f"{package}: .*(NVIDIA GPU|not installed)"):
            peers.prepare(package, "paged_attention", inputs)
    with pytest.raises(peers.Unavailable, match="not compared with q_lens"):
        peers.prepare("sdpa", "paged_attention", changed(inputs, q_lens=torch.tensor([3], dtype=torch.int32)))


def test_peers_that_are_not_there_say_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU; and with one, where neither the package nor the folder holds the library."""
    calls = dict(sgl_kernel="verify_tree_greedy", flash_attention_3="paged_attention")
    inputs = attention_inputs(Maker.seeded(), "chain", 5, (7,))
    for peer, function in calls.items():
        with pytest.raises(peers.Unavailable, match="runs on a GPU only"):
            peers.prepare(peer, function, inputs)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for peer, function in calls.items():
        with pytest.raises(peers.Unavailable, match="is not installed") as absent:
            peers.prepare(peer, function, inputs)
        assert "\n" not in str(absent.value)


def test_a_library_is_found_in_the_named_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before the installed package; and one that is broken is named."""
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / "common_ops.abi3.so").write_bytes(b"no library")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(peers.FOLDER_VARIABLE, str(tmp_path))
    peers.load_library.cache_clear()
    with pytest.raises(peers.Unavailable, match="common_ops.abi3.so cannot be loaded: .*(too short|invalid)"):
        peers.load_library("sgl_kernel", "common_ops*.so")


@pytest.mark.parametrize(("offset", "status"), [(0, "ok"), (1, "disagrees")])
@pytest.mark.parametrize(
    "function, case",
    [
        ("verify_tree_greedy", "sgl_greedy_short"),
        ("tree_speculative_sampling_target_only", "sgl_sampling_small"),
        ("build_tree_kernel_efficient", "sgl_build_chain"),
        ("top_k_renorm", None),
        ("top_p_renorm", None),
    ],
)
def test_operations_of_sgl_kernel_are_compared(
    monkeypatch: pytest.MonkeyPatch, function: str, case: str | None, offset: int, status: str
) -> None:
    """A peer with sgl-kernel's signature, here our own definition; and one that writes something else."""
    ours = getattr(sglang if case else specdec_kernels, function)

    def operation(*arguments: Any) -> None:
        if case:
            ours(*arguments, impl="reference")
            arguments[list(signature(ours).parameters).index(peers.WRITTEN[function][1])].add_(offset)
        else:
            probs, out, limits, _ = arguments
            out.copy_(ours(probs, limits, impl="reference") + offset)

    stand_in = {function if case else f"{function}_probs": SimpleNamespace(default=operation)}
    monkeypatch.setattr(torch.ops, "sgl_kernel", SimpleNamespace(**stand_in), raising=False)
    monkeypatch.setattr(peers, "load_library", lambda package, pattern: None)
    cases = SGLANG_CASES if case else SAMPLING_CASES
    inputs = next(each for each in cases if case in (None, each.name) and each.function == function)
    kernel = measure_case._impl(ours, "reference")
    built = [inputs.build(Maker.seeded())]
    found = measure_case._against_peer("sgl_kernel", function, built, kernel, bench_on_cpu())
    assert found["status"] == status and found.get("ratio", 1) > 0, found


def bench_on_cpu(**changes: Any) -> measure_case.Bench:
    settings = dict(device=CPU, dtype=torch.float32, ceilings=Ceilings(1e12, 1e14), peers=("sdpa", "flash_attention_3"))
    return measure_case.Bench(**(settings | dict(seed=0, limits=Limits(0, 2, 50.0)) | changes))  # type: ignore[arg-type]


def test_a_row_compares_with_ceiling_reference_and_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole row of a GPU, with the clock of a CPU in its place."""
    bench = bench_on_cpu()
    inputs = attention_inputs(Maker.seeded(), "chain", 4, (20, 9))
    timing = time_function(lambda **_: time.sleep(0.002), [inputs], CPU, Limits(repeats=2))
    kernel = measure_case._impl(paged_attention, "reference")
    counted = work_of("attention", "paged_attention", inputs, kernel(**inputs))
    work = measure_case._rates(counted, timing, bench.ceilings)
    assert work["bound"] == "memory" and work["floor_us"] == pytest.approx(work["moved_bytes"] / 1e6)
    assert work["ceiling_pct"] == pytest.approx(100 * work["floor_us"] / (timing.median_ms * 1e3))
    found = parity.Parity(None, "all", reference_fits=True)
    against = measure_case._against_reference(paged_attention, [inputs], timing, found, bench)
    assert against["reference_ratio"] == pytest.approx(against["reference_us"] / (timing.median_ms * 1e3))
    against_peer = partial(measure_case._against_peer, function="paged_attention", copies=[inputs])
    theirs = {name: against_peer(name, kernel=kernel, bench=bench) for name in bench.peers}
    assert theirs["sdpa"]["status"] == "ok" and theirs["sdpa"]["ratio"] > 0
    assert theirs["flash_attention_3"] == dict(status="not run", problem="runs on a GPU only")
    row = dict(family="attention", case="made", function="paged_attention", status="ok", peers=theirs)
    assert kernel_bench.problems([row]) == ["flash_attention_3: not run in 1 cases, runs on a GPU only"]


def test_a_peer_that_disagrees_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = attention_inputs(Maker.seeded(), "chain", 4, (20, 9))
    wrong = measure_case._impl(lambda impl, **arguments: paged_attention(**arguments, impl=impl) * 1.01, "reference")
    found = measure_case._against_peer("sdpa", "paged_attention", [inputs], wrong, bench_on_cpu())
    assert found["status"] == "disagrees" and "median_us" not in found


def test_a_kernel_that_raises_is_a_row_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure_case._measured

    def failing(family: str, case: Case, bench: measure_case.Bench) -> dict[str, Any]:
        if family == "tree":
            raise RuntimeError("no such\ntree")
        return real(family, case, bench)

    monkeypatch.setattr(measure_case, "_measured", failing)
    config = KernelBenchConfig(family="tree+kv_index", device="cpu", repeats=1, warmup=0)
    console = Console(file=io.StringIO(), width=200)
    assert not kernel_bench.run(config, tmp_path, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1/2  tree: " in said and "2/2  kv_index: " in said, "each case is announced: one may take minutes"
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["failed", "ok"] and rows[0]["problem"] == "RuntimeError: no such"


def test_cases_beyond_the_time_of_a_run_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "measure", lambda name, case, _: dict(status="ok", family=name, case=case.name))
    monkeypatch.setattr(kernel_bench, "time", SimpleNamespace(monotonic=count().__next__))  # a second from call to call
    config = KernelBenchConfig(family="tree", shapes="tree_6?", device="cpu", budget_s=1)
    assert kernel_bench.run(config, tmp_path, Console(quiet=True))
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["ok", "not run"] and rows[1]["problem"] == "budget_s=1 is used up"


def test_time_is_bounded() -> None:
    assert Limits(3, 20, 100.0).within_budget(1.0) == (3, 20)
    assert Limits(3, 20, 100.0).within_budget(10.0) == (3, 10)
    assert Limits(3, 20, 100.0).within_budget(1000.0) == (0, 3)
    assert Limits(3, 1, 100.0).within_budget(1000.0) == (0, 1)


@pytest.mark.gpu
def test_replay_and_call_times_of_a_gpu() -> None:
    x = torch.randn(1 << 20, device="cuda")
    copies = cold_copies(dict(x=x), x.device)
    assert sum(map(bytes_in, copies)) > torch.cuda.get_device_properties(0).L2_cache_size
    replayed = time_function(lambda x: x * 2, copies, x.device, Limits())
    called = time_calls(lambda x: x * 2, copies, x.device, Limits())
    assert replayed.cache.startswith("cold") and 0 < replayed.median_ms < called.median_ms
    alike = time_interleaved([(lambda x: x * 2, copies), (lambda x: x * 2, copies)], x.device, Limits())
    assert 0.8 < alike[0].median_ms / alike[1].median_ms < 1.25


def test_a_kernel_that_disagrees_gets_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "disagreement", lambda *_: "tensor 0 differs")
    config = KernelBenchConfig(family="tree", device="cpu", repeats=1)
    assert not kernel_bench.run(config, tmp_path, Console(quiet=True))
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert row["status"] == "disagrees" and row["problem"] == "tensor 0 differs" and "median_us" not in row


@pytest.mark.skipif(torch.cuda.is_available(), reason="the command without a GPU")
def test_the_command_writes_rows_with_provenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernel_bench.py", "family=tree", "repeats=2", f"hydra.run.dir={tmp_path}"])
    kernel_bench.main()
    assert "say nothing about a GPU" in " ".join(capsys.readouterr().out.split())
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert row["status"] == "ok" and row["median_us"] > 0 and row["config"]["repeats"] == 2
    assert {"machine", "versions", "revision", "clock", "cache", "device", "dtype"} <= row.keys()
