"""Scores drafters at every position of recorded text, many positions at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from algorithms.runtime.request import Request
from algorithms.runtime.sampling_params import SamplingParams
from experiments.app.errors import user_errors
from experiments.app.plan import Plan
from experiments.replay.steps import Drafts
from experiments.replay.trace import Recorded
from experiments.tasks.decoding import engine_of

if TYPE_CHECKING:
    from algorithms.runtime.algorithm import Algorithm
    from algorithms.runtime.models.loading import Target


class Scored(NamedTuple):
    """What the drafters draft, `drafts[drafter][text]`, and how many of the recorded tokens the target itself chooses
    now, greedily."""

    drafts: list[list[Drafts]]
    num_chosen: int


def score(
    plan: Plan, target: Target, algorithms: Sequence[Algorithm], trace: Sequence[Recorded], whole: bool
) -> Scored:
    """Let `algorithms` draft at every position of `trace`, in one pass of the target.

    A text is cut into parts that run side by side, so that the batch is full; what stands before a part is its prompt.
    With `whole` texts are not cut: an algorithm that learns must see each of them once.
    """
    from algorithms.runtime.request import EngineError
    from experiments.replay.recorder import Recorder

    texts = [[*each.request.prompt_ids, *each.tokens] for each in trace]
    recorder = Recorder(algorithms, texts)
    engine, _ = engine_of(plan, target, recorder, max(map(len, texts)))
    parts = 1 if whole else -(-plan.config.runtime.max_batch // len(trace))
    asked = [request for number, each in enumerate(trace) for request in _parts(number, each, parts)]
    with user_errors(EngineError):
        asked = [replace(request, id=index) for index, request in enumerate(asked)]
        completions = engine.generate(asked).completions
        for completion in completions:
            if completion.error:
                raise EngineError(completion.error)
    num_chosen = sum(
        texts[request.sampling.seed][start] == token
        for request, completion in zip(asked, completions, strict=True)
        for start, token in enumerate(completion.token_ids, len(request.prompt_ids))
    )
    return Scored(_drafts(recorder.figures().tolist(), trace), num_chosen)


def _parts(number: int, each: Recorded, parts: int) -> list[Request]:
    """Requests that cover the answer of text `number`, as many as there are parts; their ids are still to be given."""
    prompt, tokens = each.request.prompt_ids, each.tokens
    width = -(-len(tokens) // parts)
    found = []
    for start in range(0, len(tokens), width):
        sampling = SamplingParams(max_new_tokens=min(width, len(tokens) - start), seed=number)
        found.append(Request(0, (*prompt, *tokens[:start]), sampling))
    return found


def _drafts(figures: list[list[list[list[int]]]], trace: Sequence[Recorded]) -> list[list[Drafts]]:
    """From `figures[drafter][figure][text][position]` to the drafts of each text."""
    found = []
    for accepted, ran_out in figures:
        texts = []
        for number, (request, tokens) in enumerate(trace):
            first, length = len(request.prompt_ids) - 1, len(tokens)
            counts, outs = (each[number][first : first + length] for each in (accepted, ran_out))
            # Behind the end of the text nothing can be accepted or rejected.
            ends = [bool(out) or start + a == length for start, (a, out) in enumerate(zip(counts, outs, strict=True))]
            texts.append(Drafts(counts, ends))
        found.append(texts)
    return found
