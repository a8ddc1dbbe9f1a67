"""The timer and the unit benchmark: what is counted, what is refused, and that no wrong kernel gets a
time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from rich.console import Console

import specdec_kernels
from algorithms.runtime.clock import PhaseClock
from experiments import kernel_bench
from experiments.app.schema import CONFIG_FOLDER, REPO_ROOT
from experiments.bench import libraries, parity, peer_operations, peers, show
from experiments.bench import row as bench_row
from experiments.bench.ceilings import Ceilings
from experiments.bench.selection import DeviceMaker, chosen_cases, named
from experiments.bench.timing import (
    Limits,
    bytes_in,
    cold_copies,
    provenance,
    tensors_in,
    time_calls,
    time_function,
    time_in_turn,
)
from experiments.bench.work import work_of
from experiments.kernel_bench import KernelBenchConfig
from experiments.report.plots import logarithmic
from specdec_kernels import FAMILIES, SamplingTensors, paged_attention, paged_attention_with_lse
from specdec_kernels.attention.cases import COMPARISON
from specdec_kernels.attention.cases_inputs import attention_inputs, changed
from specdec_kernels.cases import Case, Comparison, Maker
from specdec_kernels.compat import sglang
from specdec_kernels.compat.sglang.cases import CASES as SGLANG_CASES
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


def test_arguments_take_turns() -> None:
    seen = []
    time_function(lambda index: seen.append(index), [dict(index=i) for i in range(3)], CPU, Limits(warmup=0, repeats=6))
    assert seen == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("options", [dict(repeats=0), dict(warmup=-1)])
def test_a_measurement_of_nothing_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Limits(**options)
    with pytest.raises(ValueError, match="got none"):
        time_function(lambda: None, [], CPU, Limits())


def test_sides_of_a_ratio_take_turns() -> None:
    """A side that is measured first finds a device that was idle."""
    seen: list[str] = []
    sides = [(lambda name, pause_s=pause_s: (seen.append(name), time.sleep(pause_s)), [dict(name=name)])
             for name, pause_s in (("ours", 0.0), ("theirs", 0.002))]  # fmt: skip
    ours, theirs = time_in_turn(sides, CPU, Limits(warmup=1, repeats=3))
    assert seen == ["ours", "theirs"] * 4
    assert ours.repeats == 3 and theirs.median_ms > max(2.0, ours.median_ms)


def test_phases_add_up_and_keep_their_order() -> None:
    clock = PhaseClock("cpu")
    for _ in range(2):
        for name, pause_s in (("draft", 0.002), ("verify", 0.004)):
            with clock.phase(name):
                time.sleep(pause_s)
    ledger = clock.ledger_ms()
    assert list(ledger) == ["draft", "verify"]
    assert ledger["draft"] >= 4 and ledger["verify"] >= 8
    clock.reset()
    assert clock.ledger_ms() == {}


def test_a_phase_that_raises_is_counted_and_closed() -> None:
    clock = PhaseClock("cpu")
    with pytest.raises(KeyError), clock.phase("draft"):
        raise KeyError
    with clock.phase("draft"), pytest.raises(RuntimeError, match="'verify' begins inside phase 'draft'"):
        clock.phase("verify").__enter__()
    assert list(clock.ledger_ms()) == ["draft"]


@pytest.mark.gpu
def test_device_phases_are_device_time() -> None:
    clock = PhaseClock("cuda")
    a = torch.randn(4096, 4096, device="cuda")
    with clock.phase("verify"):
        for _ in range(20):
            a = a @ a
    assert clock.ledger_ms()["verify"] > 1


def test_provenance_says_where_a_number_comes_from() -> None:
    found = provenance("cpu")
    assert found["versions"]["torch"] == torch.__version__ and found["machine"] and found["platform"]
    assert "git_revision" in found


def test_inputs_are_not_copied_where_there_is_no_cache_to_fill() -> None:
    inputs = dict(x=torch.zeros(3), nested=(torch.ones(2), [torch.ones(1)]), number=3)
    assert len(list(tensors_in(inputs))) == 3
    assert cold_copies(inputs, CPU) == [inputs]


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
    full, quick = (
        [
            case.name
            for _, case in chosen_cases(("attention",), shapes, on_gpu=True)
            if case.function == "paged_attention"
        ]
        for shapes in ("full", "quick")
    )
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


def test_floats_of_a_gpu_are_drawn_there() -> None:
    drawn = DeviceMaker(CPU, torch.bfloat16, torch.Generator(), torch.Generator().manual_seed(3)).normal(
        40, 50, scale=2.0
    )
    assert drawn.dtype == torch.bfloat16 and 1.8 < drawn.float().std() < 2.2


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


def test_a_draw_on_a_border_is_named_and_more_is_refused() -> None:
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
        peers.prepare("varlen", "paged_attention", inputs)
    with pytest.raises(peers.Unavailable, match="nothing like build_tree"):
        peers.prepare("sdpa", "build_tree", {})
    for package in ("flashinfer", "flash_attention_4"):
        with pytest.raises(peers.Unavailable, match=f"{package}: .*(NVIDIA GPU|not installed)"):
            peers.prepare(package, "paged_attention", inputs)
    with pytest.raises(peers.Unavailable, match="not compared with q_lens"):
        peers.prepare("sdpa", "paged_attention", changed(inputs, q_lens=torch.tensor([3], dtype=torch.int32)))


def test_peers_that_are_not_there_say_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU; and with one, where neither the package nor the folder holds the library."""
    calls = {
        "sgl_kernel": "verify_tree_greedy",
        "flash_attention_3": "paged_attention",
        "flashinfer": "top_p_renorm",
    }
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
    monkeypatch.setenv(libraries.FOLDER_VARIABLE, str(tmp_path))
    libraries._load.cache_clear()
    with pytest.raises(peers.Unavailable, match="common_ops.abi3.so cannot be loaded: .*(too short|invalid)"):
        libraries.load_library("sgl_kernel", "common_ops*.so")


@pytest.mark.parametrize(
    "function, case",
    [
        ("verify_tree_greedy", "sgl_greedy_short"),
        ("tree_speculative_sampling_target_only", "sgl_sampling_small"),
        ("build_tree_kernel_efficient", "sgl_build_chain"),
    ],
)
def test_operations_that_write_into_arguments_are_compared(
    monkeypatch: pytest.MonkeyPatch, function: str, case: str
) -> None:
    """A peer with sgl-kernel's signature, here our own definition; and one that writes something else."""
    ours = getattr(sglang, function)
    offset = 0

    def operation(*arguments: Any) -> None:
        ours(*arguments, impl="reference")
        arguments[list(signature(ours).parameters).index(peer_operations.WRITTEN[function][1])].add_(offset)

    stand_in = SimpleNamespace(default=operation)
    monkeypatch.setattr(torch.ops, "sgl_kernel", SimpleNamespace(**{function: stand_in}), raising=False)
    monkeypatch.setattr(peer_operations, "load_library", lambda package, pattern: None)
    inputs = next(each for each in SGLANG_CASES if each.name == case).build(Maker.seeded())
    kernel = bench_row._impl(ours, "reference")
    found = bench_row._against_peer("sgl_kernel", function, [inputs], kernel, bench_on_cpu())
    assert found["status"] == "ok" and found["ratio"] > 0, found
    offset = 1
    found = bench_row._against_peer("sgl_kernel", function, [inputs], kernel, bench_on_cpu())
    assert found["status"] == "disagrees"


@pytest.mark.parametrize("function", ["top_k_renorm", "top_p_renorm"])
def test_renormalisations_are_compared(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """A peer with sgl-kernel's signature, here our own definition."""
    ours = getattr(specdec_kernels, function)

    def operation(probs: torch.Tensor, out: torch.Tensor, limits: torch.Tensor, limit: float) -> None:
        out.copy_(ours(probs, limits, impl="reference"))

    stand_in = SimpleNamespace(**{f"{function}_probs": SimpleNamespace(default=operation)})
    monkeypatch.setattr(torch.ops, "sgl_kernel", stand_in, raising=False)
    monkeypatch.setattr(peer_operations, "load_library", lambda package, pattern: None)
    inputs = next(each for each in SAMPLING_CASES if each.function == function).build(Maker.seeded())
    kernel = bench_row._impl(ours, "reference")
    found = bench_row._against_peer("sgl_kernel", function, [inputs], kernel, bench_on_cpu())
    assert found["status"] == "ok" and found["ratio"] > 0, found


def bench_on_cpu(**changes: Any) -> bench_row.Bench:
    settings = dict(device=CPU, dtype=torch.float32, ceilings=Ceilings(1e12, 1e14), peers=("sdpa", "varlen"))
    return bench_row.Bench(**(settings | dict(seed=0, limits=Limits(0, 2, 50.0)) | changes))  # type: ignore[arg-type]


def test_a_row_compares_with_ceiling_reference_and_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole row of a GPU, with the clock of a CPU in its place."""
    bench = bench_on_cpu()
    inputs = attention_inputs(Maker.seeded(), "chain", 4, (20, 9))
    timing = time_function(lambda **_: time.sleep(0.002), [inputs], CPU, Limits(repeats=2))
    kernel = bench_row._impl(paged_attention, "reference")
    work = bench_row._rates(work_of("attention", "paged_attention", inputs, kernel(**inputs)), timing, bench.ceilings)
    assert work["bound"] == "memory" and work["floor_us"] == pytest.approx(work["moved_bytes"] / 1e6)
    assert work["ceiling_pct"] == pytest.approx(100 * work["floor_us"] / (timing.median_ms * 1e3))
    found = parity.Parity(None, "all", reference_fits=True)
    against = bench_row._against_reference(paged_attention, [inputs], timing, found, bench)
    assert against["reference_ratio"] == pytest.approx(against["reference_us"] / (timing.median_ms * 1e3))
    theirs = {name: bench_row._against_peer(name, "paged_attention", [inputs], kernel, bench) for name in bench.peers}
    assert theirs["sdpa"]["status"] == "ok" and theirs["sdpa"]["ratio"] > 0
    assert theirs["varlen"] == dict(status="not run", problem="runs on a GPU only")
    row = dict(family="attention", case="made", function="paged_attention", status="ok", peers=theirs)
    row |= work | against | bench_row._times(timing) | dict(shape=bench_row._shape(inputs))
    page = show.page([row], "title", show.problems([row]), bench.peers, bench.ceilings)
    assert "varlen: not run in 1 cases, runs on a GPU only" in page and "<circle" in page


def test_a_peer_that_disagrees_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = attention_inputs(Maker.seeded(), "chain", 4, (20, 9))
    wrong = bench_row._impl(lambda impl, **arguments: paged_attention(**arguments, impl=impl) * 1.01, "reference")
    found = bench_row._against_peer("sdpa", "paged_attention", [inputs], wrong, bench_on_cpu())
    assert found["status"] == "disagrees" and "median_us" not in found


def test_a_kernel_that_raises_is_a_row_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench_row._measured

    def failing(family: str, case: Case, bench: bench_row.Bench) -> dict[str, Any]:
        if family == "tree":
            raise RuntimeError("no such\ntree")
        return real(family, case, bench)

    monkeypatch.setattr(bench_row, "_measured", failing)
    config = KernelBenchConfig(family="tree+kv_index", device="cpu", repeats=1, warmup=0)
    assert not kernel_bench.run(config, tmp_path, Console(quiet=True))
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["failed", "ok"] and rows[0]["problem"] == "RuntimeError: no such"


def test_cases_beyond_the_time_of_a_run_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernel_bench,
        "measure",
        lambda family, case, bench: (time.sleep(1.1), dict(status="ok", family=family, case=case.name))[1],
    )
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
    alike = time_in_turn([(lambda x: x * 2, copies), (lambda x: x * 2, copies)], x.device, Limits())
    assert 0.8 < alike[0].median_ms / alike[1].median_ms < 1.25


def test_points_lie_by_their_logarithms() -> None:
    chart = logarithmic([("line", [(1.0, 10.0, "a"), (10.0, 100.0, "<b>"), (0.0, 5.0, "nowhere")])], "t", ("x", "y"))
    assert chart.count("<circle") == 2 and "&lt;b&gt;" in chart and "nowhere" not in chart
    assert 'cx="70.0"' in chart and 'cx="940.0"' in chart
    assert logarithmic([("empty", [])], "t", ("x", "y")) == ""


def test_a_kernel_that_disagrees_gets_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "disagreement", lambda *_: "tensor 0 differs")
    config = KernelBenchConfig(family="tree", device="cpu", repeats=1)
    assert not kernel_bench.run(config, tmp_path, Console(quiet=True))
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert row["status"] == "disagrees" and row["problem"] == "tensor 0 differs" and "median_us" not in row


@pytest.mark.skipif(torch.cuda.is_available(), reason="the command without a GPU")
def test_the_command_writes_rows_with_provenance(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "experiments.kernel_bench",
        "family=tree",
        "repeats=2",
        f"hydra.run.dir={tmp_path}",
    ]
    done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "say nothing about a GPU" in " ".join(done.stdout.split())
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert row["status"] == "ok" and row["median_us"] > 0 and row["config"]["repeats"] == 2
    assert {"machine", "versions", "git_revision", "platform", "clock", "cache", "device", "dtype"} <= row.keys()
    assert "say nothing about a GPU" in (tmp_path / "report.html").read_text()


def test_a_misspelt_key_fails_while_composing() -> None:
    with initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
        assert compose("kernel_bench", overrides=["family=tree"]).family == "tree"
        with pytest.raises(ConfigCompositionException, match="famly"):
            compose("kernel_bench", overrides=["famly=tree"])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(family="trees"), "family: expected one of all, none, .*tree"),
        (dict(peers="sdpa+abacus"), "peers: expected one of all, none, .*sdpa"),
        (dict(budget_s=0.0), "budget_s: expected at least 1"),
        (dict(repeats=0), "repeats: expected at least 1"),
        (dict(dtype="int8"), "dtype: expected one of"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KernelBenchConfig(**options)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("+foo=1", ["unknown key 'foo'", "budget_ms"]),
        ("famly=tree", ["unknown key 'famly'", "did you mean: family=…"]),
        ("repeats=0", ["repeats: expected at least 1, got 0"]),
        ("hydra.run.dir=/proc/x", ["/proc/x", "hydra.run.dir"]),
    ],
)
def test_a_mistake_gets_one_screen(
    override: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["kernel_bench.py", override])
    with pytest.raises(SystemExit) as ended:
        kernel_bench.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.startswith("error: ") and len(told.splitlines()) < 12
    for text in expected:
        assert text in told, told
    assert list(tmp_path.iterdir()) == []
