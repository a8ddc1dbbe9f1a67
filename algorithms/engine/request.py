"""Requests and completions. No torch here: the command line builds requests before it needs it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from algorithms.step.sampling_params import MAX_FORBIDDEN, SamplingParams

_NEVER_ENDS = 2**62  # a position past every output


class EngineError(ValueError):
    """A request that cannot be served."""


@dataclass(frozen=True)
class Request:
    """One prompt and how it is to be continued. A stop token is kept in the output, a stop string is removed."""

    id: int  # names the request; unique among the requests that are served at one time
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: frozenset[int] = frozenset()  # the model's end-of-text tokens, which `sampling.ignore_eos` lets pass
    stop_token_ids: frozenset[int] = frozenset()  # tokens that always end the request
    continuation: tuple[int, ...] = ()  # what the target will answer, for an algorithm with a `recorder`

    def with_sampling(self, **changes: Any) -> Request:
        return replace(self, sampling=replace(self.sampling, **changes))

    def shortened(self, max_new_tokens: int, prompt_tokens: int | None = None) -> Request:
        """The same request for at most `max_new_tokens`, with at most the first `prompt_tokens` of its prompt."""
        most = min(max_new_tokens, self.sampling.max_new_tokens)
        short = self.with_sampling(max_new_tokens=most, min_tokens=min(most, self.sampling.min_tokens))
        return replace(short, prompt_ids=self.prompt_ids[:prompt_tokens])

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return len(self.prompt_ids) + self.sampling.max_new_tokens

    @property
    def ends(self) -> frozenset[int]:
        return self.stop_token_ids if self.sampling.ignore_eos else self.stop_token_ids | self.eos_token_ids

    @property
    def forbidden(self) -> list[tuple[tuple[int, ...], int]]:
        """Token sequences that are not written, each with the position from which on it is allowed."""
        sampling = self.sampling
        allowed = len(self.prompt_ids) + sampling.min_tokens
        held_back = [((token,), allowed) for token in sorted(self.ends)] if sampling.min_tokens else []
        return [*held_back, *((word, _NEVER_ENDS) for word in sampling.bad_words)]

    def problem(self, vocab_size: int) -> str | None:
        """The part of this request that a target with `vocab_size` tokens cannot serve, or None."""
        if not self.prompt_ids:
            return "the prompt has no tokens"
        if outside := [token for token in self.prompt_ids if not 0 <= token < vocab_size]:
            return f"prompt tokens outside the vocabulary of {vocab_size}: {outside[:5]}"
        if biased := sorted(token for token in self.sampling.logit_bias if not 0 <= token < vocab_size):
            return f"sampling.logit_bias: expected token ids below the vocabulary of {vocab_size}, got {biased[:5]}"
        if self.sampling.top_logprobs > vocab_size:
            most = f"at most the vocabulary of {vocab_size}"
            return f"sampling.top_logprobs: expected {most}, got {self.sampling.top_logprobs}"
        if self.sampling.constrained and not self.ends:
            return "sampling.grammar: expected a stop token that ends the text, got a model that names none"
        words = self.sampling.bad_words
        if strings := [word for word in words if isinstance(word, str)]:
            return f"sampling.bad_words: expected token ids where no tokenizer is at hand, got {strings[:5]}"
        if outside := [token for word in words for token in word if token >= vocab_size]:
            return f"sampling.bad_words: expected token ids below the vocabulary of {vocab_size}, got {outside[:5]}"
        if len(self.forbidden) > MAX_FORBIDDEN:
            return (
                f"sampling.bad_words and the stop tokens that sampling.min_tokens holds back: expected at most "
                f"{MAX_FORBIDDEN} sequences, got {len(self.forbidden)}"
            )
        return None


class SlotResult(NamedTuple):
    """The result of one step for one request."""

    tokens: list[int]  # emitted: the accepted drafts and the bonus token
    logprobs: list[float]
    valid: bool  # whether the target gave a usable logit for the bonus token, which has no meaning otherwise
    num_drafted: int
    ran_out: bool  # whether the accepted path ends where nothing was drafted
    top: list[list[tuple[int, float]]]
    """The most likely tokens at the place of each, with their log-probabilities; empty where no step reports them."""

    def without_bonus(self) -> SlotResult:
        return self._replace(tokens=self.tokens[:-1], logprobs=self.logprobs[:-1], top=self.top[:-1])


class Draft(NamedTuple):
    token: int
    parent: int  # place of the draft that it follows in the list of its step; -1 for the last committed token
    accepted: bool
    target_logprob: float | None
    """The target's log-probability, as in `Completion.logprobs`; None for a token that cannot be written there."""
    draft_prob: float | None
    """Its probability in the distribution that it was sampled from, or the drafter's own; None where it has none."""


@dataclass
class Completion:
    """The answer to one request.

    `accepted_counts` holds the accepted drafts of each step, `drafted_counts` the drafted tokens, all of which were
    verified, and `ran_out` whether the accepted path ended where nothing was drafted, so that no draft was rejected.
    The last step may have emitted `num_truncated` tokens past the end, so
    `len(token_ids) == sum(a + 1 for a in accepted_counts) - num_truncated`. `logprobs` are the target's
    log-probabilities of `token_ids` (temperature 1, after penalties, before filters); the list is empty unless
    `sampling.logprobs` is set. Times run from the moment the request entered the batch, without waiting in the
    queue; `emitted_at_ms` has one entry per step.
    """

    request_id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each token the `sampling.top_logprobs` most likely tokens at its place, in falling order, as pairs of token
    id and log-probability, as in `logprobs`. Tokens of no probability are left out."""
    text: str = ""
    finish_reason: str = ""
    """stop_token, stop_string, length, aborted, or `error` where the target gave no finite logit."""
    parsed: bool | None = None
    """Whether the output is complete in its grammar, which a truncated one seldom is; None without a grammar."""
    error: str = ""  # why the request failed; empty unless `finish_reason` is `error`
    accepted_counts: list[int] = field(default_factory=list)
    drafted_counts: list[int] = field(default_factory=list)
    ran_out: list[bool] = field(default_factory=list)
    drafts: list[list[Draft]] = field(default_factory=list)
    """The drafted tokens of each step, parents first, if `sampling.drafts` is set; accepted ones past the end too."""
    num_truncated: int = 0
    emitted_at_ms: list[float] = field(default_factory=list)
    ttft_ms: float = 0.0
    total_ms: float = 0.0
