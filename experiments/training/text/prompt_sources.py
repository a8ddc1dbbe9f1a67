"""Settings of the training text, over which the options of the group `text` are files, and prompts of every source as
token ids, in the markup of a target folder: the user turn of its chat template.

A prompt is a function of the settings, the split and its number alone.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from algorithms.checked import Between, Checked
from algorithms.engine.request import Request
from algorithms.engine.settings import LARGEST_INT32
from algorithms.models.folder import ModelError
from algorithms.models.tokenizer import Tokenizer
from algorithms.step.sampling_params import SamplingParams
from experiments.data.arithmetic import problems
from experiments.data.code import beginnings_of, function_beginnings, heldout_files, read_source, training_files
from experiments.data.prompts import JsonlData, load_prompts

PLACE = "{prompt}"


@dataclass
class KindSettings(Checked):
    """One kind of text: the source of its prompts, their markup, and the target's answers.

    `source` is one of

    * `target`: the target writes user turns itself, sampled at `prompt_temperature` after the chat template's user
      prefix and one of the `openings` (as in Magpie, arXiv 2406.08464). No data set is needed;
    * `file`: the prompts of `path`, a .jsonl file as for `data=jsonl` or a .txt file with empty lines between prompts;
    * `arithmetic`: word problems of `experiments/data/arithmetic.py`;
    * `functions`, `windows`: beginnings of functions, and random windows, of the standard library's source.

    A prompt replaces `{prompt}` in `template` and becomes a user turn, unless `raw` continues it without markup.
    With `turns` above 1 the target writes further user turns after its answers. `count` is the largest number of
    prompts, `prompt_tokens` and `answer_tokens` bound the length of a turn and of its answer. Answers are greedy, and
    a `sampled_share` of them is sampled at temperature 1.
    """

    GROUP = "text.kinds.*."
    source: Annotated[str, ("target", "file", "arithmetic", "functions", "windows")] = "target"
    count: Annotated[int, Between(1)] = 1024
    path: str | None = None
    openings: list[str] = field(default_factory=lambda: [""])
    turns: Annotated[int, Between(1)] = 1
    prompt_temperature: Annotated[float, Between(0, above=True)] = 1.0
    template: str = PLACE
    raw: bool = False
    prompt_tokens: Annotated[int, Between(1)] = 192
    answer_tokens: Annotated[int, Between(1)] = 256
    sampled_share: Annotated[float, Between(0, 1)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.path is not None) != (self.source == "file"):
            raise ValueError(f"text.kinds.*.path belongs to source=file, got source={self.source}, path={self.path}")
        if not self.openings:
            raise ValueError("text.kinds.*.openings: expected at least one, [''] for none, got []")
        if self.template.count(PLACE) != 1:
            raise ValueError(f"text.kinds.*.template: expected {PLACE} once, got {self.template!r}")
        if self.raw and (self.source == "target" or self.template != PLACE):
            raise ValueError("text.kinds.*.raw skips the chat template: expected a source of raw text, and no template")
        if self.turns > 1 and self.source != "target":
            raise ValueError(f"text.kinds.*.turns above 1 belongs to source=target, got source={self.source}")


@dataclass
class TextSettings(Checked):
    """All kinds of text, and how they are written. Answers go to files of `shard` prompts in `folder`. Existing files
    are used again; all programs that run at the same time write the missing ones. `batch` is the number of requests in
    the engine. After `minutes` no further file is begun. `validation` prompts of each kind are held out."""

    GROUP = "text."
    kinds: dict[str, KindSettings] = field(default_factory=dict)
    folder: str = "outputs/text"
    seed: Annotated[int, Between(0, LARGEST_INT32)] = 0
    validation: Annotated[int, Between(1)] = 48
    shard: Annotated[int, Between(1)] = 1024
    batch: Annotated[int, Between(1)] = 256
    minutes: Annotated[float | None, Between(0, above=True)] = None


TRAINING, VALIDATION = "training", "validation"
MIN_WINDOW = 24
PROBE = "Here is the user turn."
REPLY = "Here is the answer."
Write = Callable[[Sequence[Request], str], list[list[int]]]
Take = Callable[[str, int, int], list[list[int]]]
"""(split, first, count) to token ids of prompts number `first` … `first` + `count` - 1 of the split, fewer where the
source ends or a prompt cannot be used."""
Splits = tuple[list[list[int]], list[list[int]]]  # training prompts and held-out ones


def seed_of(*parts: object) -> int:
    """A seed of 62 bits for `parts`."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 2


class UserTurn(NamedTuple):
    """A user turn of a chat template: the text before the first one, the special token that ends it, and the text
    between that token and the answer."""

    prefix: str
    end: int
    after: str


def user_turn(tokenizer: Tokenizer) -> UserTurn:
    """The user turn of the tokenizer's chat template. Raises ModelError where there is no template, or where no special
    token ends the turn: a model cannot be made to write such a turn and to stop after it."""
    rendered = tokenizer.render([PROBE])
    prefix, found, suffix = rendered.partition(PROBE)
    following = tokenizer.encode(suffix, add_special=False)
    if not found or not following or following[0] not in tokenizer.special_ids().values():
        raise ModelError(
            "the chat template does not end a user turn with a special token",
            where=tokenizer.path,
            expected="prefix, the user's words, a special token",
            actual=repr(rendered),
            fix="give prompts from a file: text.kinds.NAME={source:file,path:prompts.jsonl}",
        )
    return UserTurn(prefix, following[0], suffix.removeprefix(tokenizer.spell(following[0])))


def next_turn(tokenizer: Tokenizer) -> str:
    """The text between the token that ends an answer and the words of the next user turn. Raises ModelError where the
    chat template shows no such place."""
    rendered = tokenizer.render([PROBE, f"{PROBE} And then?"], [REPLY])
    between = rendered.partition(REPLY)[2].partition(PROBE)[0]
    ends = tokenizer.encode(between, add_special=False)[:1]
    if not ends or ends[0] not in stop_ids(tokenizer):
        raise ModelError(
            "the chat template does not end an answer with a token that the folder names as its end",
            where=tokenizer.path,
            expected="the answer, a token of eos_token_id, the next user turn",
            actual=repr(rendered),
            fix="give conversations of one turn: text.kinds.NAME.turns=1",
        )
    return between.removeprefix(tokenizer.spell(ends[0]))


def stop_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer. Raises ModelError where the folder names none: no answer would ever end."""
    if not tokenizer.eos_ids:
        raise ModelError(
            "the folder names no token that ends an answer",
            where=tokenizer.path,
            expected="eos_token_id in generation_config.json or config.json, or eos_token in tokenizer_config.json",
            fix="copy generation_config.json and tokenizer_config.json of the model",
        )
    return tokenizer.eos_ids


class SampledPrompts:
    """User turns that the target writes; an instance is a `Take`."""

    def __init__(self, kind: KindSettings, tokenizer: Tokenizer, seed: int, write: Write) -> None:
        self._kind, self._tokenizer, self._seed, self._write = kind, tokenizer, seed, write
        self._turn = user_turn(tokenizer)
        self._between = tokenizer.encode(next_turn(tokenizer), add_special=False) if kind.turns > 1 else []
        self._openings = [tokenizer.encode(self._turn.prefix + text, add_special=False) for text in kind.openings]

    def __call__(self, split: str, first: int, count: int) -> list[list[int]]:
        base, texts = seed_of(self._seed, split, self._kind.openings), self._kind.openings
        numbers = range(first, first + count)
        requests = [self._request(n, self._openings[n % len(texts)], base + n) for n in numbers]
        written = zip(numbers, self._write(requests, "user turns"), strict=True)
        ended = [
            (texts[n % len(texts)] + self._tokenizer.decode(ids[:-1])).strip() for n, ids in written if self._ended(ids)
        ]
        return [self._tokenizer.encode_chat([turn]) for turn in dict.fromkeys(ended) if turn]

    def follow(self, answered: Sequence[list[int]], label: str) -> list[list[int]]:
        """Token ids of conversations that ended with an answer, each with one more user turn, up to its answer.
        Truncated turns are left out."""
        base, after = seed_of(self._seed, label), self._tokenizer.encode(self._turn.after, add_special=False)
        requests = [self._request(n, [*ids, *self._between], base + n) for n, ids in enumerate(answered)]
        written = self._write(requests, "user turns") if requests else []
        pairs = zip(requests, written, strict=True)
        return [[*request.prompt_ids, *ids, *after] for request, ids in pairs if self._ended(ids) and len(ids) > 1]

    def _request(self, number: int, prompt: Sequence[int], seed: int) -> Request:
        """A request to write a user turn after `prompt`."""
        kind = self._kind
        return Request(
            id=number,
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(max_new_tokens=kind.prompt_tokens, temperature=kind.prompt_temperature, seed=seed),
            eos_token_ids=stop_ids(self._tokenizer),
            stop_token_ids=frozenset([self._turn.end]),
        )

    def _ended(self, written: list[int]) -> bool:
        """Whether the turn was not truncated, and no other special token ended it."""
        return bool(written) and written[-1] == self._turn.end


def _encoded(text: str, kind: KindSettings, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt in the markup of `kind`."""
    return tokenizer.encode(text) if kind.raw else tokenizer.encode_chat([kind.template.replace(PLACE, text)])


def open_prompts(kind: KindSettings, tokenizer: Tokenizer, seed: int, validation: int, write: Write) -> Take:
    """The prompts of `kind`; `validation` of a file's are held out. `write` has the target answer requests. Raises
    ModelError where the folder's markup does not serve the source, DataError for a file that cannot be used."""
    if kind.source == "target":
        return SampledPrompts(kind, tokenizer, seed, write)
    read = {"arithmetic": _arithmetic, "windows": _windows, "functions": _functions, "file": _file}[kind.source]
    splits = cache(lambda: read(kind, tokenizer, random.Random(f"{kind.source}-{seed}"), validation))

    def take(split: str, first: int, count: int) -> list[list[int]]:
        chosen = splits()[split == VALIDATION][first : first + count]
        return [ids for ids in chosen if len(ids) <= kind.prompt_tokens]

    return take


def _arithmetic(kind: KindSettings, tokenizer: Tokenizer, rng: random.Random, validation: int) -> Splits:
    counts = {"heldout": validation, "train": kind.count}
    splits = [problems(rng.randrange(1 << 31), count, split) for split, count in counts.items()]
    held_out, training = ([_encoded(problem.question, kind, tokenizer) for problem in each] for each in splits)
    return training, held_out


def _windows(kind: KindSettings, tokenizer: Tokenizer, rng: random.Random, validation: int) -> Splits:
    def windows(files: Sequence[Path], count: int) -> list[list[int]]:
        sources = [source for path in files if (source := read_source(path)) is not None]
        tokens = np.concatenate([np.asarray(tokenizer.encode(source)) for source in sources])
        least, most = min(MIN_WINDOW, kind.prompt_tokens), kind.prompt_tokens
        drawn = [(rng.randint(least, most), rng.randrange(len(tokens) - most)) for _ in range(count)]
        return [tokens[start : start + length].tolist() for length, start in drawn]

    held_out = windows(heldout_files(), validation)
    return windows(training_files(), kind.count), held_out


def _functions(kind: KindSettings, tokenizer: Tokenizer, rng: random.Random, validation: int) -> Splits:
    """Functions of training modules, and functions of held-out modules that are no prompts of `data=code`."""
    evaluated = {beginning.prompt for beginning in function_beginnings()}
    training, held_out = (
        [found.prompt for path in files for found in beginnings_of(path) if found.prompt not in evaluated]
        for files in (training_files(), heldout_files())
    )
    rng.shuffle(training)
    held_out = held_out[:validation]
    return [_encoded(text, kind, tokenizer) for text in training], [
        _encoded(text, kind, tokenizer) for text in held_out
    ]


def _file(kind: KindSettings, tokenizer: Tokenizer, rng: random.Random, validation: int) -> Splits:
    """The prompts of a file; evenly spread ones, a tenth of it at most, are held out."""
    path = Path(str(kind.path))
    if path.suffix == ".txt":
        texts = [text.strip() for text in path.read_text(encoding="utf-8").split("\n\n")]
        prompts = [_encoded(text, kind, tokenizer) for text in texts if text]
    else:
        found = load_prompts(JsonlData(path=str(path), raw=kind.raw)).prompts
        prompts = [p.encode(tokenizer) if p.turns else _encoded(p.text, kind, tokenizer) for p in found]
    if len(prompts) < 2:
        raise ValueError(f"{path}: expected at least 2 prompts, one of them held out, got {len(prompts)}")
    step = max(len(prompts) // validation, min(10, len(prompts)))
    training = [prompt for number, prompt in enumerate(prompts) if number % step]
    rng.shuffle(training)
    return training, prompts[::step]
