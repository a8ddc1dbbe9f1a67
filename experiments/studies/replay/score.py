"""Recorded outputs, and the drafts of drafters at every position of them, many positions at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from algorithms.algorithm import Algorithm
from algorithms.engine.request import EngineError, Request
from algorithms.models.loading import Target
from algorithms.step.sampling_params import SamplingParams
from experiments.app.errors import user_errors
from experiments.app.plan import Plan
from experiments.report.json_log import read_json_lines
from experiments.report.run_folder import REQUESTS
from experiments.studies.replay.recorder import Recorder
from experiments.studies.replay.steps import Drafts
from experiments.tasks.decoding import engine_of


class Recorded(NamedTuple):
    """One request and its output tokens."""

    request: Request
    tokens: list[int]


def read_trace(folder: str, data: str, requests: Sequence[Request]) -> list[Recorded]:
    """The outputs for `requests` in the folder of an earlier run over the prompt set `data`, of its first method.
    Raises ValueError where the folder has no outputs, or outputs for other prompts."""
    path = Path(folder) / REQUESTS
    try:
        entries = read_json_lines(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"task.trace: expected the folder of a run with {REQUESTS}, got {folder}: {error}") from error
    entries = [entry for entry in entries if entry.get("data", data) == data]
    first = entries[0].get("method") if entries else None
    outputs = {entry["id"]: entry for entry in entries if entry.get("method") == first}
    found = []
    for request in requests:
        entry, where = outputs.get(request.id), f"task.trace: {folder}, request {request.id}: expected"
        if entry is None:
            raise ValueError(f"{where} an output for a prompt of data={data}, got none")
        length = entry.get("num_prompt_tokens", len(request.prompt_ids))
        if length != len(request.prompt_ids):
            raise ValueError(f"{where} {len(request.prompt_ids)} prompt tokens, as in this run, got {length}")
        tokens, most = entry["token_ids"], request.sampling.max_new_tokens
        if len(tokens) > most:
            raise ValueError(f"{where} at most sampling.max_new_tokens={most} tokens, got {len(tokens)}")
        found.append(Recorded(request, tokens))
    return found


def score(
    plan: Plan, target: Target, algorithms: Sequence[Algorithm], trace: Sequence[Recorded], whole: bool
) -> tuple[list[list[Drafts]], int]:
    """Let `algorithms` draft at every position of `trace`, in one pass of the target.

    Returns `drafts[drafter][output]`, and how many of the recorded tokens the target chooses now, greedily.

    An output is split into parts that fill the batch; all tokens before a part are its prompt. With `whole` outputs are
    not split: an algorithm that learns must see each of them once.
    """
    tokens = [[*each.request.prompt_ids, *each.tokens] for each in trace]
    recorder = Recorder(algorithms, tokens)
    engine, _ = engine_of(plan, target, recorder, max(map(len, tokens)))
    parts = 1 if whole else -(-plan.config.runtime.max_batch // len(trace))
    requests: list[Request] = []
    for number, (request, output) in enumerate(trace):
        width = -(-len(output) // parts)
        for start in range(0, len(output), width):
            sampling = SamplingParams(max_new_tokens=min(width, len(output) - start), seed=number)
            requests.append(Request(len(requests), (*request.prompt_ids, *output[:start]), sampling))
    with user_errors(EngineError):
        completions = engine.generate(requests).completions
        if failed := [completion.error for completion in completions if completion.error]:
            raise EngineError(failed[0])
    num_chosen = sum(
        tokens[request.sampling.seed][start] == token
        for request, completion in zip(requests, completions, strict=True)
        for start, token in enumerate(completion.token_ids, len(request.prompt_ids))
    )
    return _drafts(recorder.figures().tolist(), trace), num_chosen


def _drafts(figures: list[list[list[list[int]]]], trace: Sequence[Recorded]) -> list[list[Drafts]]:
    """From `figures[drafter][figure][output][position]` to the drafts of each output."""
    found = []
    for accepted, ran_out in figures:
        outputs = []
        for number, (request, tokens) in enumerate(trace):
            first, length = len(request.prompt_ids) - 1, len(tokens)
            counts, outs = (each[number][first : first + length] for each in (accepted, ran_out))
            # After the end of the output nothing can be accepted or rejected.
            ends = [bool(out) or start + a == length for start, (a, out) in enumerate(zip(counts, outs, strict=True))]
            outputs.append(Drafts(counts, ends))
        found.append(outputs)
    return found
