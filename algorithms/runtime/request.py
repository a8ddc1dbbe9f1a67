"""What goes into the engine and what comes out. No torch here: the command line builds requests before it needs it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """One prompt with its own limits and sampling parameters.

    `temperature` 0 is greedy. Filters follow the temperature in the order `top_k` (0: off), `top_p` (1: off), `min_p`
    (0: off). Penalties follow Hugging Face (`repetition_penalty`, prompt and output) and OpenAI (`presence_penalty`,
    `frequency_penalty`, output only), `logit_bias` is added to the logits of single tokens. `seed` keys the random
    numbers by position in the text, so the same request gives the same tokens at any place in any batch. A stop token
    is kept in the output; a stop string is cut off; `ignore_eos` lets `eos_token_ids` pass, not `stop_token_ids`.
    """

    id: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    @property
    def filtered(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        neutral = self.repetition_penalty == 1 and self.presence_penalty == 0 and self.frequency_penalty == 0
        return not neutral or bool(self.logit_bias)

    def ends_at(self, token: int) -> bool:
        """Whether `token` is a stop token of this request."""
        return token in self.stop_token_ids or (not self.ignore_eos and token in self.eos_token_ids)

    def problem(self, vocab_size: int) -> str | None:
        """What is wrong with the request's own values, as `name: expected …, got …`, or None."""
        finite = math.isfinite
        checks = (
            (self.max_new_tokens >= 1, "max_new_tokens: expected at least 1", self.max_new_tokens),
            (finite(self.temperature) and self.temperature >= 0, "temperature: expected at least 0", self.temperature),
            (self.top_k >= 0, "top_k: expected at least 0 (off)", self.top_k),
            (0 < self.top_p <= 1, "top_p: expected above 0 and at most 1 (off)", self.top_p),
            (0 <= self.min_p <= 1, "min_p: expected 0 (off) to 1", self.min_p),
            (
                finite(self.repetition_penalty) and self.repetition_penalty > 0,
                "repetition_penalty: expected above 0",
                self.repetition_penalty,
            ),
            (finite(self.presence_penalty), "presence_penalty: expected a finite number", self.presence_penalty),
            (finite(self.frequency_penalty), "frequency_penalty: expected a finite number", self.frequency_penalty),
            (
                not [t for t in self.logit_bias if not 0 <= t < vocab_size],
                f"logit_bias: expected token ids below the vocabulary of {vocab_size}",
                sorted(self.logit_bias),
            ),
            (
                all(map(finite, self.logit_bias.values())),
                "logit_bias: expected finite numbers",
                dict(self.logit_bias),
            ),
            (-(1 << 63) <= self.seed < 1 << 63, "seed: expected a signed number of 64 bits", self.seed),
        )
        return next((f"{text}, got {actual}" for fine, text, actual in checks if not fine), None)


@dataclass
class Completion:
    """The answer to one request.

    `accepted_counts` holds the accepted drafts of each step; the last step may have emitted `num_truncated` tokens past
    the end, so `len(token_ids) == sum(a + 1 for a in accepted_counts) - num_truncated`. `logprobs` are the target's
    log-probabilities of `token_ids` (temperature 1, after penalties, before filters). Times run from the moment the
    request entered the batch (waiting in the queue is not counted); `emitted_at_ms` has one entry a step.
    """

    request_id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    accepted_counts: list[int] = field(default_factory=list)
    num_truncated: int = 0
    emitted_at_ms: list[float] = field(default_factory=list)
    ttft_ms: float = 0.0
    total_ms: float = 0.0
