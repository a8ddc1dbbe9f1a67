"""Every task from its command line to its files, on small random models, and what each of them refuses.

The reference implementation stands in for the kernels here, which have their own tests."""

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from functools import partial
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from algorithms.attention.memory import PagedMemory
from algorithms.dflash.drafting import DFlash
from algorithms.engine.request import Completion, Request
from algorithms.engine.settings import RuntimeSettings
from experiments.app.hardware import Hardware
from experiments.app.task_schema import LosslessnessTask
from experiments.report.checks import FEW_FIRST_DRAFTS, LOW_ACCEPTANCE
from experiments.report.html_page import render
from experiments.report.tables import Column, Metric, console_table, csv_text, markdown
from experiments.report.templates import Series, chart
from experiments.studies.rules import Probe, summary
from experiments.tasks import base, decoding, distribution, kv_scales, numerical_tie
from experiments.tasks.base import Task, agreed
from experiments.tasks.compare import Compare
from experiments.tasks.graph_ablation import GraphAblation
from experiments.tasks.losslessness import BackendChecks, Losslessness
from experiments.tasks.throughput import Throughput, inter_token_ms, repeated
from specdec_kernels.sampling import philox_uniform
from tests.algorithms.drafters import TARGET, load_random_drafters
from tests.algorithms.toy import Setup, answers, autoregressive, changed, engine_of, random_target, requests
from tests.algorithms.toy import requests as toy_requests
from tests.algorithms.toy import run as served
from tests.experiments import program
from tests.experiments.program import Done, Run, model_settings

TOY = random_target()


def without_a_run(kind: type[Task], dtype: str = "float32") -> Any:
    """A task that shows rows and measures none."""
    hardware = Hardware("cpu", dtype, "reference", "reference")
    return kind(SimpleNamespace(hardware=hardware, exact=dtype == "float32", workloads=()), None, None)  # type: ignore[arg-type]


def called(home: Path, models: Path, *arguments: str) -> Done:
    """A small run of the random models."""
    limit = [] if arguments[:1] == ("task=compare",) else ["data.limit=2"]
    return program.called(home, *model_settings(models), *limit, "sampling.max_new_tokens=6", *arguments)


@pytest.fixture
def run(models: Path, tmp_path: Path) -> Run:
    return partial(called, tmp_path, models)


METHODS = "task.only=[standalone,ngram,dflash,dflash_tree]"
COMPARE = ("task=compare", "samples=1", "task.limit=2", "task.repeats=1", METHODS)


@pytest.fixture(scope="module")
def compared(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    done = called(tmp_path_factory.mktemp("compared"), models, *COMPARE)
    assert done.returncode == 0, done.stderr
    return done


def test_compare_tells_the_same_everywhere(compared: Done) -> None:
    assert compared.folder is not None
    assert {p.name for p in compared.folder.iterdir()} == {
        "config.yaml", "status.json", "summary.json", "report.html", "requests.jsonl", "compare.md", "compare.csv",
        "compare.jsonl", "decodings.jsonl",
    }  # fmt: skip
    rows = compared.results
    methods = ["autoregressive", "standalone", "ngram", "dflash", "dflash_tree"]
    assert [(row["data"], row["method"]) for row in rows] == [(d, m) for d in ("arithmetic", "code") for m in methods]
    lines = compared.lines("compare.jsonl")
    assert [{key: line[key] for key in row} for line, row in zip(lines, rows, strict=True)] == rows
    assert {line["model"] for line in lines} == {"target"}
    cells = list(csv.DictReader(compared.read("compare.csv").splitlines()))
    assert [float(cell["tokens_per_step"]) for cell in cells] == [row["tokens_per_step"] for row in rows]
    assert [cell["prediction/predicted"] == "" for cell in cells] == [row["prediction"] is None for row in rows]
    assert "prediction" not in cells[0]
    table = compared.read("compare.md").splitlines()
    assert len(table) == 2 + len(rows) and len({line.count("|") for line in table}) == 1
    for line, row in zip(table[2:], rows, strict=True):
        assert line.startswith(f"| {row['data']} | {row['method']} |") and f" {row['tokens_per_step']:.2f} " in line


def test_settings_that_a_task_does_not_use_are_named(compared: Done) -> None:
    assert "warning: task=compare does not use samples=1\n" in compared.stdout


def test_compare_is_lossless_and_its_figures_agree(compared: Done) -> None:
    rows = compared.results
    for row in rows:
        plain = next(r for r in rows if r["data"] == row["data"] and r["method"] == "autoregressive")
        emitted = row["output_tokens"] + row["num_truncated"]
        assert row["tokens_per_step"] == pytest.approx(emitted / row["row_steps"])
        assert sum(row["num_accepted_histogram"]) == row["row_steps"]
        assert (row["answers"] is None) == (row["data"] == "code")
        if row is plain:
            assert row["tokens_per_step"] == row["speedup_decode"] == 1.0 and row["lossless"]["checked"] == 0
            continue
        assert row["lossless"] == {"checked": 2, "identical": 2, "near_ties": 0, "first_difference": None}
        assert row["output_tokens"] == plain["output_tokens"]
        found = row["prediction"]
        assert row["speedup_decode"] == pytest.approx(row["decode_tokens_per_s"] / plain["decode_tokens_per_s"])
        assert row["speedup_wall"] == pytest.approx(row["wall_tokens_per_s"] / plain["wall_tokens_per_s"])
        assert row["speedup_decode"] == pytest.approx(found["predicted"] * found["occupancy"] * found["kept"])


def test_compare_report_shows_every_method_and_runs_nothing(compared: Done) -> None:
    label = "a<script>alert(1)</script>[red]|&amp;"
    rows = [row | {"method": label} if row["method"] == "ngram" else row for row in compared.results]
    conditions = json.loads(compared.read("summary.json"))
    task = without_a_run(Compare)
    shown_rows = {"notes": task.warnings(rows), "sections": task.sections(rows)}
    attacked = render(label, Compare.columns, rows, conditions, {"task": {label: 1}}, **shown_rows)
    for page in (compared.read("report.html"), attacked):
        seen = unescape(re.sub("<[^>]*>", "", page))
        assert "<script" not in page and page.count("<h2") in (8, 9)
        for shown in ("autoregressive", "dflash_tree", "2/2", "Acceptance by draft position, code", "plain torch"):
            assert shown in seen, shown
        for phase in ("draft", "verify", "accept", "commit", "host"):
            assert f"</i>{phase}</span>" in page
        assert not re.search(r"https?://|src=|href=\"?[/.]|@import|url\(", page)
    assert seen.count(label) > 6
    console = Console(file=io.StringIO(), width=200)
    console.print(console_table("t", Compare.columns, rows))
    assert label in console.file.getvalue()  # type: ignore[attr-defined]
    assert markdown(Compare.columns, rows).count("[red]\\|") == 2


def test_only_methods_that_run_need_a_drafter(run: Run) -> None:
    """The run's own algorithm is none of them; and n-grams of the warm-up do not help."""
    paths = ("model.drafts={}", "task.data=[code]", "task.limit=1")
    done = run("task=compare", *paths, "~model.drafts.dflash", "~model.drafts.standalone", "task.only=[ngram]")
    assert done.returncode == 0, done.stderr
    assert [row["method"] for row in done.results] == ["autoregressive", "ngram"]


def test_a_drafter_is_loaded_after_unused_memory_went_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter inside the freed pool of the engine before leaves a hole that is too small for the next pool."""
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("emptied"))
    monkeypatch.setattr(decoding, "load_algorithm", lambda *given: order.append("loaded"))
    plan: Any = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(drafter_of_method=lambda algo: None)))
    decoding.make_algorithm(plan, random_target(), None)
    assert order == ["emptied", "loaded"]


def test_throughput_measures_both_sides_at_every_level(run: Run) -> None:
    done = run("task=throughput", "algo=dflash", "task.concurrency=[1,3]", "task.requests=2")
    assert done.returncode == 0, done.stderr
    rows = done.results
    assert [(row["concurrency"], row["method"]) for row in rows] == [
        (level, method) for level in (1, 3) for method in ("autoregressive", "dflash")
    ]
    assert [(row["num_requests"], row["distinct_prompts"]) for row in rows] == [(2, 2), (2, 2), (6, 2), (6, 2)]
    told = " ".join(done.stdout.split())
    assert "prompts were used more than once (×3: 6 requests for 2 distinct)" in told and "data.limit" in told
    for plain, ours in (rows[:2], rows[2:]):
        assert plain["speedup_wall"] == 1.0 and plain["tokens_per_step"] == 1.0
        assert ours["speedup_wall"] == pytest.approx(ours["wall_tokens_per_s"] / plain["wall_tokens_per_s"])
        assert ours["answers"] == plain["answers"] is not None
    for row in rows:
        for name in ("ttft_ms", "inter_token_ms"):
            assert 0 < row[name]["p50"] <= row[name]["p90"]
        assert row["wall_tokens_per_s"] < row["decode_tokens_per_s"]
        low = row["method"] == "dflash" and row["acceptance_at"][0] < LOW_ACCEPTANCE
        if low:
            low = row["acceptance"]["accepted"][0] + row["acceptance"]["rejected"][0] >= FEW_FIRST_DRAFTS
        assert (f"{row['method']} ×{row['concurrency']}: only" in told) == low
    page = done.read("report.html")
    assert "used more than once" in " ".join(page.split())
    assert page.count("<polyline") == 2 and page.count("<circle") == 4 and "requests at a time" in page
    assert len(done.read("throughput.md").splitlines()) == 6
    assert len(done.read("throughput.jsonl").splitlines()) == 4


def test_throughput_of_several_methods_decodes_the_baseline_once(run: Run) -> None:
    further = "+task.methods={short:{name:ngram,num_nodes:4}}"
    done = run("task=throughput", "algo=ngram", further, "task.concurrency=[2]", "task.requests=1", "task.repeats=1")
    assert done.returncode == 0, done.stderr
    sizes = [("autoregressive", 1), ("ngram", 16), ("short", 4)]
    assert [(row["method"], row["num_nodes"]) for row in done.results] == sizes
    assert len({row["output_tokens"] for row in done.results}) == 1
    task = without_a_run(Throughput)
    task.plan.config = SimpleNamespace(algo=SimpleNamespace(name="ngram"))
    faster = [row | {"wall_tokens_per_s": rate} for rate, row in enumerate(done.results, 1)]
    assert task.best(faster)["method"] == "ngram"


def test_the_recipe_of_long_contexts_serves_as_many_prompts_as_run_at_a_time(models: Path, tmp_path: Path) -> None:
    small = (
        "data.tokens=40", "task.concurrency=[2]", "sampling.max_new_tokens=6", "task.methods.dflash_window.window=16",
    )  # fmt: skip
    cpu = ("runtime.graph=none", "~task.methods.eagle3_chain", "task.methods.dflash_window.window=16")
    done = program.called(tmp_path, "experiment=long_contexts", *model_settings(models), *small, *cpu)
    assert done.returncode == 0, done.stderr
    methods = ["autoregressive", "dflash", "dflash_window", "ngram"]
    assert [(row["method"], row["num_requests"], row["distinct_prompts"]) for row in done.results] == [
        (method, 2, 2) for method in methods
    ]
    assert [row["output_tokens"] for row in done.results] == [12] * 4, "no stop token ends an answer"
    assert all(row["lossless"]["identical"] == 2 for row in done.results[1:])


def test_a_graph_level_is_named_in_a_warning() -> None:
    (level,) = without_a_run(GraphAblation).warnings([{"level": "none", "acceptance_at": [0.01]}, {"level": "step"}])
    assert level.startswith("none: only 1.0% of first drafts")


def test_latency_between_tokens_is_shared_by_the_tokens_of_a_step() -> None:
    times, counts = [5.0, 9.0, 15.0], [3, 1, 2]
    completion = Completion(0, accepted_counts=counts, emitted_at_ms=times, num_truncated=1)
    assert inter_token_ms([completion]) == [2.0, 2.0, 3.0, 3.0]


def test_repeated_requests_have_seeds_of_their_own() -> None:
    many = repeated(toy_requests(3), 8)
    assert [r.id for r in many] == list(range(8))
    assert len({(r.prompt_ids, r.sampling.seed) for r in many}) == len({r.sampling.seed for r in many}) == 8
    assert [r.prompt_ids for r in many[3:6]] == [r.prompt_ids for r in many[:3]]


LOSSLESS = (
    "task=losslessness", "task.only=[standalone_rejection,ngram]", "task.backends=[fa4,hybrid]", "task.page_sizes=[4]",
    "task.batches=[2]", "task.distribution_draws=200",
)  # fmt: skip


@pytest.fixture
def short(tmp_path: Path) -> list[str]:
    """Two prompts of a few bytes."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "and two"}\n')
    return ["data=jsonl", f"data.path={tmp_path / 'prompts.jsonl'}"]


def test_losslessness_checks_every_pair(run: Run, short: list[str]) -> None:
    done = run(*LOSSLESS, *short, "task.min_tokens=30", "sampling.top_k=3", "sampling.repetition_penalty=1.2")
    assert done.returncode == 0, done.stderr
    rows = done.results
    methods = ["autoregressive", "standalone_rejection", "ngram"]
    assert [(row["backend"], row["method"]) for row in rows] == [(b, m) for b in ("fa4", "hybrid") for m in methods]
    for row in rows:
        assert row["identical"] == row["checked"] > 0 and row["first_difference"] is None
        assert row["tokens"] >= 30 or row["rule"] != "target_only" or row["method"] == "autoregressive"
        assert (row["distribution"] is not None) == (row["rule"] == "rejection")
        if row["distribution"]:
            assert row["distribution"]["p"] > 1e-6 and row["distribution"]["cells"] >= 3
        assert (row["low_precision"] is None) == (row["method"] == "autoregressive")
        if row["low_precision"] and row["low_precision"]["first"]:
            assert row["low_precision"]["gap"] is None or row["low_precision"]["gap"] < 2
    assert len(done.read("losslessness.md").splitlines()) == 2 + len(rows)
    lines = done.lines("losslessness.jsonl")
    assert [line["backend"] for line in lines] == [row["backend"] for row in rows]


@pytest.mark.parametrize(
    ("wrong", "identical"), [(None, 9), ("prefill by 24", 8), ("prefill of half the output", 8)], ids=str
)
def test_the_prefill_row_compares_tokens_and_log_probabilities(wrong: str | None, identical: int) -> None:
    """Three prompts in chunks of two sizes and with half of their answer; one log-probability is off by one bit."""
    decoded, chunks = [], []

    def decode(_: Any, __: Any, asked: Any, label: str, plan: Any) -> Any:
        chunks.append(plan.config.runtime.prefill_chunk)
        done = []
        for request in asked:
            first = len(request.prompt_ids)
            last = first + request.sampling.max_new_tokens
            done.append(Completion(request.id, list(range(first, last)), [-place / 7 for place in range(first, last)]))
        if wrong and label.endswith(wrong):
            done[1].logprobs[-1] = math.nextafter(done[1].logprobs[-1], 0)
        decoded.append(asked)
        return SimpleNamespace(generation=SimpleNamespace(completions=done))

    runtime, backend = SimpleNamespace(prefill_chunk=2048, deterministic=True), SimpleNamespace(name="fa4")
    settings = LosslessnessTask(graphs=["step"], methods={"ngram": {"name": "ngram"}})
    plan = SimpleNamespace(
        config=SimpleNamespace(task=settings, runtime=runtime, backend=backend),
        workloads=(SimpleNamespace(requests=toy_requests(3)),),
        hardware=SimpleNamespace(can_capture=True),
    )
    plan.varied = lambda **new: SimpleNamespace(config=SimpleNamespace(runtime=SimpleNamespace(**new), backend=backend))
    row = BackendChecks(SimpleNamespace(decode=decode), plan).prefill_result()  # type: ignore[arg-type]
    assert (row["identical"], row["checked"]) == (identical, 9)
    assert chunks == [2048, 2048, 1, 24]
    assert all(request.sampling.logprobs for asked in decoded for request in asked)
    assert [len(long.prompt_ids) - len(r.prompt_ids) for r, long in zip(*decoded[:2], strict=True)] == [12, 12, 12]


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let n-grams give another third token for the second request."""
    decode = Task.decode

    def spoiled(self: Task, algo: Any, *rest: Any, **named: Any) -> Any:
        decoded = decode(self, algo, *rest, **named)
        if algo.name == "ngram":
            ids = decoded.generation.completions[1].token_ids
            ids[2] = (ids[2] + 1) % 7
        return decoded

    monkeypatch.setattr(Task, "decode", spoiled)


def test_a_request_that_differs_fails_the_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    done = run(*LOSSLESS, "task.only=[ngram]", "task.backends=[torch]", "task.batches=[2]", "task.low_precision=null")
    assert done.returncode == 3
    assert "not lossless" in done.stderr and "ngram on torch: 1 of 2 requests differ" in done.stderr
    (row,) = [row for row in done.results if row["method"] == "ngram"]
    assert (row["identical"], row["checked"]) == (1, 2)
    assert (row["first_difference"]["request"], row["first_difference"]["position"]) == (1, 2)


@pytest.mark.parametrize("near", [False, True])
def test_a_text_that_differs_in_float32_ends_with_exit_code_3(
    run: Run, monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    """The exit code, the terminal, the page and the summary agree; only a measured numerical tie is excused."""
    spoil(monkeypatch)
    if near:
        monkeypatch.setitem(numerical_tie.ROUNDINGS, "float32", 10**9)
    done = run("algo=ngram", "data=code", "sampling.repetition_penalty=1.1")
    row = done.results[-1]
    first = row["lossless"]["first_difference"]
    assert (first["request"], first["position"], first["numerical_tie"]) == (1, 2, near)
    assert first["gap"] == pytest.approx(abs(first["logit"] - first["baseline_logit"]))
    assert first["baseline_logit"] > first["logit"], "greedy decoding takes the largest logit"
    assert row["lossless"]["near_ties"] == near and (first["gap"] <= first["bound"]) == near
    said = f"request 1, position 2: token {first['token']} (logit "
    page, summary = done.read("report.html"), json.loads(done.read("summary.json"))
    assert json.loads(done.read("status.json"))["status"] == "done"
    assert said in page and ('class="note bad"' in page) == (not near)
    if near:
        assert done.returncode == 0 and summary["failures"] == [] and "1 at a numerical tie" in done.stdout
    else:
        assert done.returncode == 3 and "error: not lossless" in done.stderr and said in done.stderr
        assert "numerical tie;" not in done.stdout and len(summary["failures"]) == 1


def test_a_wrong_token_after_the_end_of_a_text_is_a_fault() -> None:
    look = numerical_tie.look_at(TOY, toy_requests(1), [Completion(0, token_ids=[1])])
    found = look(0, {"position": 1, "token": 3, "baseline_token": None})
    assert found == {"logit": None, "baseline_logit": None, "gap": None, "bound": None, "numerical_tie": False}


def test_a_sampled_token_has_a_near_tie_where_the_uniform_is_near_its_border(monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = toy_requests(1, temperature=0.8)
    place = float(philox_uniform(torch.tensor([request.sampling.seed]), torch.tensor([len(request.prompt_ids)])))
    logits = torch.zeros(5)
    logits[4] = -float("inf")
    held = int(place * 4)
    distances = [numerical_tie.distance_of_uniform(logits, request, 1, [held, token]) for token in range(5)]
    assert distances[held] == 0 and distances[4] == float("inf")
    expected = [max(token / 4 - place, place - (token + 1) / 4, 0) for token in range(4)]
    assert distances[:4] == pytest.approx(expected)

    look = numerical_tie.look_at(TOY, [request], [Completion(0, token_ids=[1, 2])])
    found = look(0, {"position": 1, "token": 3, "baseline_token": 2})
    assert found["gap"] > found["bound"] and not found["numerical_tie"]
    monkeypatch.setitem(numerical_tie.ROUNDINGS, "float32", 10**9)
    assert look(0, {"position": 1, "token": 3, "baseline_token": 2})["numerical_tie"]


@pytest.mark.parametrize(
    ("filters", "near_limit", "error"),
    [
        ({"top_k": 2}, [3.0, 2.0, 2.0 - 1e-5, 0.0], 1e-5),
        ({"min_p": math.exp(-1.0)}, [3.0, 2.5, 2.0 - 1e-5, 0.0], 1e-5),
        ({"top_p": 0.8 - 1e-5}, [math.log(0.5), math.log(0.3), math.log(0.2), -40.0], 4e-5),
    ],
)
def test_a_filter_may_keep_a_token_that_rounding_puts_below_its_limit(
    filters: dict[str, Any], near_limit: list[float], error: float
) -> None:
    """The third token is 1e-5 below the limit of the filter, so a second computation may keep it and draw it."""
    logits = torch.tensor(near_limit)
    request = _drawing_in(logits[:3].softmax(0), 2, **filters)
    for token, off, distance in ((2, 0.0, math.inf), (2, error, 0), (2, 1e-6, math.inf), (3, error, math.inf)):
        assert numerical_tie.distance_of_uniform(logits, request, 0, [token], error=off) == distance


def _drawing_in(shares: torch.Tensor, token: int, **filters: Any) -> Request:
    """A request whose uniform lies well inside the interval of `token` in the cumulative distribution of `shares`."""
    end = float(shares[: token + 1].sum())
    low, high = end - 0.9 * float(shares[token]), end - 0.1 * float(shares[token])
    (request,) = toy_requests(1, temperature=1.0, **filters)
    position = torch.tensor([len(request.prompt_ids) - 1])
    seed = next(s for s in range(1000) if low < float(philox_uniform(torch.tensor([s]), position)) < high)
    return request.with_sampling(seed=seed)


def test_where_near_ties_are_possible() -> None:
    greedy, drawn = toy_requests(1), toy_requests(1, temperature=0.8)
    half = random_target(seed=3)
    half.model.bfloat16()
    assert numerical_tie.ties_possible(TOY, drawn, False) and numerical_tie.ties_possible(half, greedy, False)
    assert numerical_tie.ties_possible(half, [*greedy, *drawn], False)
    assert not numerical_tie.ties_possible(half, drawn, False) and not numerical_tie.ties_possible(TOY, drawn, True)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_logits_that_are_off_move_a_border_no_further_than_the_bound(share: float) -> None:
    error, temperature = 0.3, 0.7
    odds = share / (1 - share) * math.exp(2 * error / temperature)
    moved = odds / (1 + odds) - share
    assert 0 < moved <= numerical_tie.moved_borders(error, temperature) + 1e-12


def test_graphs_that_change_tokens_fail_the_job() -> None:
    rows = [{"level": "none", "differing": 0}, {"level": "step", "differing": 2}]
    expected = ["graph=step: 2 requests differ from those of graph=none"]
    assert without_a_run(GraphAblation).failures(rows) == expected
    assert without_a_run(GraphAblation, "bfloat16").failures(rows) == []


def test_a_sampled_distribution_that_is_wrong_fails_the_job() -> None:
    row = {"method": "m", "backend": "b", "identical": 1, "checked": 2, "distribution": {"p": 1e-9}}
    exact, low = without_a_run(Losslessness), without_a_run(Losslessness, "bfloat16")
    assert len(exact.failures([row])) == 2
    assert low.failures([row]) == ["m on b: the sampled tokens do not follow the target's distribution (p = 1e-09)"]
    assert exact.failures([row | {"identical": 2, "distribution": {"p": 1e-5}}]) == []


def test_chi_square_sees_what_does_not_fit() -> None:
    exact = {(0, 0): 0.5, (0, 1): 0.3, (1, 0): 0.2}
    assert distribution.chi_square_p({(0, 0): 50, (0, 1): 30, (1, 0): 20}, exact) == pytest.approx(1.0)
    assert distribution.chi_square_p({(0, 0): 20, (0, 1): 30, (1, 0): 50}, exact) < 1e-12
    assert distribution.chi_square_p({(0, 0): 99, (7, 7): 1}, exact) == 0.0
    rare = {(0, 0): 0.5, (0, 1): 0.4995, (1, 0): 0.0005}  # expects half a draw of 1000
    assert distribution.chi_square_p({(0, 0): 500, (0, 1): 500}, rare) > 0.9
    assert distribution.chi_square_p({(0, 0): 500, (0, 1): 499, (1, 0): 1}, rare) > 0.5
    assert distribution.chi_square_p({(0, 0): 495, (0, 1): 490, (1, 0): 15}, rare) < 1e-12, "a surplus that is rare"
    assert distribution.chi_square_p({(0, 0): 700, (0, 1): 300}, rare) < 1e-12
    assert distribution.at_least_p(2, 0.5) == pytest.approx(1 - 1.5 * math.exp(-0.5))
    # Against SciPy: statistic 25/50 + 16/30 + 1/20 with two degrees of freedom.
    assert distribution.chi_square_p({(0, 0): 55, (0, 1): 26, (1, 0): 19}, exact) == pytest.approx(0.58175, abs=1e-4)


def test_graph_ablation_says_what_it_could_not_measure(run: Run) -> None:
    done = run("task=graph_ablation", "algo=dflash")
    assert done.returncode == 0, done.stderr
    rows = done.results
    assert [row["level"] for row in rows] == ["none", "draft", "verify", "step"]
    assert rows[0]["note"] == "same tokens" and rows[0]["decode_tokens_per_s"] > 0
    assert rows[0]["launch_ms_per_step"] > 0 and rows[0]["device_ms_per_step"] > 0
    assert {row["note"] for row in rows[1:]} == {"needs a CUDA device"}
    assert "needs a CUDA device" in done.read("graph_ablation.md")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("backend=torch runtime.num_pages=9999 runtime.page_size=999999999", "lower runtime.num_pages"),
        ("runtime.num_pages=1", "runtime.num_pages"),
        ("task=verification_rules +task.methods.x={name:dflash,topk:4,num_nodes:6} task.only=[x]", "x samples nothing"),
        ("task=verification_rules +task.methods.x={name:dflash,draft_sampling:sample} task.only=[x]", "drafts a chain"),
        ("task=replay +task.methods.x={name:standalone,rule:rejection} task.only=[x]", "x has the rule rejection"),
    ],
)
def test_what_is_refused_with_a_model(run: Run, typed: str, told: str) -> None:
    done = run(*typed.split())
    assert done.returncode == 2 and done.folder is None, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and told in done.stderr, done.stderr


def a_row(**changes: Any) -> dict[str, Any]:
    comparison = {"checked": 2, "identical": 2, "near_ties": 0, "first_difference": None}
    row = {"data": "d", "method": "m", "graphs": {"level": "none"}, "acceptance_at": [0.5], "lossless": comparison}
    return row | changes


def test_warnings_of_a_comparison() -> None:
    compare = without_a_run(Compare)
    assert compare.warnings([a_row(), a_row(acceptance_at=[0.05])]) == []
    (low,) = compare.warnings([a_row(acceptance_at=[0.049])])
    assert low.startswith("d, m: only 4.9% of first drafts were accepted")
    assert compare.warnings([a_row(acceptance_at=[0.049], drafts_with_model=False)]) == []  # n-grams may not repeat
    few, more, none = ({"accepted": [0] * len(counts), "rejected": counts} for counts in ([19], [20], []))
    assert compare.warnings([a_row(acceptance_at=[], acceptance=none)]) == []  # autoregressive
    assert compare.warnings([a_row(acceptance_at=[0.0], acceptance=few)]) == []
    assert len(compare.warnings([a_row(acceptance_at=[0.0], acceptance=more)])) == 1
    comparison = {"checked": 2, "identical": 1, "near_ties": 0, "first_difference": None}
    assert compare.warnings([a_row(lossless=comparison)]) == []
    assert compare.failures([a_row(), a_row(lossless=comparison)]) == [
        "d, m: 1 of 2 requests differ from autoregressive decoding in float32"
    ]
    low = without_a_run(Compare, "bfloat16")
    assert low.failures([a_row(lossless=comparison)]) == []
    assert "1 of 2 requests differ" in low.warnings([a_row(lossless=comparison)])[0]


def test_axes_end_at_readable_numbers() -> None:
    for value, end in ((522.5, "600"), (1.0, "1"), (0.037, "0.04"), (81.0, "100")):
        svg = chart([Series("a", [(1.0, value), (15.0, value / 2)])], "t", ("x", "y"))
        marks = re.findall(r'text-anchor="end">([\d.,]+)<', svg)
        assert marks[-1] == end and len(marks) == 5
        assert re.findall(r'text-anchor="middle">(\d+)<', svg) == ["0", "2", "4", "6", "8", "10", "12", "14"]
    assert chart([], "t", ("x", "y")) == ""
    large = chart([Series("a", [(1_234.0, 13_078.0), (47_582.0, 2.0)])], "t", ("x", "y"))
    marks = re.findall(r">([\d,.]+)</text>", large)
    assert marks == ["0", "10,000", "20,000", "30,000", "40,000", "0", "4,000", "8,000", "12,000", "16,000"]
    assert "a: 13,078 at 1,234" in large


def test_tables_keep_cells_apart() -> None:
    columns = (Column("a|b", lambda row: row["a"], numeric=False), Column("n", lambda row: str(row["n"])))
    rows = [{"a": "x|y", "n": 1, "deep": {"er": 2, "list": [1, None]}}, {"a": 'q"\n', "n": 2, "deep": None}]
    assert markdown(columns, rows).splitlines()[:3] == ["| a\\|b | n |", "| --- | ---: |", "| x\\|y | 1 |"]
    read = list(csv.DictReader(csv_text(rows).splitlines(keepends=True)))
    assert read[0] == {"a": "x|y", "n": "1", "deep/er": "2", "deep/list": "[1, null]"}
    assert read[1] == {"a": 'q"\n', "n": "2", "deep/er": "", "deep/list": ""}
    assert console_table("t", columns, rows).row_count == 2


def test_narrow_terminals_break_headings_between_words() -> None:
    rows = [{"method": "autoregressive", "ms": 1234.5, "speedup": 1.25}]
    columns = [
        Metric("", "method").column("method", numeric=False),
        Metric("", "between tokens ms").column("ms", numeric=True),
        Metric("", "decode speedup", digits=2).column("speedup", numeric=True),
    ]
    console = Console(file=io.StringIO(), width=46)
    console.print(console_table("t", columns, rows))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("autoregressive", "between", "tokens", "decode", "speedup", "1,234.5", "1.25"):
        assert word in shown, shown


def test_warm_up_prefills_every_size_that_is_compiled() -> None:
    from experiments.tasks.decoding import warm_up_sizes

    assert warm_up_sizes(False, 8) == [(1, 2)]
    assert warm_up_sizes(True, 6) == [(1, 2), (2, 2), (4, 2), (6, 2), (24, 32)]


@pytest.mark.parametrize("graph", ["step", "none"])
def test_the_warm_up_shortens_prompts_of_captured_prefills(monkeypatch: pytest.MonkeyPatch, graph: str) -> None:
    """A prefill that is not captured may launch other kernels for a long prompt."""
    from experiments.tasks import decoding

    monkeypatch.setattr(decoding, "WARM_UP_PROMPT", 3)
    engine = engine_of(autoregressive(TOY), Setup(graph=graph), TOY)
    asked = toy_requests(2, max_new_tokens=4)
    generate, seen = engine.generate, []

    def watched(requests: Sequence[Request], **rest: Any) -> Any:
        seen.extend(requests)
        return generate(requests, **rest)

    monkeypatch.setattr(engine, "generate", watched)
    plan: Any = SimpleNamespace(
        hardware=SimpleNamespace(label="triton"), config=SimpleNamespace(runtime=RuntimeSettings(max_batch=2))
    )
    decoding.warm_up(engine, plan, asked)
    most = 3 if graph == "step" else max(len(request.prompt_ids) for request in asked)
    assert max(len(request.prompt_ids) for request in seen) == most
    assert all(request.prompt_ids == asked[request.id].prompt_ids[:most] for request in seen)


def test_factors_of_the_cache_are_measured_and_used(run: Run) -> None:
    """`task=kv_scales` writes factors, and a run with them writes the same as autoregressive decoding with them."""
    measured = run("task=kv_scales", "task.margin=1.25")
    assert measured.folder is not None, measured.stderr
    factors = measured.folder / "kv_scales.safetensors"
    stored = load_file(factors)
    for layer, row in enumerate(measured.results):
        assert row["largest_key"] * 1.25 / 448 == pytest.approx(row["k_scale"], rel=1e-6)
        assert float(stored["v_scale"][layer].max()) == pytest.approx(row["v_scale"], rel=1e-6)
    used = run("algo=dflash", "runtime.kv_dtype=fp8_e4m3", f"runtime.kv_scales={factors}")
    assert used.returncode == 0, used.stderr
    assert used.results[-1]["lossless"]["identical"] == 2
    other = run("algo=dflash", "runtime.kv_dtype=fp8_e4m3", "runtime.kv_scales=none.safetensors")
    assert other.returncode == 2 and "found none at none.safetensors; task=kv_scales writes one" in other.stderr
    alone = run("algo=dflash", f"runtime.kv_scales={factors}")
    assert alone.returncode == 2 and "runtime.kv_scales is for runtime.kv_dtype=fp8_e4m3" in alone.stderr


def test_scales_are_of_every_batch_and_of_every_rank(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are used again, so the keys of an earlier batch are gone at the end. Ranks store their own heads."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "zebra quilts"}\n{"prompt": "1234567"}\n')
    (tmp_path / "swapped.jsonl").write_text('{"prompt": "1234567"}\n{"prompt": "zebra quilts"}\n')
    size = ["runtime.max_batch=1", "runtime.page_size=64", "runtime.num_pages=1"]  # one page for both
    data = ["task=kv_scales", "data=jsonl", *size, "sampling.max_new_tokens=2"]
    found = [run(*data, f"data.path={tmp_path / name}").results for name in ("prompts.jsonl", "swapped.jsonl")]
    assert found[0] == found[1], "the largest of all batches does not depend on their order"
    monkeypatch.setattr(kv_scales, "parallel", lambda: True)
    monkeypatch.setattr(kv_scales, "join_columns", lambda part: torch.cat([part, 2 * part], -1))
    cache: Any = SimpleNamespace(kv=torch.ones(2, 2, 1, 1, 3, 1), config=SimpleNamespace(sliding_windows=()))
    engine = SimpleNamespace(
        parts=SimpleNamespace(memory=PagedMemory(cache, None)),  # type: ignore[arg-type]
        generate=lambda requests, on_end: SimpleNamespace(completions=[]),
    )
    monkeypatch.setattr(kv_scales.KVScales, "engine_for", lambda *_: engine)
    monkeypatch.setattr(kv_scales.KVScales, "recorder", lambda *_: None)
    workload = SimpleNamespace(name="d", requests=toy_requests(1), max_length=9)
    config = SimpleNamespace(runtime=SimpleNamespace(max_batch=1))
    plan: Any = SimpleNamespace(workloads=(workload,), config=config)
    joined, _ = kv_scales.KVScales(plan, None, None)._largest()  # type: ignore[arg-type]
    assert joined.shape == (2, 2, 6) and joined[0, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_ranks_agree_on_the_number_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clocks differ, and a rank that decodes one round more would wait for ever."""
    assert agreed(1, "cpu") == 1
    monkeypatch.setattr(base, "parallel", lambda: True)
    monkeypatch.setattr(base, "from_rank_0", lambda tensors: [torch.full_like(each, 3) for each in tensors])
    assert agreed(1, "cpu") == 3


def test_the_probe_leaves_the_text_of_autoregressive_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    load_random_drafters(monkeypatch)
    asked = [changed(r, temperature=1.0) for r in requests(4, max_new_tokens=8)]
    inner = DFlash(DFlash.Config(block_size=4, topk=2, num_nodes=8, draft_sampling="sample"), TARGET, "random")
    probe = Probe(inner, ("traversal", "multi_round"))
    setup = Setup(max_batch=2)
    assert [c.token_ids for c in served(probe, asked, setup, TARGET).completions] == answers(asked, setup, TARGET)
    assert set(probe.found) == {request.sampling.seed for request in asked}
    figures = summary(probe.found, 0, 1)
    assert 0 < figures["expected_accepted"] < 3 and figures["num_requests"] == 4
    low, high = figures["gain_interval"]
    assert low <= figures["gain"] <= high and summary(probe.found, 1, 1)["gain"] == 0


def test_the_task_on_models(run: Run) -> None:
    found = run("task=verification_rules", "task.only=[dflash_independent]", "runtime.adaptive=true")
    assert found.returncode == 0, found.stderr
    of_models = [row for row in found.results if row["row_steps"]]
    rules = ["traversal", "greedy_paths", "without_replacement", "k_seq", "multi_round"]
    assert [row["rule"] for row in of_models] == rules
    assert all(0 <= row["expected_accepted"] <= 3 for row in of_models) and of_models[-1]["gain"] == 0
    assert len(found.read("verification_rules.jsonl").splitlines()) == len(found.results) == 5
    assert len(found.read("requests.jsonl").splitlines()) == of_models[0]["num_requests"]
