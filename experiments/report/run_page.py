"""One HTML file a run: the figures, where drafts are accepted, where time goes, every text.

No script and nothing from the network, so the file can be kept, mailed and opened anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from experiments.report.console import NOT_A_GPU, figure
from experiments.report.metrics import warnings
from experiments.report.page import configuration, note, page, provenance_table, section
from experiments.report.plots import bars, phase_legend, stacked


def render(summary: Mapping[str, Any], requests: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> str:
    """The whole page. Every text of a model or a user is escaped."""
    title = f"{summary['algo']} · {summary['backend']} · {summary['model']} · {summary['task']['name']}"
    parts = [
        _cards(summary),
        *map(note, _notes(summary)),
        section("Methods", f"<div class=scroll>{_method_table(summary)}</div>"),
        _acceptance(summary),
        section("Time of a step", _ledgers(summary)),
        section("Requests", "".join(_request(request) for request in requests)),
        configuration(config),
        provenance_table(provenance(summary)),
    ]
    return page(title, _conditions(summary), parts)


def _conditions(summary: Mapping[str, Any]) -> str:
    sampling = summary["sampling"]
    how = (
        "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']:g}, seed {summary['seed']}"
    )
    facts = [
        f"{summary['num_requests']} requests, {summary['output_tokens']} tokens, {how}",
        f"batch {summary['max_batch']}, page size {summary['page_size']}",
        f"{summary['device']} {summary['dtype']}, {summary['impl']}",
        summary["machine"],
    ]
    return "; ".join(facts)


def _notes(summary: Mapping[str, Any]) -> list[str]:
    clock = [NOT_A_GPU[summary["impl"]]] if summary["device"] == "cpu" else []
    return clock + warnings(dict(summary))


def _cards(summary: Mapping[str, Any]) -> str:
    proof, accuracy = summary["lossless"], summary["task"]["accuracy"]
    cards = [
        (figure(summary["tokens_per_step"], 2), "tokens per step", ""),
        (figure(summary["speedup"], 2, "×"), "decoding speed over autoregressive", ""),
        (figure(summary["decode_tokens_per_s"]), "tokens/s while decoding", ""),
    ]
    if proof["checked"]:
        tone = "good" if proof["identical"] == proof["checked"] else "bad"
        cards.append((f"{proof['identical']}/{proof['checked']}", "identical to autoregressive", tone))
    if accuracy is not None:
        cards.append((f"{accuracy:.0%}", f"right answers, {summary['task']['name']}", ""))
    return (
        "<div class=cards>"
        + "".join(
            f'<div class=card><b class="{tone}">{escape(value)}</b><span>{escape(label)}</span></div>'
            for value, label, tone in cards
        )
        + "</div>"
    )


def _method_table(summary: Mapping[str, Any]) -> str:
    header = (
        "method",
        "tokens/s",
        "end to end",
        "ms/step (20–80 %)",
        "tokens/step",
        "first token p50 / p90",
        "speedup",
        "accuracy",
    )
    rows = []
    if baseline := summary["baseline"]:
        rows.append(_method_row("autoregressive", baseline, 1.0, baseline["accuracy"]))
    ours = f"{summary['algo']} · {summary['backend']}"
    rows.append(_method_row(ours, summary, summary["speedup"], summary["task"]["accuracy"]))
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    return f"<table><tr>{cells}</tr>{''.join(rows)}</table>"


def _method_row(name: str, method: Mapping[str, Any], speedup: float | None, accuracy: float | None) -> str:
    step, first = method["step_ms"], method["ttft_ms"]
    cells = [
        name,
        figure(method["decode_tokens_per_s"]),
        figure(method["end_to_end_tokens_per_s"]),
        f"{figure(step['median'], 2)} ({figure(step['p20'], 2)}–{figure(step['p80'], 2)})",
        figure(method["tokens_per_step"], 2),
        f"{figure(first['p50'])} / {figure(first['p90'])} ms",
        figure(speedup, 2, "×"),
        "–" if accuracy is None else f"{accuracy:.0%}",
    ]
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _acceptance(summary: Mapping[str, Any]) -> str:
    if not summary["acceptance_at"]:
        return ""
    rates = [
        (str(i + 1), rate or 0.0, figure(rate and 100 * rate, 0, " %"))
        for i, rate in enumerate(summary["acceptance_at"])
    ]
    histogram = summary["num_accepted_histogram"]
    steps, most = sum(histogram) or 1, max(histogram) or 1
    counts = [(str(k), count / most, f"{count} ({count / steps:.0%})") for k, count in enumerate(histogram)]
    left = "<h2>Acceptance by draft position</h2>" + bars(rates, "share of steps that reached the position")
    right = "<h2>Accepted drafts of a step</h2>" + bars(counts, "steps that accepted exactly so many drafts")
    return f"<div class=pair><section class=card>{left}</section><section class=card>{right}</section></div>"


def _ledgers(summary: Mapping[str, Any]) -> str:
    methods = [(f"{summary['algo']} · {summary['backend']}", summary)]
    if summary["baseline"]:
        methods.insert(0, ("autoregressive", summary["baseline"]))
    rows = [
        (name, {phase: ms / max(1, method["num_steps"]) for phase, ms in method["ledger_ms"].items()})
        for name, method in methods
    ]
    return stacked(rows, "ms") + phase_legend(rows)


def _request(request: Mapping[str, Any]) -> str:
    counts = request["accepted_counts"]
    facts = [f"{len(request['token_ids'])} tokens", f"{len(counts)} steps", request["finish_reason"]]
    facts += [f"{request['total_ms']:,.0f} ms"]
    marks = [
        _mark(request["identical"], "identical", "differs"),
        _mark(request["correct"], "right", f"wrong, expected {request['answer']}"),
    ]
    first = " ".join(request["prompt"].split())
    return (
        f"<details><summary><span>{request['id']}</span><span class=what>{escape(first[:140])}</span>"
        f"<span class=facts>{escape(' · '.join(facts))} {' '.join(filter(None, marks))}</span></summary>"
        f"<pre class=prompt>{escape(request['prompt'])}</pre><pre>{escape(request['text'])}</pre>"
        f"<div class=key>accepted drafts by step: {escape(' '.join(map(str, counts)))}</div></details>"
    )


def _mark(verdict: bool | None, good: str, bad: str) -> str:
    if verdict is None:
        return ""
    return f'<span class="{"good" if verdict else "bad"}">{escape(good if verdict else bad)}</span>'


def provenance(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Revision, machine and versions of a run, by name."""
    return {
        "revision": summary["git_revision"] or "not a repository",
        "machine": summary["machine"],
        **summary["versions"],
    }
