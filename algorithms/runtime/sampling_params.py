"""How the tokens of a request are chosen and when it stops: fields, defaults and ranges.

The command line's group `sampling` and every `Request` use this one class. No torch here: the command line reads it
before anything heavy is imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

_LARGEST_INT32 = 2**31 - 1
_LARGEST_INT64 = 2**63 - 1


@dataclass
class SamplingParams:
    """Sampling parameters of one request. Treat it as a value: `dataclasses.replace` makes a checked copy.

    Raises ValueError if a field is out of range; the message names the field as it is typed, `sampling.FIELD`.
    """

    max_new_tokens: int = 128
    """Most tokens that are generated, at least 1."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all. The filters follow the temperature in the order of these fields."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to this total probability, above 0; 1 keeps all."""
    min_p: float = 0.0
    """Keep the tokens with at least this share of the largest probability, up to 1; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Hugging Face's penalty on tokens of prompt and output, above 0; 1 is none."""
    presence_penalty: float = 0.0
    """OpenAI's penalty on each token that the output holds."""
    frequency_penalty: float = 0.0
    """OpenAI's penalty on each occurrence in the output."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id to what is added to its logit."""
    seed: int = 0
    """Keys the random numbers, together with the position in the text: batching does not change the tokens."""
    ignore_eos: bool = False
    """Generate past the model's own end-of-text tokens."""
    stop_strings: tuple[str, ...] = ()
    """Generation ends when the output holds one of these; the text is cut before it."""
    logprobs: bool = False
    """Also report the target's log-probability of every token; steps that nobody asks for them skip their sums."""

    def __post_init__(self) -> None:
        self.stop_strings = tuple(self.stop_strings)
        finite = math.isfinite
        checks = (
            ("max_new_tokens", "at least 1", self.max_new_tokens >= 1),
            ("temperature", "a finite number, at least 0", finite(self.temperature) and self.temperature >= 0),
            ("top_k", f"0 (off) to {_LARGEST_INT32}", 0 <= self.top_k <= _LARGEST_INT32),
            ("top_p", "above 0 and at most 1 (off)", 0 < self.top_p <= 1),
            ("min_p", "0 (off) to 1", 0 <= self.min_p <= 1),
            ("repetition_penalty", "a finite number above 0",
             finite(self.repetition_penalty) and self.repetition_penalty > 0),
            ("presence_penalty", "a finite number", finite(self.presence_penalty)),
            ("frequency_penalty", "a finite number", finite(self.frequency_penalty)),
            ("logit_bias", "finite numbers", all(map(finite, self.logit_bias.values()))),
            ("seed", f"0 to {_LARGEST_INT64}", 0 <= self.seed <= _LARGEST_INT64),
            ("stop_strings", "no empty string, which would stop every request at once", "" not in self.stop_strings),
        )  # fmt: skip
        for name, expected, fine in checks:
            if not fine:
                raise ValueError(f"sampling.{name}: expected {expected}, got {getattr(self, name)!r}")

    @property
    def filtered(self) -> bool:
        """Whether a filter removes tokens before one is drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        """Whether the target's logits are changed before anything else."""
        neutral = self.repetition_penalty == 1 and self.presence_penalty == 0 and self.frequency_penalty == 0
        return not neutral or bool(self.logit_bias)


@dataclass(frozen=True)
class SamplingNeeds:
    """What requests ask of the sampler. A step does no more than the needs that it was made for."""

    sampled: bool = False
    filtered: bool = False
    penalised: bool = False
    logprobs: bool = False

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> SamplingNeeds:
        """What serves all of `params`."""
        asked = list(params)
        return cls(
            sampled=any(p.temperature > 0 for p in asked),
            filtered=any(p.filtered for p in asked),
            penalised=any(p.penalised for p in asked),
            logprobs=any(p.logprobs for p in asked),
        )

    @property
    def greedy(self) -> bool:
        """Whether the largest logit of each row is all that is needed."""
        return not (self.sampled or self.filtered or self.penalised or self.logprobs)

    def covers(self, other: SamplingNeeds) -> bool:
        """Whether a step made for these needs serves `other`."""
        return all(mine or not theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
