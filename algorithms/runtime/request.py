"""What goes into the engine and what comes out. No torch here: the command line builds requests before it needs it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """One prompt with its own limits and sampling parameters.

    `temperature` 0 is greedy. `seed` keys the random numbers by position in the text, so the same request gives the
    same tokens at any place in any batch. A stop token is kept in the output; a stop string is cut off.
    """

    id: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


@dataclass
class Completion:
    """The answer to one request.

    `accepted_counts` holds the accepted drafts of each step; the last step may have emitted `num_truncated` tokens past
    the end, so `len(token_ids) == sum(a + 1 for a in accepted_counts) - num_truncated`. Times run from the moment the
    request entered the batch (waiting in the queue is not counted).
    """

    request_id: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    accepted_counts: list[int] = field(default_factory=list)
    num_truncated: int = 0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
