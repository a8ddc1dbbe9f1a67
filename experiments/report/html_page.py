"""The page of a run: one HTML file without scripts and without network, so that it can be kept, mailed and opened."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from experiments.report.checks import NOT_A_GPU
from experiments.report.metrics import MethodResult, lossless_tone
from experiments.report.plots import Series, bars, chart, phase_bars
from experiments.report.tables import DASH, Column, Result, at, counted, declared, figure, html_table, words

STYLE_FILE = Path(__file__).with_name("page.css")
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
    when = " · ".join(filter(None, [conditions.get("date"), conditions.get("command")]))
    parts = [
        f"<p class=lead><code>{escape(when)}</code></p>" if when else "",
        cards(headline),
        *(f'<p class="note bad">{escape(f"not lossless: {text}")}</p>' for text in failures),
        *(f"<p class=note>{escape(text)}</p>" for text in [*clock, *notes]),
        section("Results", html_table(columns, results)),
        *sections,
        section("Settings that were used", _facts(_settings(config))),
        section("Provenance", _facts(facts | conditions["versions"])),
        section("Files", " · ".join(f'<a href="{escape(quote(name))}">{escape(name)}</a>' for name in files)),
        section("What the figures mean", _glossary(columns, results)),
    ]
    return page(title, _lead(conditions), parts)


def _glossary(columns: Sequence[Column], results: Sequence[Result]) -> str:
    """The meaning of each heading, and, folded, of each other key of `summary.json` that the results have."""
    shown = {column.title: column.help for column in columns if column.help}
    found = {path: column for path, column in declared(MethodResult).items() if any(at(r, path) for r in results)}
    keys = {f"{path} ({column.title})" if column.title else path: column.help for path, column in found.items()}
    return _facts(shown) + f"<details><summary>Keys of summary.json</summary>{_facts(keys)}</details>"


def page(title: str, lead: str, parts: Sequence[str]) -> str:
    """The frame. `parts` are HTML; title and lead are text."""
    body = "\n".join([f"<h1>{escape(title)}</h1>", f"<p class=lead>{escape(lead)}</p>", *filter(None, parts)])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{STYLE_FILE.read_text(encoding='utf-8')}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def section(title: str, content: str) -> str:
    """A card over the whole width; nothing where there is no content."""
    return f'<section class="card wide"><h2>{escape(title)}</h2>{content}</section>' if content else ""


def cards(headline: Sequence[Card]) -> str:
    """The figures that a reader sees first."""
    shown = "".join(
        f'<div class=card><b class="{tone or ""}">{escape(value)}</b><span>{escape(caption)}</span></div>'
        for value, caption, tone in headline
    )
    return f"<div class=cards>{shown}</div>" if shown else ""


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


def _facts(facts: Mapping[str, Any]) -> str:
    lines = (
        f"<tr><td>{escape(str(name))}</td><td class=wrap>{escape(str(value))}</td></tr>"
        for name, value in facts.items()
        if value is not None
    )
    return f"<table>{''.join(lines)}</table>"


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    """One line for each group, and for each entry of a group of groups, by name."""
    lines: dict[str, str] = {}
    for group, values in config.items():
        entries = values if isinstance(values, Mapping) else _by_name(values)
        nested = {key: value for key, value in entries.items() if isinstance(value, Mapping) and value}
        plain = {key: value for key, value in entries.items() if key not in nested}
        for name, each in {group: plain, **{f"{group} {key}": value for key, value in nested.items()}}.items():
            if each:
                lines[name] = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in each.items())
    return lines


def _by_name(values: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """`values` by their names, with a number in front where two have the same."""
    names = [value["name"] for value in values]
    return {names[i] if names.count(names[i]) == 1 else f"{i + 1} {names[i]}": value for i, value in enumerate(values)}


def step_times(results: Sequence[Result]) -> str:
    """Milliseconds per step by phase, one stacked bar per method."""
    steps = {result["method"]: max(1, result["num_steps"]) for result in results}
    phases = {result["method"]: result["phase_times_ms"].items() for result in results}
    return phase_bars({name: {k: ms / steps[name] for k, ms in parts} for name, parts in phases.items()}, "ms")


def acceptance_lines(results: Sequence[Result]) -> str:
    """Acceptance over draft positions, one line per method that drafts."""
    rates = {result["method"]: enumerate(result["acceptance_at"], 1) for result in results}
    series = [
        Series(method, [(float(i), rate) for i, rate in each if rate is not None]) for method, each in rates.items()
    ]
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
    left = "<h2>Acceptance by draft position</h2>" + bars(rates, "share of drafts at the position that were accepted")
    right = "<h2>Accepted drafts per step</h2>" + bars(counts, "steps that accepted exactly this many drafts")
    return f"<div class=pair><section class=card>{left}</section><section class=card>{right}</section></div>"


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
    counts, verdict, expected = request["accepted_counts"], request["verdict"], f"expected {request['answer']}"
    facts = [counted(len(request["token_ids"]), "token"), counted(len(counts), "step")]
    facts += [words(request["finish_reason"]), f"{request['total_ms']:,.0f} ms"]
    marks = [_mark(request["identical"], "identical", "differs")]
    if verdict == "cut":
        marks.append(f"<span>{escape(f'truncated by the length limit, {expected}')}</span>")
    else:
        marks.append(_mark(None if verdict is None else verdict == "right", "right", f"wrong, {expected}"))
    marks.append(_mark(request.get("parsed"), "parsed", "not parsed"))
    first = " ".join(request["prompt"].split())
    return (
        f"<details><summary><span>{request['id']}</span><span class=what>{escape(first[:140])}</span>"
        f"<span class=facts>{escape(' · '.join(facts))} {' '.join(filter(None, marks))}</span></summary>"
        f"<pre class=prompt>{escape(request['prompt'])}</pre><pre>{escape(request['text'])}</pre>"
        f"<div class=key>accepted drafts by step: {escape(' '.join(map(str, counts)))}</div></details>"
    )


def _mark(verdict: bool | None, good: str, bad: str) -> str:
    shown = f'<span class="{"good" if verdict else "bad"}">{escape(good if verdict else bad)}</span>'
    return "" if verdict is None else shown


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
