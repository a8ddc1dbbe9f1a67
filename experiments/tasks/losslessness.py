"""Does each method, on each backend, write exactly what the target alone writes; and what is left where it cannot?

identity    in the run's dtype (float32 proves exactness): every request, page size and batch size, greedy and sampled,
            token for token against autoregressive decoding of the same backend
invariance  the baseline itself: the same tokens whatever the batch size, and whatever the place in the batch
low         in bfloat16 rounding depends on the shape of a batch: requests that differ, the first position that does,
            and the gap between the two tokens' logits there; a fault would show as a large gap
law         rules that draw their drafts promise the target's law, not its tokens: the first two tokens of many seeds
            against the exact joint law (Pearson's chi-square), hot enough that there is a choice
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from algorithms.runtime.request import Request
from algorithms.runtime.sampling_params import SamplingParams
from experiments.app.distributed import load_shared, output_folder
from experiments.app.errors import UserError
from experiments.app.plan import Setup, check_combination, check_drafters, prepare, resolve_hardware
from experiments.app.provenance import run_conditions
from experiments.app.schema import GenerateConfig
from experiments.report import metrics as figures
from experiments.report.console import figure, plain_console
from experiments.report.run_folder import CONFIG, SUMMARY, open_run_folder, to_json
from experiments.report.tables import Column, console_table, write_tables
from experiments.report.tracking import track_rows
from experiments.tasks.decoding import Decoded, baseline_config, decode
from experiments.tasks.schemas import chosen_methods

if TYPE_CHECKING:
    import torch

    from algorithms.runtime.request import Completion

Row = dict[str, Any]
LAW_TOP_K = 8
"""The law is checked among this many tokens, so that its cells are few and well filled."""
LAW_LEVEL = 1e-6
LAW_CELLS, LAW_DRAWS_PER_CELL = 8, 5
SEED_STEP = 7919
MIXED = {"prefill": "torch", "decode": "fa4", "verify": "prefill"}


def run(config: GenerateConfig, composed: DictConfig) -> float:
    """Check everything; returns the share of identical requests, and fails the job when it is below 1 in float32."""
    console = plain_console()
    task = config.task
    methods = chosen_methods(task)
    check_drafters(config, methods.values())
    sides = [replace(config, backend=backend_config(config, name)) for name in task.backends]
    hardware = resolve_hardware(config.runtime)
    for side in sides:
        check_combination(side, hardware)
    setup = prepare(config)
    with open_run_folder(output_folder(Path(HydraConfig.get().runtime.output_dir))) as folder:
        folder.write(CONFIG, OmegaConf.to_yaml(composed, resolve=True))
        rows = [row for side in sides for row in check_backend(side, setup, methods, console)]
        conditions = run_conditions(config, setup.hardware)
        write_tables(folder, "losslessness", COLUMNS, rows, conditions)
        summary = {"name": config.name, "task": "losslessness", "rows": rows, **conditions}
        folder.write(SUMMARY, to_json(summary) + "\n")
    console.print(console_table(f"{conditions['model']} · {conditions['dtype']}", COLUMNS, rows))
    for warning in track_rows(config.tracker, folder.path, config.name, rows):
        console.print(f"[bold yellow]warning:[/] {warning}", highlight=False)
    console.print(f"results: {folder.path}", highlight=False, soft_wrap=True)
    failures = found_failures(rows, conditions["dtype"])
    if failures:
        raise UserError("\n".join(["not lossless", *failures]))
    checked = sum(row["checked"] for row in rows)
    return sum(row["identical"] for row in rows) / checked if checked else 1.0


def found_failures(rows: Sequence[Row], dtype: str) -> list[str]:
    """What must not be: a difference in float32, or a law that chance would miss once in a million."""
    failures = []
    for row in rows:
        name = f"{row['method']} on {row['backend']}"
        if dtype == "float32" and row["identical"] < row["checked"]:
            failures.append(f"{name}: {row['checked'] - row['identical']} of {row['checked']} requests differ")
        if row["law"] and row["law"]["p"] < LAW_LEVEL:
            failures.append(f"{name}: the drawn tokens do not follow the target's law (p = {row['law']['p']:.2g})")
    return failures


def check_backend(config: GenerateConfig, setup: Setup, methods: Mapping[str, Any], console: Console) -> list[Row]:
    """One row a method, the baseline first."""
    checks = _Checks(config, setup, console)
    return [checks.baseline_row(), *(checks.method_row(label, algo) for label, algo in methods.items())]


def backend_config(config: GenerateConfig, name: str) -> Any:
    """The backend by its name; the run's own settings where it is the run's.

    Otherwise `hybrid` prefills and verifies with `torch` and decodes and drafts with `fa4`, so that it is a pair.
    """
    from algorithms.runtime.backends import backends

    found = backends()
    if name not in found:
        raise UserError(f"task.backends must be among {', '.join(found)}, got {name!r}")
    if name == config.backend.name:
        return config.backend
    schema: Any = found[name]
    return schema.Config(**(MIXED if name == "hybrid" else {}))


class _Checks:
    """All checks on one backend; reference decodings are kept, as every method is held against the same."""

    def __init__(self, config: GenerateConfig, setup: Setup, console: Console) -> None:
        self._config, self._setup, self._console, self._task = config, setup, console, config.task
        self._written: dict[tuple[int, int, int], Decoded] = {}
        self._low: Setup | None = None
        self._low_plain: Sequence[Completion] | None = None

    def baseline_row(self) -> Row:
        """Batch-size and batch-position invariance of autoregressive decoding."""
        identical = checked = tokens = 0
        alone = self._plain(0, self._task.page_sizes[0], self._task.batches[0]).generation.completions
        by_id = {c.request_id: c.token_ids for c in alone}
        orders = [(order, batch) for batch in self._task.batches for order in (1, -1)]
        for order, batch in orders:
            asked = self._requests(0)[::order]
            for completion in self._decode(
                baseline_config(), asked, self._task.page_sizes[-1], batch
            ).generation.completions:
                identical += completion.token_ids == by_id[completion.request_id]
                checked, tokens = checked + 1, tokens + len(completion.token_ids)
        return self._row("autoregressive", "autoregressive", "target_only", checked, identical, tokens, None)

    def method_row(self, label: str, algo: Any) -> Row:
        identical = checked = tokens = turn = 0
        first: dict[str, Any] | None = None
        rule = "target_only"
        settings = [(page, batch) for page in self._task.page_sizes for batch in self._task.batches]
        # Greedy text never changes: where draws are not compared token for token, more turns would repeat the first.
        while turn < len(settings) or (tokens < self._task.min_tokens and rule == "target_only"):
            page, batch = settings[turn % len(settings)]
            asked = self._requests(turn)
            ours = self._decode(algo, asked, page, batch)
            rule = ours.rule
            exact = [i for i, r in enumerate(asked) if rule == "target_only" or r.sampling.temperature == 0]
            plain = self._plain(turn, page, batch).generation.completions
            pairs = [(ours.generation.completions[i], plain[i]) for i in exact]
            proof = figures.lossless([a for a, _ in pairs], [b for _, b in pairs])
            identical, checked = identical + proof["identical"], checked + proof["checked"]
            first = first or (proof["first_difference"] and {**proof["first_difference"], "turn": turn})
            tokens += sum(len(b.token_ids) for _, b in pairs)
            turn += 1
        return self._row(label, algo.name, rule, checked, identical, tokens, first, algo)

    def _row(
        self, label: str, algo_name: str, rule: str, checked: int, identical: int, tokens: int,
        first: Mapping[str, Any] | None, algo: Any = None,
    ) -> Row:  # fmt: skip
        low = self._low_precision(algo) if algo is not None and self._task.low_precision else None
        law = self._law(algo) if rule != "target_only" and self._task.law_draws else None
        return {
            "backend": self._config.backend.name,
            "method": label,
            "algo": algo_name,
            "rule": rule,
            "checked": checked,
            "identical": identical,
            "tokens": tokens,
            "first_difference": first,
            "low_precision": low,
            "law": law,
        }

    def _requests(self, turn: int) -> list[Request]:
        """Greedy and sampled requests side by side, changing places from turn to turn; sampled ones with other seeds
        each time. Behind the first turns over all sizes everything is sampled."""
        settings = len(self._task.page_sizes) * len(self._task.batches)
        return [
            r.with_sampling(
                temperature=self._task.temperature if (r.id + turn) % 2 or turn >= settings else 0.0,
                seed=r.sampling.seed + SEED_STEP * turn,
            )
            for r in self._setup.requests
        ]

    def _decode(
        self, algo: Any, asked: Sequence[Request], page_size: int, batch: int, setup: Setup | None = None
    ) -> Decoded:
        runtime = replace(self._config.runtime, page_size=page_size, max_batch=batch, num_pages=None)
        config = replace(self._config, runtime=runtime)
        label = f"{self._config.backend.name} {algo.name} page {page_size} batch {batch}"
        return decode(config, setup or self._setup, algo, self._console, asked, label)

    def _plain(self, turn: int, page_size: int, batch: int) -> Decoded:
        key = (turn, page_size, batch)
        if key not in self._written:
            self._written[key] = self._decode(baseline_config(), self._requests(turn), page_size, batch)
        return self._written[key]

    def _low_precision(self, algo: Any) -> Row | None:
        """Greedy decoding in the low precision: how many requests depart, and how close the logits were where the first
        of them did; None where this machine computes that precision wrongly or not at all."""
        if self._setup.hardware.label == "triton-interpreter":
            return None
        low = self._low_setup()
        asked = [r.with_sampling(temperature=0.0) for r in self._setup.requests]
        page, batch = self._task.page_sizes[-1], self._task.batches[-1]
        ours = self._decode(algo, asked, page, batch, low).generation.completions
        if self._low_plain is None:
            self._low_plain = self._decode(baseline_config(), asked, page, batch, low).generation.completions
        plain = self._low_plain
        proof = figures.lossless(ours, plain)
        gap = None
        if proof["first_difference"]:
            gap = logit_gap(low, asked, plain, proof["first_difference"])
        return {
            "checked": proof["checked"],
            "identical": proof["identical"],
            "first": proof["first_difference"],
            "gap": gap,
        }

    def _low_setup(self) -> Setup:
        """The run's target in the low precision."""
        if self._low is None:
            setup = self._setup
            hardware = replace(setup.hardware, dtype=self._task.low_precision)
            target = load_shared(str(setup.target.path), hardware, self._config.runtime.tensor_parallel)
            self._low = replace(setup, hardware=hardware, target=target)
        return self._low

    def _law(self, algo: Any) -> Row:
        """First two tokens of many seeds, with no parameter but temperature and top-k."""
        request, draws = min(self._setup.requests, key=lambda r: len(r.prompt_ids)), self._task.law_draws
        temperature, law = warm_law(self._setup, request, self._task.temperature, draws)
        bare = Request(
            id=0,
            prompt_ids=request.prompt_ids,
            sampling=SamplingParams(max_new_tokens=2, temperature=temperature, top_k=LAW_TOP_K),
            eos_token_ids=request.eos_token_ids,
        )
        asked = [replace(bare.with_sampling(seed=i), id=i) for i in range(draws)]
        batch = max(self._task.batches + [32])
        drawn = self._decode(algo, asked, self._task.page_sizes[-1], batch).generation.completions
        counts = Counter(tuple(c.token_ids) for c in drawn)
        # A text may end with its first token.
        ended: dict[tuple[int, ...], float] = {}
        for (a, b), p in law.items():
            key = (a,) if bare.ends_at(a) else (a, b)
            ended[key] = ended.get(key, 0.0) + p
        return {
            "p": chi_square_p(counts, ended),
            "cells": filled_cells(ended.values(), draws),
            "draws": draws,
            "temperature": temperature,
        }


def logit_gap(setup: Setup, asked: Sequence[Request], plain: Sequence[Any], first: Mapping[str, Any]) -> float | None:
    """By how much the target prefers one token over the other where two texts part, in the target's own dtype."""
    at = [completion.request_id for completion in plain].index(first["request"])
    if first["token"] is None or first["baseline_token"] is None:
        return None
    text = [*asked[at].prompt_ids, *plain[at].token_ids[: first["position"]]]
    logits = next_logits(setup, text)
    return float((logits[first["baseline_token"]] - logits[first["token"]]).abs())


def next_logits(setup: Setup, text: Sequence[int]) -> torch.Tensor:
    """[V] float32 logits behind `text`, by a forward without any cache."""
    import torch

    from algorithms.runtime.models.dense_mixer import DenseMixer

    model, device = setup.target.model, setup.hardware.device
    with torch.inference_mode():
        tokens = torch.tensor([list(text)], device=device)
        hidden, _ = model(tokens, DenseMixer(setup.target.config, len(text), device))
        return model.logits(hidden[0, -1]).float()


def two_token_law(setup: Setup, request: Request, temperature: float) -> dict[tuple[int, int], float]:
    """Probability of each pair of first tokens under temperature and top-k."""

    def following(text: Sequence[int]) -> list[tuple[int, float]]:
        top = (next_logits(setup, text) / temperature).topk(LAW_TOP_K)
        return list(zip(top.indices.tolist(), top.values.double().softmax(0).tolist(), strict=True))

    prompt = request.prompt_ids
    return {(a, b): p * q for a, p in following(prompt) for b, q in following([*prompt, a])}


def filled_cells(chances: Iterable[float], draws: int) -> int:
    """Outcomes that are expected often enough to be tested by themselves."""
    return sum(p * draws >= LAW_DRAWS_PER_CELL for p in chances)


def warm_law(
    setup: Setup, request: Request, temperature: float, draws: int
) -> tuple[float, dict[tuple[int, int], float]]:
    """The law at `temperature`, doubled until some pairs are drawn now and then: a law of one outcome tests nothing."""
    law = two_token_law(setup, request, temperature)
    for _ in range(8):
        if filled_cells(law.values(), draws) >= min(LAW_CELLS, draws // (4 * LAW_DRAWS_PER_CELL)):
            break
        temperature *= 2
        law = two_token_law(setup, request, temperature)
    return temperature, law


def chi_square_p(counts: Mapping[tuple[int, ...], int], law: Mapping[tuple[int, ...], float]) -> float:
    """Pearson's test, cells that expect fewer than five draws pooled; 0 for a draw the law forbids.

    Where that pool expects less than one draw it is no cell: a surplus in it is judged by Poisson's tail instead, and
    the smaller of the two chances counts twice (Bonferroni)."""
    if any(pair not in law for pair in counts):
        return 0.0
    draws = sum(counts.values())
    cells = [(p * draws, counts.get(pair, 0)) for pair, p in law.items()]
    large, small = ([c for c in cells if (c[0] >= LAW_DRAWS_PER_CELL) == often] for often in (True, False))
    if not small:
        return pearson_p(large)
    expected, observed = sum(e for e, _ in small), sum(o for _, o in small)
    if expected >= 1:
        return pearson_p([*large, (expected, observed)])
    return min(1.0, 2 * min(pearson_p(large), at_least_p(observed, expected)))


def pearson_p(cells: Sequence[tuple[float, int]]) -> float:
    """Chance of cells, as pairs of expected and observed draws, that fit no better; 1 for fewer than two."""
    import torch

    if len(cells) < 2:
        return 1.0
    half_statistic, half_freedom = (
        torch.tensor(value / 2, dtype=torch.float64)
        for value in (sum((o - e) ** 2 / e for e, o in cells), float(len(cells) - 1))
    )
    return float(torch.special.gammaincc(half_freedom, half_statistic))


def at_least_p(observed: int, expected: float) -> float:
    """Chance that a Poisson variable of mean `expected` reaches `observed`."""
    import torch

    if observed == 0:
        return 1.0
    reached, mean = (torch.tensor(value, dtype=torch.float64) for value in (float(observed), expected))
    return float(torch.special.gammainc(reached, mean))


def _low(row: Mapping[str, Any]) -> str:
    low = row["low_precision"]
    return f"{low['identical']}/{low['checked']}" if low else "–"


def _first_flip(row: Mapping[str, Any]) -> str:
    low = row["low_precision"]
    if not low or not low["first"]:
        return "–"
    return f"position {low['first']['position']}, gap {figure(low['gap'], 4)}"


def _law(row: Mapping[str, Any]) -> str:
    return f"{row['law']['p']:.2g} of {row['law']['cells']} cells" if row["law"] else "–"


COLUMNS = (
    Column("backend", lambda row: row["backend"], numeric=False),
    Column("method", lambda row: row["method"], numeric=False),
    Column("rule", lambda row: row["rule"], numeric=False),
    Column("identical", lambda row: f"{row['identical']}/{row['checked']}"),
    Column("tokens", lambda row: f"{row['tokens']:,}"),
    Column("low precision", _low),
    Column("first flip", _first_flip),
    Column("law p", _law),
)
