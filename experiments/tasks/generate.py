"""What an algorithm writes, whether it is exactly what the target alone would write, and where the time goes.

Both sides of the comparison are the same loop, engine settings, requests and clock; only the drafter differs.
Sampled output is compared as strictly as greedy output: random numbers are keyed by request and position, so
every exact algorithm gives the tokens of autoregressive sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.app.distributed import output_folder
from experiments.app.plan import Setup, check_drafters, prepare
from experiments.app.provenance import git_revision, machine, model_name, versions
from experiments.app.schema import GenerateConfig, to_plain
from experiments.report import metrics as figures
from experiments.report.console import plain_console, show
from experiments.report.run_folder import CONFIG, REPORT, RunFolder, open_run_folder, write_results
from experiments.report.run_page import render
from experiments.report.tracking import track
from experiments.tasks.decoding import AUTOREGRESSIVE, Decoded, baseline_config, decode

if TYPE_CHECKING:
    from algorithms.runtime.engine import Generation


def run(config: GenerateConfig, composed: DictConfig) -> float:
    """One run from configuration to records; returns tokens per step, which a sweep may maximise."""
    console = plain_console()
    check_drafters(config, [config.algo])
    setup = prepare(config)
    hardware = setup.hardware
    console.print(
        f"{config.algo.name} · {config.backend.name} · {config.model.name} · {setup.prompts.name} "
        f"({len(setup.requests)} prompts) · {hardware.device} {hardware.dtype} · {hardware.label}",
        highlight=False,
    )
    with open_run_folder(output_folder(Path(HydraConfig.get().runtime.output_dir))) as folder:
        folder.write(CONFIG, OmegaConf.to_yaml(composed, resolve=True))
        ours = decode(config, setup, config.algo, console)
        plain = None
        if config.baseline and config.algo.name != AUTOREGRESSIVE:
            plain = decode(config, setup, baseline_config(), console).generation
        summary = summarize(config, setup, ours, plain)
        requests = request_records(setup, ours.generation, plain)
        resolved = to_plain(composed)
        write_results(folder, requests, render(summary, requests, resolved), summary)
    report(console, config, folder, summary, requests, resolved)
    return float(summary["tokens_per_step"])


def summarize(config: GenerateConfig, setup: Setup, decoded: Decoded, plain: Generation | None) -> dict[str, Any]:
    """The content of summary.json."""
    ours = decoded.generation
    hardware = setup.hardware
    method = figures.summarize_method(ours, decoded.max_depth)
    baseline = None
    speedup = None
    if plain is not None:
        baseline = (
            {"algo": AUTOREGRESSIVE}
            | figures.summarize_method(plain, 0)
            | {"accuracy": setup.accuracy(plain.completions)}
        )
        if method["decode_tokens_per_s"] and baseline["decode_tokens_per_s"]:
            speedup = method["decode_tokens_per_s"] / baseline["decode_tokens_per_s"]
    return {
        "name": config.name,
        "algo": config.algo.name,
        "backend": config.backend.name,
        "rule": decoded.rule,
        "attention": decoded.served,
        "graphs": asdict(ours.graphs),
        "model": model_name(config),
        "device": hardware.device,
        "dtype": hardware.dtype,
        "impl": hardware.label,
        "machine": machine(hardware.device),
        **method,
        "baseline": baseline,
        "speedup": speedup,
        "prediction": figures.predict_speedup(method, baseline) if baseline else None,
        "lossless": figures.lossless(
            ours.completions, plain.completions if plain and decoded.comparable(setup.requests) else None
        ),
        "task": {"name": setup.prompts.name, "accuracy": setup.accuracy(ours.completions)},
        "sampling": asdict(config.sampling),
        "page_size": config.runtime.page_size,
        "max_batch": config.runtime.max_batch,
        "seed": config.sampling.seed,
        "git_revision": git_revision(),
        "versions": versions(),
    }


def request_records(setup: Setup, ours: Generation, plain: Generation | None) -> list[dict[str, Any]]:
    """The lines of requests.jsonl."""
    baseline = plain.completions if plain else [None] * len(ours.completions)
    rows = zip(setup.prompts.prompts, setup.requests, ours.completions, baseline, strict=True)
    records = []
    for prompt, request, completion, reference in rows:
        score = setup.prompts.score
        records.append(
            {
                "id": request.id,
                "prompt": prompt.text,
                "num_prompt_tokens": len(request.prompt_ids),
                "seed": request.sampling.seed,
                **{key: value for key, value in asdict(completion).items() if key != "request_id"},
                "answer": prompt.answer,
                "correct": score(prompt, completion.text) if score else None,
                "identical": None if reference is None else completion.token_ids == reference.token_ids,
                "baseline_token_ids": None if reference is None else reference.token_ids,
            }
        )
    return records


def report(
    console: Console,
    config: GenerateConfig,
    folder: RunFolder,
    summary: dict[str, Any],
    requests: Sequence[dict[str, Any]],
    resolved: dict[str, Any],
) -> None:
    """Tell the terminal and the tracker."""
    show(console, summary, requests[: config.samples])
    failed = track(config.tracker, folder.path, config.name, resolved, summary)
    for warning in figures.warnings(summary) + ([failed] if failed else []):
        console.print(f"[bold yellow]warning:[/] {warning}", highlight=False)
    console.print(f"report: {folder.path / REPORT}", highlight=False, soft_wrap=True)
