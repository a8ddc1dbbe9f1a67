"""The page of a run: one HTML file. Functions of this module give HTML for it."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from experiments.report.checks import NOT_A_GPU
from experiments.report.metrics import MethodResult, lossless_tone
from experiments.report.tables import DASH, Column, Result, at, counted, declared, figure, html_table, words
from experiments.report.templates import PHASE_COLOURS, Series, chart, html, section

Card = tuple[str, str, str | None]  # figure, caption and tone (`good`, `bad` or None)


def render(
    title: str,
    columns: Sequence[Column],
    results: Sequence[Result],
    conditions: Mapping[str, Any],
    config: Mapping[str, Any],
    notes: Sequence[str] = (),
    headline: Sequence[Card] = (),
    sections: Sequence[str] = (),
    failures: Sequence[str] = (),
    files: Sequence[str] = (),
) -> str:
    """The page of any task: headline figures, failures and notes, the table, the task's own sections, settings,
    provenance, links to `files` in its folder, and what the figures mean. `sections` are HTML. Everything else is text
    and is escaped."""
    clock = [NOT_A_GPU[conditions["impl"]]] if conditions["device"] == "cpu" else []
    facts = {"date": conditions.get("date"), "command": conditions.get("command")}
    facts |= {"revision": conditions["revision"] or "not a repository", "machine": conditions["machine"]}
    settings = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, default_flow_style=None, width=10_000)
    parts = [
        html("lead", " · ".join(filter(None, [conditions.get("date"), conditions.get("command")]))),
        html("cards", headline),
        *(html("note", f"not lossless: {text}", "bad") for text in failures),
        *(html("note", text) for text in [*clock, *notes]),
        section("Results", html_table(columns, results)),
        *sections,
        section("Settings that were used", html("text", settings)),
        section("Provenance", html("facts", facts | conditions["versions"])),
        section("Files", html("links", {name: name for name in files})),
        section("What the figures mean", _glossary(columns, results)),
    ]
    return html("page", title, _lead(conditions), parts)


def _glossary(columns: Sequence[Column], results: Sequence[Result]) -> str:
    """The meaning of each heading, and, folded, of each other key of `summary.json` that the results have."""
    shown = {column.title: column.help for column in columns if column.help}
    found = {path: column for path, column in declared(MethodResult).items() if any(at(r, path) for r in results)}
    keys = {f"{path} ({column.title})" if column.title else path: column.help for path, column in found.items()}
    return html("facts", shown) + html("folded", "Keys of summary.json", html("facts", keys))


def _lead(conditions: Mapping[str, Any]) -> str:
    sampling = conditions["sampling"]
    temperature, batch, page_size = sampling["temperature"], conditions["max_batch"], conditions["page_size"]
    facts = [f"up to {sampling['max_new_tokens']} tokens per request"]
    if temperature is not None:
        facts.append("greedy" if temperature == 0 else f"temperature {temperature:g}, seed {sampling['seed']}")
    facts += [f"batch {batch}"] if batch is not None else []
    facts += [f"page size {page_size}"] if page_size is not None else []
    facts += [f"{conditions['device']} {conditions['dtype']}, {conditions['impl']}", conditions["machine"]]
    return "; ".join(facts)


def step_times(results: Sequence[Result]) -> str:
    """Milliseconds per step by phase, one stacked bar per method."""
    times = {
        result["method"]: {phase: ms / max(1, result["num_steps"]) for phase, ms in result["phase_times_ms"].items()}
        for result in results
    }
    longest = max((sum(parts.values()) for parts in times.values()), default=0.0) or 1.0
    return html("phases", times, longest, PHASE_COLOURS)


def acceptance_lines(results: Sequence[Result]) -> str:
    """Acceptance over draft positions, one line per method that drafts."""
    rates = {result["method"]: enumerate(result["acceptance_at"], 1) for result in results}
    series = [Series(method, [(float(i), y) for i, y in points if y is not None]) for method, points in rates.items()]
    return chart(series, "acceptance by draft position", ("draft position", "acceptance"), top=1.0)


def acceptance_bars(result: Result) -> str:
    """Acceptance of each draft position, and how many steps accepted how many drafts."""
    if not result["acceptance_at"]:
        return ""
    rates = [
        (str(i + 1), rate or 0.0, DASH if rate is None else f"{100 * rate:,.0f}%{position_counts(result, i)}")
        for i, rate in enumerate(result["acceptance_at"])
    ]
    histogram = result["num_accepted_histogram"]
    steps, most = sum(histogram) or 1, max(histogram) or 1
    counts = [(str(k), count / most, f"{count} ({count / steps:.0%})") for k, count in enumerate(histogram)]
    left, right = html("bars", "Acceptance by draft position", rates), html("bars", "Accepted drafts per step", counts)
    return html("pair", left, right)


def position_counts(result: Result, position: int) -> str:
    """`  412/434, 3 without` : accepted over drafted at a position, and steps that reached it without a draft."""
    counts = result.get("acceptance")
    if not counts:
        return ""
    accepted, none = counts["accepted"][position], counts["no_draft"][position]
    shown = f" {accepted}/{accepted + counts['rejected'][position]}"
    return shown + (f", {none} without" if none else "")


def request_details(request: Mapping[str, Any]) -> str:
    """One request that unfolds: its figures, prompt, output and accepted drafts."""
    verdict, expected = request["verdict"], f"expected {request['answer']}"
    facts = [counted(len(request["token_ids"]), "token"), counted(len(request["accepted_counts"]), "step")]
    facts += [words(request["finish_reason"]), f"{request['total_ms']:,.0f} ms"]
    is_right = {"right": True, "wrong": False}.get(verdict)
    marks = [
        (request["identical"], "identical", "differs"),
        (is_right, "right", f"wrong, {expected}"),
        (request.get("parsed"), "parsed", "not parsed"),
    ]
    shown = [("good", good) if yes else ("bad", bad) for yes, good, bad in marks if yes is not None]
    shown += [("", f"truncated by the length limit, {expected}")] if verdict == "cut" else []
    return html("request", request, facts, shown)


def method_cards(result: Result) -> list[Card]:
    """The headline figures of one method on one prompt set."""
    comparison, accuracy = result["lossless"], result["accuracy"]
    found: list[Card] = [
        (figure(result["tokens_per_step"], 2), "tokens/step", None),
        (figure(at(result, "speedup_decode"), 2, "×"), "decode speedup over autoregressive", None),
        (figure(result["decode_tokens_per_s"]), "tokens/s of the decode clock", None),
    ]
    if comparison["checked"]:
        identical = f"{comparison['identical']}/{comparison['checked']}"
        found.append((identical, "identical to autoregressive", lossless_tone(result)))
    if accuracy is not None:
        found.append((f"{accuracy:.0%}", f"right answers, {result['data']}", None))
    return found
