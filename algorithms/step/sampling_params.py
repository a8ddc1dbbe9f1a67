"""How the tokens of a request are chosen and when it stops: fields, defaults and ranges.

The command line's group `sampling` and every `Request` use this one class. No torch here: the command line reads it
before anything heavy is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from algorithms.checked import Between, Checked

GRAMMARS = ("json_schema", "regex", "ebnf")  # fields of `GrammarParams` that hold a grammar
_LARGEST_INT32 = 2**31 - 1
_LARGEST_INT64 = 2**63 - 1
MAX_FORBIDDEN = 256  # most token sequences that one request forbids: bad words, and with `min_tokens` its stop tokens
MAX_BAD_WORD = 16  # most tokens of a bad word
MAX_TOP_LOGPROBS = 64  # most tokens that are reported at the place of one token


@dataclass
class GrammarParams:
    """The grammar of the output: one of these or none. ValueError: more than one, or something that is no text."""

    json_schema: Any = None
    """JSON schema as text or mapping. Properties are written in its order."""
    regex: str | None = None
    """Regular expression that the whole text matches."""
    ebnf: str | None = None
    """Rules in the EBNF of llama.cpp (GBNF); the rule `root` is the whole text."""
    any_whitespace: bool = False
    """JSON with any space and line breaks between its tokens; else on one line, as Python's `json.dumps` writes it."""
    draft_forced: bool = True
    """Draft the text about which the grammar leaves no choice."""

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, Mapping):
            self.json_schema = json.dumps(self.json_schema)
        given = {name: getattr(self, name) for name in GRAMMARS if getattr(self, name) is not None}
        if len(given) > 1:
            raise ValueError(f"sampling.grammar: expected one of {', '.join(GRAMMARS)}, got {' and '.join(given)}")
        for name, text in given.items():
            if not isinstance(text, str) or not text.strip():
                expected = "text or a mapping" if name == "json_schema" else "text"
                raise ValueError(f"sampling.grammar.{name}: expected {expected}, got {text!r}")

    @property
    def kind(self) -> str | None:
        return next((name for name in GRAMMARS if getattr(self, name) is not None), None)

    @property
    def text(self) -> str:
        """The grammar itself; empty if there is none."""
        return getattr(self, self.kind) if self.kind else ""


@dataclass
class SamplingParams(Checked):
    """Sampling parameters of one request. Treat it as a value: `dataclasses.replace` makes a checked copy. Raises
    ValueError if a field is out of range; the message names the field as it is typed, `sampling.FIELD`."""

    GROUP = "sampling."
    max_new_tokens: Annotated[int, Between(1)] = 128
    """Most tokens that are generated, at least 1."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: Annotated[int, Between(0, _LARGEST_INT32)] = 0
    """Keep the k most likely tokens; 0 keeps all. The filters follow the temperature in the order of these fields."""
    top_p: Annotated[float, Between(0, 1, above=True)] = 1.0
    """Keep the most likely tokens up to this total probability, above 0; 1 keeps all."""
    min_p: Annotated[float, Between(0, 1)] = 0.0
    """Keep the tokens with at least this share of the largest probability, up to 1; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Hugging Face's penalty on tokens of prompt and output, above 0; 1 is none."""
    presence_penalty: float = 0.0
    """OpenAI's penalty on each token that the output holds."""
    frequency_penalty: float = 0.0
    """OpenAI's penalty on each occurrence in the output."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id to what is added to its logit."""
    bad_words: tuple[Any, ...] = ()
    """Token sequences that are never written: tuples of ids, or strings, encoded alone and after a space."""
    min_tokens: int = 0
    """Stop and end-of-text tokens cannot be chosen before this number of new tokens; stop strings still end."""
    grammar: GrammarParams = field(default_factory=GrammarParams)
    """The form of the output; a grammar that has ended allows stop tokens only."""
    seed: Annotated[int, Between(0, _LARGEST_INT64)] = 0
    """Keys the random numbers, together with the position: batching does not change the tokens."""
    ignore_eos: bool = False
    """Generate past the model's own end-of-text tokens."""
    stop_strings: tuple[str, ...] = ()
    """Generation ends when the output holds one of these; the output ends before it."""
    logprobs: bool = False
    """Also report the target's log-probability of every token; steps without such requests skip their sums."""
    top_logprobs: Annotated[int, Between(0, MAX_TOP_LOGPROBS)] = 0
    """Also report this number of most likely tokens at the place of every token, with their log-probabilities."""
    drafts: bool = False
    """Also report every drafted token with its probabilities, see `Completion.drafts`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stop_strings = tuple(self.stop_strings)
        if isinstance(self.grammar, Mapping):
            self.grammar = GrammarParams(**self.grammar)
        if not isinstance(self.bad_words, str):
            self.bad_words = tuple(word if isinstance(word, (str, int)) else tuple(word) for word in self.bad_words)
        finite = math.isfinite
        checks = (
            ("temperature", "a finite number, at least 0", finite(self.temperature) and self.temperature >= 0),
            ("repetition_penalty", "a finite number above 0",
             finite(self.repetition_penalty) and self.repetition_penalty > 0),
            ("presence_penalty", "a finite number", finite(self.presence_penalty)),
            ("frequency_penalty", "a finite number", finite(self.frequency_penalty)),
            ("logit_bias", "finite numbers", all(map(finite, self.logit_bias.values()))),
            ("bad_words", f"strings, or lists of 1 to {MAX_BAD_WORD} token ids", _are_words(self.bad_words)),
            ("min_tokens", f"0 to max_new_tokens = {self.max_new_tokens}",
             0 <= self.min_tokens <= self.max_new_tokens),
            # A grammar that has ended allows stop tokens only.
            ("min_tokens", "0 with sampling.grammar", not (self.constrained and self.min_tokens)),
            ("ignore_eos", "false with sampling.grammar", not (self.constrained and self.ignore_eos)),
            ("stop_strings", "no empty string, which would stop every request at once", "" not in self.stop_strings),
        )  # fmt: skip
        for name, expected, fine in checks:
            if not fine:
                raise ValueError(f"sampling.{name}: expected {expected}, got {getattr(self, name)!r}")

    @property
    def sampled(self) -> bool:
        return self.temperature > 0

    @property
    def filtered(self) -> bool:
        """Whether a filter removes tokens before one is sampled."""
        return self.sampled and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        """Whether the target's logits are changed before anything else."""
        neutral = self.repetition_penalty == 1 and self.presence_penalty == 0 and self.frequency_penalty == 0
        return not neutral or bool(self.logit_bias)

    @property
    def forbids(self) -> bool:
        """Whether some tokens cannot be chosen at some places."""
        return self.min_tokens > 0 or bool(self.bad_words)

    @property
    def constrained(self) -> bool:
        return self.grammar.kind is not None


def _are_words(words: Any) -> bool:
    if not isinstance(words, tuple):
        return False
    strings = [word for word in words if isinstance(word, str)]
    tokens = [word for word in words if isinstance(word, tuple) and 1 <= len(word) <= MAX_BAD_WORD]
    are_ids = all(type(token) is int and token >= 0 for word in tokens for token in word)
    return all(strings) and are_ids and len(strings) + len(tokens) == len(words)


@dataclass(frozen=True)
class SamplingNeeds:
    """Sampling features that requests need. A step does no more than the needs that it was made for."""

    sampled: bool = False
    filtered: bool = False
    penalised: bool = False
    forbids: bool = False
    constrained: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    drafts: bool = False

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> SamplingNeeds:
        listed = list(params)
        needs = vars(cls())
        return cls(**{name: max((getattr(p, name) for p in listed), default=none) for name, none in needs.items()})

    @property
    def greedy(self) -> bool:
        """Whether the largest logit of each row is all that is needed."""
        return not any(vars(self).values())

    def covers(self, other: SamplingNeeds) -> bool:
        return all(mine >= theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
