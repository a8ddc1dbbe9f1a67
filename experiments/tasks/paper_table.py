"""The table of a paper in one run: methods by prompt sets, greedy and sampled, and their throughput.

Cells are `speedup / tokens per step` over autoregressive decoding of the same requests. Every method serves the same
requests with the same seeds; at temperature 0 all seeds are one. Throughput is of the first prompt set.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from algorithms.engine.request import Request
from algorithms.frontend import SEED_STRIDE
from experiments.app.files import json_lines
from experiments.app.plan import Plan
from experiments.app.workload import Workload
from experiments.report.intervals import wilson
from experiments.report.metrics import MethodResult
from experiments.report.pivot import Estimate, Figure, Pivot, csv_text, html, latex, markdown, over_seeds, with_average
from experiments.report.tables import Metric, Result, columns, grouped
from experiments.report.templates import section
from experiments.tasks import resumed
from experiments.tasks.compare import Compare
from experiments.tasks.decoding import AUTOREGRESSIVE
from experiments.tasks.throughput import at_concurrency

SPEEDUP, TOKENS = Figure("speedup", unit="×"), Figure("tokens/step")
ACCEPTANCE, RATE = Figure("acceptance", 0, "%"), Figure("tokens/s", 0)
POSITIONS = 8  # draft positions that the tables of acceptance show


class PaperResult(MethodResult):
    """One method on one prompt set at one temperature, with one seed, at one concurrency."""

    temperature: Annotated[float, Metric("Sampling temperature.", "T", digits=1)]
    seed: Annotated[int, Metric("Seed of the run's requests.", "seed", digits=0)]
    concurrency: Annotated[int | None, Metric("Requests at a time, of a throughput.", "concurrency", digits=0)]


class PaperTable(Compare):
    """`task=compare` over temperatures, seeds and concurrencies."""

    keeps_parts = False  # a cell needs the times of all requests
    shares_engines = True
    columns = columns(
        PaperResult, "temperature", "seed", "concurrency", "data", "method", "speedup_decode", "tokens_per_step",
        "acceptance_at", "wall_tokens_per_s", "lossless", "compiled", wide=("seed", "compiled"),
    )  # fmt: skip

    def measure(self) -> Sequence[Result]:
        task = self.plan.config.task
        results: list[Result] = []
        for temperature in task.temperatures:
            seeds = task.seeds if temperature > 0 else task.seeds[:1]
            for seed in seeds:
                results += self._sets(temperature, seed, repeats=1 if len(seeds) > 1 else None)
        for concurrency in task.concurrency:
            results += self._throughput(concurrency)
        return results

    def _compared(
        self,
        workload: Workload,
        asked: Sequence[Request],
        note: str,
        plan: Plan | None = None,
        repeats: int | None = None,
    ) -> list[MethodResult]:
        """Baseline and methods, as `decode_methods`. Where an interrupted run has some of them, all begin again."""
        if self.folder.resumed:
            labels = [f"{label}{note}" for label in (AUTOREGRESSIVE, *self.plan.methods)]
            resumed.drop_unless_together(self.folder, workload.name, labels)
        return [result for result, _ in self.decode_methods(workload, asked, note, plan, repeats=repeats)]

    def _sets(self, temperature: float, seed: int, repeats: int | None) -> Iterator[PaperResult]:
        for workload in self.plan.workloads:
            asked = [
                request.with_sampling(temperature=temperature, seed=request.sampling.seed + seed * SEED_STRIDE)
                for request in workload.requests
            ]
            note = f" on {workload.name}, T={temperature:g}, seed {seed}"
            for result in self._compared(workload, asked, note, repeats=repeats):
                yield {**result, "temperature": temperature, "seed": seed, "concurrency": None}

    def _throughput(self, concurrency: int) -> Iterator[PaperResult]:
        task, workload = self.plan.config.task, self.plan.workloads[0]
        temperature, seed = task.temperatures[0], task.seeds[0]
        plan, asked = at_concurrency(self.plan, workload, concurrency)
        asked = [request.with_sampling(temperature=temperature) for request in asked]
        note = f" on {workload.name} ×{concurrency}"
        for result in self._compared(workload, asked, note, plan):
            yield {**result, "temperature": temperature, "seed": seed, "concurrency": concurrency}

    def label(self, result: Result) -> str:
        at = f" ×{result['concurrency']}" if result["concurrency"] else ""
        return f"{super().label(result)}, T={result['temperature']:g}{at}"

    def best(self, results: Sequence[Result]) -> Result:
        return super().best([result for result in results if result["concurrency"] is None])

    def files(self, results: Sequence[Result], conditions: Mapping[str, Any]) -> dict[str, Any]:
        tables = paper_tables(results)
        model = self.plan.model_label
        captions = {
            "table": f"Speedup over autoregressive decoding and tokens per step, {model}.",
            "acceptance": f"Share of drafts that are accepted if all before them are, by position, {model}.",
            "throughput": f"Output tokens per second by number of concurrent requests, {model}.",
        }
        texts = {}
        for name, pivots in tables.items():
            texts[f"{name}.md"], texts[f"{name}.csv"] = markdown(pivots), csv_text(pivots)
            texts[f"{name}.tex"] = latex(pivots, captions[name], f"tab:{name}")
        lines = json_lines({**conditions, **result} for result in results)
        return {**texts, **figures(tables), f"{self.plan.config.task.name}.jsonl": lines}

    def sections(self, results: Sequence[Result]) -> list[str]:
        tables = paper_tables(results)
        return [section(name.capitalize(), html(pivots)) for name, pivots in tables.items()]

    def show(self, results: Sequence[Result]) -> None:
        self.console.print(markdown(paper_tables(results)["table"]), markup=False, highlight=False, soft_wrap=True)


def paper_tables(results: Sequence[Result]) -> dict[str, list[Pivot]]:
    """Blocks of the tables by name: `table`, `acceptance`, and `throughput` where it was measured."""
    alone = [result for result in results if result["concurrency"] is None]
    served = [result for result in results if result["concurrency"] is not None]
    tables: dict[str, list[Pivot]] = {"table": [], "acceptance": []}
    for (temperature,), here in grouped(alone, ["temperature"]).items():
        cells = {
            key: [_estimate(group, "speedup_decode"), _estimate(group, "tokens_per_step")]
            for key, group in grouped(here, ["method", "data"]).items()
            if all(each["speedup_decode"] is not None and each["tokens_per_step"] is not None for each in group)
        }
        title = f"Temperature {temperature:g}"
        tables["table"].append(with_average(Pivot(title, (SPEEDUP, TOKENS), cells)))
        tables["acceptance"].append(Pivot(title, (ACCEPTANCE,), _by_position(here)))
    if served:
        groups = grouped([result for result in served if result["wall_tokens_per_s"]], ["method", "concurrency"])
        rates = {(method, str(at)): [_estimate(each, "wall_tokens_per_s")] for (method, at), each in groups.items()}
        tables["throughput"] = [Pivot("Tokens/s by concurrent requests", (RATE,), rates)]
    return tables


def figures(tables: Mapping[str, Sequence[Pivot]]) -> dict[str, bytes]:
    """`acceptance.pdf` and `throughput.pdf`; none where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure as Drawing
    except ImportError:
        return {}
    drawn = {}
    for name, axes in {"acceptance": "draft position", "throughput": "concurrent requests"}.items():
        if not (pivots := [pivot for pivot in tables.get(name, ()) if pivot.cells]):
            continue
        drawing = Drawing(figsize=(4.5 * len(pivots), 3.2), layout="constrained")
        for place, pivot in enumerate(pivots):
            plot = drawing.add_subplot(1, len(pivots), place + 1, title=pivot.title, xlabel=axes)
            plot.set_ylabel(pivot.figures[0].name)
            for row in pivot.rows:
                points = {column: cell[0] for (name, column), cell in pivot.cells.items() if name == row}
                values, halves = zip(*((each.value, each.half or 0.0) for each in points.values()), strict=True)
                plot.errorbar(list(points), values, halves, label=row, capsize=2)
            plot.legend(fontsize=7)
        content = io.BytesIO()
        drawing.savefig(content, format="pdf", metadata={"CreationDate": None})
        drawn[f"{name}.pdf"] = content.getvalue()
    return drawn


def _by_position(results: Sequence[Result]) -> dict[tuple[str, str], list[Estimate]]:
    """Acceptance in percent at each position, over all prompt sets and seeds together."""
    cells = {}
    for (method,), group in grouped(results, ["method"]).items():
        counts = [result["acceptance"] for result in group]
        for place in range(POSITIONS):
            accepted, rejected = (
                sum(each[kind][place] for each in counts if place < len(each[kind]))
                for kind in ("accepted", "rejected")
            )
            if (ends := wilson(accepted, accepted + rejected)) is not None:
                share = accepted / (accepted + rejected)
                cells[method, str(place + 1)] = [Estimate(100 * share, 50 * (ends[1] - ends[0]))]
    return cells


def _estimate(results: Sequence[Result], key: str) -> Estimate:
    """The figure `key` over seeds. Of the baseline, speedup and tokens per step are 1 by definition."""
    if results[0]["algo"] == AUTOREGRESSIVE and key != "wall_tokens_per_s":
        return Estimate(1.0)
    found = [(result[key], result[f"{key}_interval"]) for result in results]
    return over_seeds([Estimate(value, None if ends is None else ends[1] - value) for value, ends in found])
