"""Every task from its command line to its files, on small random models, and what each of them refuses.

The reference implementation stands in for the kernels here, which have their own tests.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from algorithms.runtime.request import Completion, Request
from experiments.app import cli
from experiments.app.hardware import Hardware
from experiments.app.task_schema import CompareTask, GraphAblationTask, LosslessnessTask, ThroughputTask
from experiments.report import metrics as figures
from experiments.report.page import render
from experiments.report.plots import lines
from experiments.report.tables import METHOD, Column, console_table, csv_text, markdown, number
from experiments.tasks import distribution, near_tie
from experiments.tasks.base import Task
from experiments.tasks.compare import Compare
from experiments.tasks.graph_ablation import GraphAblation, level_note
from experiments.tasks.losslessness import BackendChecks, Losslessness
from experiments.tasks.run import run_task
from experiments.tasks.throughput import Throughput, inter_token_ms, repeated
from specdec_kernels.sampling.reference import philox_uniform
from tests.algorithms.toy import random_target
from tests.algorithms.toy import requests as toy_requests
from tests.runtime.tiny_folders import small_config, small_dflash_config, write_dflash, write_target


@dataclass(frozen=True)
class Done:
    """How a call of the program ended, and the folder it left, if any."""

    returncode: int
    stdout: str
    stderr: str
    folder: Path | None

    def read(self, name: str) -> str:
        assert self.folder is not None, self.stderr
        return (self.folder / name).read_text()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return json.loads(self.read("summary.json"))["rows"]


Run = Callable[..., Done]
TOY = random_target()


def without_a_run(kind: type[Task], dtype: str = "float32") -> Any:
    """A task that shows rows and measures none."""
    hardware = Hardware("cpu", dtype, "reference", "reference")
    return kind(SimpleNamespace(hardware=hardware, exact=dtype == "float32", workloads=()), None, None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    target = write_target(folder / "target")
    write_dflash(folder / "dflash", small_dflash_config(target.config))
    write_target(folder / "draft", small_config(num_layers=2), seed=2)
    return folder


def called(home: Path, models: Path, *arguments: str) -> Done:
    """The program in this process, which spares its imports."""
    fixed = [
        "model=local",
        f"model.path={models / 'target'}",
        f"model.drafts.dflash={models / 'dflash'}",
        f"model.drafts.standalone={models / 'draft'}",
        "runtime.device=cpu",
        "runtime.impl=reference",
        "tracker=none",
        "data.limit=2",
        "sampling.max_new_tokens=6",
        "name=test",
    ]
    before = set((home / "outputs/test").glob("*"))
    code, out, err = 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(home)
        patch.delenv(cli.FULL_ERROR, raising=False)
        patch.setattr(sys, "argv", ["run.py", *fixed, *arguments])
        try:
            cli.main(run_task)
        except SystemExit as end:
            code = int(end.code or 0)
    found = set((home / "outputs/test").glob("*")) - before
    return Done(code, out.getvalue(), err.getvalue(), found.pop() if found else None)


@pytest.fixture
def run(models: Path, tmp_path: Path) -> Run:
    return partial(called, tmp_path, models)


COMPARE = ("task=compare", "task.limit=2", "task.only=[standalone,ngram,dflash,dflash_tree]")


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
    rows = compared.rows
    methods = ["autoregressive", "standalone", "ngram", "dflash", "dflash_tree"]
    assert [(row["data"], row["method"]) for row in rows] == [(d, m) for d in ("arithmetic", "code") for m in methods]
    lines = [json.loads(line) for line in compared.read("compare.jsonl").splitlines()]
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
    assert "warning: task=compare does not use data.limit=2\n" in compared.stdout


def test_compare_is_lossless_and_its_figures_agree(compared: Done) -> None:
    rows = compared.rows
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


class Text(HTMLParser):
    """What a reader sees, and every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.seen = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.seen += data


def test_compare_report_shows_every_method_and_runs_nothing(compared: Done) -> None:
    label = "a<script>alert(1)</script>[red]|&amp;"
    rows = [row | {"method": label} if row["method"] == "ngram" else row for row in compared.rows]
    conditions = json.loads(compared.read("summary.json"))
    task = without_a_run(Compare)
    attacked = render(
        label,
        Compare.columns,
        rows,
        conditions,
        {"task": {label: 1}},
        task.warnings(rows),
        sections=task.sections(rows),
    )
    for page in (compared.read("report.html"), attacked):
        text = Text()
        text.feed(page)
        assert "script" not in text.tags and text.tags.count("h2") in (8, 9)
        for shown in ("autoregressive", "dflash_tree", "2/2", "Acceptance by draft position, code", "plain torch"):
            assert shown in text.seen, shown
        for phase in ("draft", "verify", "accept", "commit", "host"):
            assert f"</i>{phase}</span>" in page
        assert not re.search(r"https?://|src=|href=\"?[/.]|@import|url\(", page)
    assert text.seen.count(label) > 6
    console = Console(file=io.StringIO(), width=200)
    console.print(console_table("t", Compare.columns, rows))
    assert label in console.file.getvalue()  # type: ignore[attr-defined]
    assert markdown(Compare.columns, rows).count("[red]\\|") == 2


def test_only_methods_that_run_need_a_drafter(run: Run) -> None:
    """The run's own algorithm is none of them; and n-grams of the warm-up do not help."""
    paths = ("model.drafts={}", "task.data=[code]", "task.limit=1")
    done = run("task=compare", *paths, "~model.drafts.dflash", "~model.drafts.standalone", "task.only=[ngram]")
    assert done.returncode == 0, done.stderr
    assert [row["method"] for row in done.rows] == ["autoregressive", "ngram"]


def test_throughput_measures_both_sides_at_every_level(run: Run) -> None:
    done = run("task=throughput", "algo=dflash", "task.concurrency=[1,3]", "task.requests=2")
    assert done.returncode == 0, done.stderr
    rows = done.rows
    assert [(row["concurrency"], row["method"]) for row in rows] == [
        (level, method) for level in (1, 3) for method in ("autoregressive", "dflash")
    ]
    assert [row["num_requests"] for row in rows] == [2, 2, 6, 6]
    for plain, ours in (rows[:2], rows[2:]):
        assert plain["speedup_wall"] == 1.0 and plain["tokens_per_step"] == 1.0
        assert ours["speedup_wall"] == pytest.approx(ours["wall_tokens_per_s"] / plain["wall_tokens_per_s"])
        assert ours["answers"] == plain["answers"] is not None
    for row in rows:
        for name in ("ttft_ms", "inter_token_ms"):
            assert 0 < row[name]["p50"] <= row[name]["p90"]
        assert row["wall_tokens_per_s"] < row["decode_tokens_per_s"]
    page = done.read("report.html")
    assert page.count("<polyline") == 2 and page.count("<circle") == 4 and "requests at a time" in page
    assert len(done.read("throughput.md").splitlines()) == 6
    assert len(done.read("throughput.jsonl").splitlines()) == 4


def test_throughput_of_the_baseline_alone(run: Run) -> None:
    done = run("task=throughput", "algo=autoregressive", "task.concurrency=[2]", "task.requests=1")
    assert done.returncode == 0, done.stderr
    assert [row["method"] for row in done.rows] == ["autoregressive"]


def test_throughput_of_several_methods_decodes_the_baseline_once(run: Run) -> None:
    further = "+task.methods={short:{name:ngram,num_nodes:4}}"
    done = run("task=throughput", "algo=ngram", further, "task.concurrency=[2]", "task.requests=1", "task.repeats=1")
    assert done.returncode == 0, done.stderr
    sizes = [("autoregressive", 1), ("ngram", 16), ("short", 4)]
    assert [(row["method"], row["num_nodes"]) for row in done.rows] == sizes
    assert len({row["output_tokens"] for row in done.rows}) == 1
    task = without_a_run(Throughput)
    task.plan.config = SimpleNamespace(algo=SimpleNamespace(name="ngram"))
    assert task.best([row | {"wall_tokens_per_s": rate} for rate, row in enumerate(done.rows, 1)])["method"] == "ngram"


def test_throughput_warns_of_prompts_asked_twice_and_of_a_drafter_that_is_never_right(run: Run) -> None:
    done = run("task=throughput", "algo=standalone", "task.concurrency=[1,2]", "task.requests=2")
    assert done.returncode == 0, done.stderr
    assert [(row["num_requests"], row["distinct_prompts"]) for row in done.rows] == [(2, 2), (2, 2), (4, 2), (4, 2)]
    told = " ".join(done.stdout.split())
    assert "prompts were asked more than once (×2: 4 requests for 2 distinct)" in told and "data.limit" in told
    page = " ".join(done.read("report.html").split())
    assert "asked more than once" in page
    for row in done.rows:
        low = row["method"] == "standalone" and row["acceptance_at"][0] < figures.LOW_ACCEPTANCE
        assert (f"{row['method']} ×{row['concurrency']}: only" in told) == low


def test_warnings_of_throughput_and_of_graphs() -> None:
    throughput, graph_ablation = without_a_run(Throughput), without_a_run(GraphAblation)
    row = {"method": "m", "concurrency": 4, "num_requests": 8, "distinct_prompts": 8, "acceptance_at": [0.05]}
    assert throughput.warnings([row, row | {"acceptance_at": []}]) == []
    (low,) = throughput.warnings([row | {"acceptance_at": [0.049]}])
    assert low.startswith("m ×4: only 4.9% of first drafts were accepted")
    (twice,) = throughput.warnings([row | {"distinct_prompts": 7}, row])
    assert "×4: 8 requests for 7 distinct" in twice and "ngram" in twice
    (level,) = graph_ablation.warnings([{"level": "none", "acceptance_at": [0.01]}, {"level": "step"}])
    assert level.startswith("none: only 1.0% of first drafts")


def test_latency_between_tokens_is_shared_by_the_tokens_of_a_step() -> None:
    times, counts = [5.0, 9.0, 15.0], [3, 1, 2]
    completion = Completion(0, accepted_counts=counts, emitted_at_ms=times, num_truncated=1)
    assert inter_token_ms([completion]) == [2.0, 2.0, 3.0, 3.0]


def test_repeated_requests_have_seeds_of_their_own() -> None:
    from tests.algorithms.toy import requests

    many = repeated(requests(3), 8)
    assert [r.id for r in many] == list(range(8))
    assert len({(r.prompt_ids, r.sampling.seed) for r in many}) == len({r.sampling.seed for r in many}) == 8
    assert [r.prompt_ids for r in many[3:6]] == [r.prompt_ids for r in many[:3]]


LOSSLESS = (
    "task=losslessness",
    "task.only=[standalone,standalone_rejection,ngram]",
    "task.backends=[fa4,hybrid]",
    "task.page_sizes=[4]",
    "task.batches=[1,2]",
    "task.distribution_draws=200",
)


@pytest.fixture
def short(tmp_path: Path) -> list[str]:
    """Two prompts of a few bytes."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "and two"}\n')
    return ["data=jsonl", f"data.path={tmp_path / 'prompts.jsonl'}"]


def test_losslessness_checks_every_pair(run: Run, short: list[str]) -> None:
    done = run(*LOSSLESS, *short, "task.min_tokens=30", "sampling.top_k=3", "sampling.repetition_penalty=1.2")
    assert done.returncode == 0, done.stderr
    rows = done.rows
    methods = ["autoregressive", "standalone", "standalone_rejection", "ngram"]
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
    lines = [json.loads(line) for line in done.read("losslessness.jsonl").splitlines()]
    assert [line["backend"] for line in lines] == [row["backend"] for row in rows]


@pytest.mark.parametrize(
    ("wrong", "identical"), [(None, 9), ("prefill by 24", 8), ("prefill of half the answer", 8)], ids=str
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

    runtime = SimpleNamespace(prefill_chunk=2048, deterministic=True)
    config = SimpleNamespace(
        task=LosslessnessTask(graphs=["step"], methods={"ngram": {"name": "ngram"}}),
        runtime=runtime,
        backend=SimpleNamespace(name="fa4"),
    )
    plan = SimpleNamespace(
        config=config,
        workloads=(SimpleNamespace(requests=toy_requests(3)),),
        hardware=SimpleNamespace(can_capture=True),
    )
    plan.varied = lambda **given: SimpleNamespace(
        config=SimpleNamespace(runtime=SimpleNamespace(**given), backend=config.backend)
    )
    row = BackendChecks(SimpleNamespace(decode=decode), plan).prefill_row()  # type: ignore[arg-type]
    assert (row["identical"], row["checked"]) == (identical, 9)
    assert chunks == [2048, 2048, 1, 24]
    assert all(request.sampling.logprobs for asked in decoded for request in asked)
    assert [len(long.prompt_ids) - len(r.prompt_ids) for r, long in zip(*decoded[:2], strict=True)] == [12, 12, 12]


def test_a_request_that_differs_fails_the_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Task.decode

    def spoiled(self: Task, algo: Any, *rest: Any, **named: Any) -> Any:
        decoded = decode(self, algo, *rest, **named)
        if algo.name == "ngram":
            decoded.generation.completions[1].token_ids[2] += 1
        return decoded

    monkeypatch.setattr(Task, "decode", spoiled)
    done = run(*LOSSLESS, "task.only=[ngram]", "task.backends=[torch]", "task.batches=[2]", "task.low_precision=null")
    assert done.returncode == 3
    assert "not lossless" in done.stderr and "ngram on torch: 1 of 2 requests differ" in done.stderr
    (row,) = [row for row in done.rows if row["method"] == "ngram"]
    assert (row["identical"], row["checked"]) == (1, 2)
    assert (row["first_difference"]["request"], row["first_difference"]["position"]) == (1, 2)


@pytest.mark.parametrize("near", [False, True])
def test_a_text_that_differs_in_float32_ends_with_exit_code_3(
    run: Run, monkeypatch: pytest.MonkeyPatch, near: bool
) -> None:
    """The exit code, the terminal, the page and the summary agree; only a measured near tie is excused."""
    decode = Task.decode

    def spoiled(self: Task, algo: Any, *rest: Any, **named: Any) -> Any:
        decoded = decode(self, algo, *rest, **named)
        if algo.name == "ngram":
            ids = decoded.generation.completions[1].token_ids
            ids[2] = (ids[2] + 1) % 7
        return decoded

    monkeypatch.setattr(Task, "decode", spoiled)
    if near:
        monkeypatch.setitem(near_tie.ROUNDINGS, "float32", 10**9)
    done = run("algo=ngram", "data=code", "sampling.repetition_penalty=1.1")
    row = done.rows[-1]
    first = row["lossless"]["first_difference"]
    assert (first["request"], first["position"], first["near_tie"]) == (1, 2, near)
    assert first["gap"] == pytest.approx(abs(first["logit"] - first["baseline_logit"]))
    assert first["baseline_logit"] > first["logit"], "greedy decoding takes the largest logit"
    assert row["lossless"]["near_ties"] == near and (first["gap"] <= first["bound"]) == near
    said = f"request 1, position 2: token {first['token']} (logit "
    page, summary = done.read("report.html"), json.loads(done.read("summary.json"))
    assert json.loads(done.read("status.json"))["status"] == "done"
    assert said in page and ('class="note bad"' in page) == (not near)
    if near:
        assert done.returncode == 0 and summary["failures"] == [] and "1 at a near tie" in done.stdout
    else:
        assert done.returncode == 3 and "error: not lossless" in done.stderr and said in done.stderr
        assert "near tie;" not in done.stdout and len(summary["failures"]) == 1


def test_a_wrong_token_after_the_end_of_a_text_is_a_fault() -> None:
    look = near_tie.look_at(TOY, toy_requests(1), [Completion(0, token_ids=[1])])
    found = look(0, {"position": 1, "token": 3, "baseline_token": None})
    assert found == {"logit": None, "baseline_logit": None, "gap": None, "bound": None, "near_tie": False}


def test_a_drawn_token_has_a_near_tie_where_the_uniform_is_near_its_border(monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = toy_requests(1, temperature=0.8)
    place = float(philox_uniform(torch.tensor([request.sampling.seed]), torch.tensor([len(request.prompt_ids)])))
    logits = torch.zeros(5)
    logits[4] = -float("inf")
    held = int(place * 4)
    distances = [near_tie.distance_of_uniform(logits, request, 1, [held, token]) for token in range(5)]
    assert distances[held] == 0 and distances[4] == float("inf")
    expected = [max(token / 4 - place, place - (token + 1) / 4, 0) for token in range(4)]
    assert distances[:4] == pytest.approx(expected)

    look = near_tie.look_at(TOY, [request], [Completion(0, token_ids=[1, 2])])
    found = look(0, {"position": 1, "token": 3, "baseline_token": 2})
    assert found["gap"] > found["bound"] and not found["near_tie"]
    monkeypatch.setitem(near_tie.ROUNDINGS, "float32", 10**9)
    assert look(0, {"position": 1, "token": 3, "baseline_token": 2})["near_tie"]


@pytest.mark.parametrize(
    ("filters", "near_limit"),
    [({"top_k": 2}, [3.0, 2.0, 2.0 - 1e-5, 0.0]), ({"min_p": math.exp(-1.0)}, [3.0, 2.5, 2.0 - 1e-5, 0.0])],
)
def test_a_filter_may_keep_a_token_that_rounding_puts_below_its_limit(
    filters: dict[str, Any], near_limit: list[float]
) -> None:
    """The third token is 1e-5 below the limit of the filter, so a second computation may keep it and draw it."""
    logits = torch.tensor(near_limit)
    shares = logits[:3].exp() / logits[:3].exp().sum()
    request = _drawing_in(shares, 2, **filters)
    assert near_tie.distance_of_uniform(logits, request, 0, [2]) == math.inf
    assert near_tie.distance_of_uniform(logits, request, 0, [2], error=1e-5) == 0
    assert near_tie.distance_of_uniform(logits, request, 0, [2], error=1e-6) == math.inf
    assert near_tie.distance_of_uniform(logits, request, 0, [3], error=1e-5) == math.inf, "far below the limit"


def test_top_p_may_end_a_token_earlier_or_later() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    request = _drawing_in(torch.tensor([0.5, 0.3, 0.2]), 2, top_p=0.8 - 1e-5)
    assert near_tie.distance_of_uniform(logits, request, 0, [2]) == math.inf
    assert near_tie.distance_of_uniform(logits, request, 0, [2], error=4e-5) == 0
    assert near_tie.distance_of_uniform(logits, request, 0, [2], error=1e-6) == math.inf


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
    assert near_tie.ties_possible(TOY, drawn, False) and near_tie.ties_possible(half, greedy, False)
    assert near_tie.ties_possible(half, [*greedy, *drawn], False)
    assert not near_tie.ties_possible(half, drawn, False) and not near_tie.ties_possible(TOY, drawn, True)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_logits_that_are_off_move_a_border_no_further_than_the_bound(share: float) -> None:
    error, temperature = 0.3, 0.7
    odds = share / (1 - share) * math.exp(2 * error / temperature)
    moved = odds / (1 + odds) - share
    assert 0 < moved <= near_tie.moved_borders(error, temperature) + 1e-12


def test_graphs_that_change_tokens_fail_the_job() -> None:
    rows = [{"level": "none", "differing": 0}, {"level": "step", "differing": 2}]
    expected = ["graph=step: 2 requests differ from those of graph=none"]
    assert without_a_run(GraphAblation).failures(rows) == expected
    assert without_a_run(GraphAblation, "bfloat16").failures(rows) == []


def test_a_drawn_distribution_that_is_wrong_fails_the_job() -> None:
    row = {"method": "m", "backend": "b", "identical": 1, "checked": 2, "distribution": {"p": 1e-9}}
    exact, low = without_a_run(Losslessness), without_a_run(Losslessness, "bfloat16")
    assert len(exact.failures([row])) == 2
    assert low.failures([row]) == ["m on b: the drawn tokens do not follow the target's distribution (p = 1e-09)"]
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
    rows = done.rows
    assert [row["level"] for row in rows] == ["none", "draft", "verify", "step"]
    assert rows[0]["note"] == "same tokens" and rows[0]["decode_tokens_per_s"] > 0
    assert rows[0]["launch_ms_per_step"] > 0 and rows[0]["device_ms_per_step"] > 0
    assert {row["note"] for row in rows[1:]} == {"needs a CUDA device"}
    assert "needs a CUDA device" in done.read("graph_ablation.md")


def test_graph_ablation_tells_an_algorithm_with_a_level_of_its_own() -> None:
    assert level_note("naive_eagle", "none", "step", 0) == "algo=naive_eagle ran with graph=step"
    assert level_note("naive_eagle", "step", "step", 0) == "same tokens"
    assert level_note("naive_eagle", "step", "step", 3) == "3 requests differ"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["task=compare", "+task.methods.dflash.blok_size=4"], ["task.methods.dflash", "'blok_size'", "block_size"]),
        (["task=compare", "task.methods.dflash.name=dflsh"], ["task.methods.dflash.name", "autoregressive", "ngram"]),
        (["task=compare", "+task.methods.dflash.block_size=0"], ["task.methods.dflash", "algo.block_size", "got 0"]),
        (["task=compare", "+task.methods.dflash.topk=many"], ["task.methods.dflash.topk", "'many'", "Integer"]),
        (["task=compare", "+task.methods.x={name:dflash,topk:2.5}"], ["task.methods.x.topk", "'2.5'", "Integer"]),
        (["runtime.num_pages=10000000000000"], ["runtime.num_pages: expected 1 to 2147483647 or null"]),
        (["backend=torch", "runtime.num_pages=9999", "runtime.page_size=999999999"], ["lower runtime.num_pages"]),
        (["task=compare", "+task.methods.mine.steps=4"], ["task.methods.mine", "name=ALGORITHM"]),
        (["task=compare", "task.only=[dflash,egle]"], ["task.only", "eagle_chain", "'egle'"]),
        (["task=compare", "task.data=[]"], ["task.data: expected at least one value, got none"]),
        (["task=compare", "task.data=[code,cod]", "task.only=[ngram]"], ["task.data", "arithmetic", "'cod'"]),
        (["task=compare", "task.limit=0"], ["task.limit: expected at least 1 or null, got 0"]),
        (["task=compare"], ["algo=eagle needs a drafter", "model.drafts.eagle"]),
        ([*COMPARE, "model.draft_path=x"], ["model.draft_path", "standalone, dflash", "model.drafts.standalone"]),
        (["task=throughput", "algo=eagle"], ["algo=eagle needs a drafter"]),
        (["task=throughput", "task.concurrency=[]"], ["task.concurrency: expected at least one value, got none"]),
        (
            ["task=throughput", "algo=ngram", "+task.methods={ngram:{name:suffix}}"],
            ["task.methods.ngram: the run's algorithm has this label"],
        ),
        (["task=throughput", "+task.methods={a:{name:ngram,nodes:3}}"], ["task.methods.a: algo=ngram has no setting"]),
        (["task=throughput", "task.concurrency=[2,0]"], ["task.concurrency: expected at least 1, got 0"]),
        (["task=throughput", "task.request=3"], ["task.request", "task.requests"]),
        ([*LOSSLESS, "task.backends=[fa5]"], ["task.backends", "fa4", "torch", "'fa5'"]),
        ([*LOSSLESS, "task.page_sizes=[0]"], ["task.page_sizes: expected at least 1, got 0"]),
        ([*LOSSLESS, "task.low_precision=int8"], ["task.low_precision", "bfloat16", "'int8'"]),
        ([*LOSSLESS, "task.temperature=0"], ["task.temperature: expected a finite number above 0"]),
        (["task=graph_ablation", "task.levels=[none,all]"], ["task.levels", "none, draft, verify, step", "'all'"]),
        (["task=graph_ablation", "task.levels=[]"], ["task.levels: expected at least one value, got none"]),
    ],
)
def test_refusals_name_what_there_is(run: Run, arguments: list[str], expected: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    for text in expected:
        assert text in done.stderr, done.stderr
    assert done.folder is None


def test_defaults_of_the_tasks_without_methods_are_sound() -> None:
    assert ThroughputTask().concurrency == [1, 2, 4, 8, 16, 32]
    assert GraphAblationTask().levels == ["none", "draft", "verify", "step"]
    for task in (CompareTask, LosslessnessTask):
        with pytest.raises(ValueError, match="task.methods is empty"):
            task()


def a_row(**changes: Any) -> dict[str, Any]:
    comparison = {"checked": 2, "identical": 2, "near_ties": 0, "first_difference": None}
    return {
        "data": "d",
        "method": "m",
        "graphs": {"level": "none"},
        "acceptance_at": [0.5],
        "lossless": comparison,
        **changes,
    }


def test_warnings_of_a_comparison() -> None:
    compare = without_a_run(Compare)
    assert compare.warnings([a_row(), a_row(acceptance_at=[0.05])]) == []
    (low,) = compare.warnings([a_row(acceptance_at=[0.049])])
    assert low.startswith("d, m: only 4.9% of first drafts were accepted")
    assert compare.warnings([a_row(acceptance_at=[0.049], drafts_with_model=False)]) == []  # n-grams may not repeat
    (unfair,) = compare.warnings([a_row(), a_row(graphs={"level": "step"})])
    assert unfair == "methods differ in runtime.graph (none, step): set it for all of them"
    comparison = {"checked": 2, "identical": 1, "near_ties": 0, "first_difference": None}
    assert compare.warnings([a_row(lossless=comparison)]) == []
    assert compare.failures([a_row(), a_row(lossless=comparison)]) == [
        "d, m: 1 of 2 requests differ from autoregressive decoding in float32"
    ]
    low = without_a_run(Compare, "bfloat16")
    assert (
        low.failures([a_row(lossless=comparison)]) == []
        and "1 of 2 requests differ" in low.warnings([a_row(lossless=comparison)])[0]
    )


def test_a_drafter_that_is_never_right_is_warned_about(compared: Done) -> None:
    for row in compared.rows:
        rate = row["acceptance_at"][0] if row["acceptance_at"] else None
        warned = f"{row['data']}, {row['method']}: only" in compared.stdout.replace("\n", " ")
        low = rate is not None and rate < figures.LOW_ACCEPTANCE
        assert warned == (low and row["drafts_with_model"])
    trained = [row for row in compared.rows if row["drafts_with_model"] and row["acceptance_at"]]
    assert any((row["acceptance_at"][0] or 0) < 0.05 for row in trained)


def test_axes_end_at_readable_numbers() -> None:
    for value, end in ((522.5, "600"), (1.0, "1"), (0.037, "0.04"), (81.0, "100")):
        svg = lines([("a", [(1.0, value), (15.0, value / 2)])], "t", ("x", "y"))
        marks = re.findall(r'text-anchor="end">([\d.,]+)<', svg)
        assert marks[-1] == end and len(marks) == 5
        assert re.findall(r'text-anchor="middle">(\d+)<', svg) == ["0", "2", "4", "6", "8", "10", "12", "14"]
    assert lines([], "t", ("x", "y")) == ""
    large = lines([("a", [(1_234.0, 13_078.0), (47_582.0, 2.0)])], "t", ("x", "y"))
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
    columns = [METHOD, number("between tokens ms", "ms"), number("decode speedup", "speedup", 2)]
    console = Console(file=io.StringIO(), width=46)
    console.print(console_table("t", columns, rows))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("autoregressive", "between", "tokens", "decode", "speedup", "1,234.5", "1.25"):
        assert word in shown, shown


def test_warm_up_prefills_every_size_that_is_compiled() -> None:
    from experiments.tasks.decoding import warm_up_sizes

    assert warm_up_sizes(False, 8) == [(1, 2)]
    assert warm_up_sizes(True, 6) == [(1, 2), (2, 2), (4, 2), (6, 2), (24, 32)]


def test_factors_of_the_cache_are_measured_and_used(run: Run) -> None:
    """`task=kv_scales` writes factors, and a run with them writes the same as autoregressive decoding with them."""
    measured = run("task=kv_scales", "task.margin=1.25")
    assert measured.folder is not None, measured.stderr
    factors = measured.folder / "kv_scales.safetensors"
    stored = load_file(factors)
    for layer, row in enumerate(measured.rows):
        assert row["largest_key"] * 1.25 / 448 == pytest.approx(row["k_scale"], rel=1e-6)
        assert float(stored["v_scale"][layer].max()) == pytest.approx(row["v_scale"], rel=1e-6)
    used = run("algo=dflash", "runtime.kv_dtype=fp8_e4m3", f"runtime.kv_scales={factors}")
    assert used.returncode == 0, used.stderr
    assert used.rows[-1]["lossless"]["identical"] == 2
    other = run("algo=dflash", "runtime.kv_dtype=fp8_e4m3", "runtime.kv_scales=none.safetensors")
    assert other.returncode == 2 and "found none at none.safetensors; task=kv_scales writes one" in other.stderr
    alone = run("algo=dflash", f"runtime.kv_scales={factors}")
    assert alone.returncode == 2 and "runtime.kv_scales is for runtime.kv_dtype=fp8_e4m3" in alone.stderr
