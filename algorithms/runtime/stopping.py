"""When a request ends: a stop token, a stop string or the length limit, any of them in the middle of a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from algorithms.runtime.request import Completion, Request


def extend(
    request: Request,
    completion: Completion,
    emitted: Sequence[int],
    logprobs: Sequence[float],
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Append one step's `emitted` tokens to `completion`, stopping at the first that ends the request.

    `finish_reason` stays empty while the request goes on. `num_truncated` counts the emitted tokens left behind.
    """
    completion.accepted_counts.append(len(emitted) - 1)
    for index, (token, logprob) in enumerate(zip(emitted, logprobs, strict=True)):
        completion.token_ids.append(token)
        completion.logprobs.append(logprob)
        completion.finish_reason = _reason(request, completion, decode)
        if completion.finish_reason:
            completion.num_truncated = len(emitted) - 1 - index
            return


def _reason(request: Request, completion: Completion, decode: Callable[[Sequence[int]], str]) -> str:
    if request.ends_at(completion.token_ids[-1]):
        return "stop_token"
    if request.sampling.stop_strings and _first_stop(request, decode(completion.token_ids)) is not None:
        return "stop_string"
    return "length" if len(completion.token_ids) >= request.sampling.max_new_tokens else ""


def _first_stop(request: Request, text: str) -> int | None:
    hits = [at for at in (text.find(stop) for stop in request.sampling.stop_strings) if at >= 0]
    return min(hits, default=None)


def final_text(request: Request, completion: Completion, decode: Callable[[Sequence[int]], str]) -> str:
    """The text of a finished request: without its stop token, and cut before its stop string."""
    ids = completion.token_ids
    text = decode(ids[:-1] if completion.finish_reason == "stop_token" else ids)
    at = _first_stop(request, text)
    return text if at is None else text[:at]
