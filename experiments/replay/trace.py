"""The recorded text that drafters are scored on: which tokens follow each prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from experiments.report.run_folder import REQUESTS

if TYPE_CHECKING:
    from algorithms.runtime.request import Completion, Request


class Recorded(NamedTuple):
    """One prompt and its answer."""

    request: Request
    tokens: list[int]


def recorded(requests: Sequence[Request], completions: Sequence[Completion]) -> list[Recorded]:
    """The answers that are not empty, beside their requests."""
    pairs = zip(requests, completions, strict=True)
    return [Recorded(request, completion.token_ids) for request, completion in pairs if completion.token_ids]


def read_trace(folder: str, data: str, requests: Sequence[Request]) -> list[Recorded]:
    """The answers to `requests` in the folder of an earlier run over the prompt set `data`, of its first method.

    Raises ValueError where the folder has none, or has answers to other prompts.
    """
    path = Path(folder) / REQUESTS
    try:
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"task.trace: expected the folder of a run with {REQUESTS}, got {folder}: {error}") from error
    entries = [entry for entry in entries if entry.get("data", data) == data]
    first = entries[0].get("method") if entries else None
    answers = {entry["id"]: entry for entry in entries if entry.get("method") == first}
    found = []
    for request in requests:
        entry = answers.get(request.id)
        if entry is None:
            raise ValueError(f"task.trace: {folder} has no answer to request {request.id} of data={data}")
        length = entry.get("num_prompt_tokens", len(request.prompt_ids))
        if length != len(request.prompt_ids):
            expected = f"expected {len(request.prompt_ids)} prompt tokens, as in this run, got {length}"
            raise ValueError(f"task.trace: {folder}, request {request.id}: {expected}")
        if len(entry["token_ids"]) > request.sampling.max_new_tokens:
            raise ValueError(
                f"task.trace: {folder}, request {request.id}: expected at most sampling.max_new_tokens="
                f"{request.sampling.max_new_tokens} tokens, got {len(entry['token_ids'])}"
            )
        if entry["token_ids"]:
            found.append(Recorded(request, entry["token_ids"]))
    return found
