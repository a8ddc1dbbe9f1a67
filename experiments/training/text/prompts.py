"""Prompts of every source as token ids. A prompt is a function of the settings, the split and its number alone."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from algorithms.runtime.models.tokenizer import Tokenizer
from algorithms.runtime.request import Request
from algorithms.runtime.sampling_params import SamplingParams
from experiments.data.arithmetic import problem_stream
from experiments.data.code import beginnings_of, function_beginnings, heldout_files, read_source, training_files
from experiments.data.prompts import JsonlData, load_prompts
from experiments.training.text.markup import next_turn, stop_ids, user_turn
from experiments.training.text.settings import PLACE, KindSettings

TRAINING, VALIDATION = "training", "validation"
MIN_WINDOW = 24
Write = Callable[[Sequence[Request], str], list[list[int]]]


def seed_of(*parts: object) -> int:
    """A seed of 62 bits for whatever `parts` name."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 2


class Prompts(Protocol):
    """The prompts of one kind."""

    def take(self, split: str, first: int, count: int) -> list[list[int]]:
        """Token ids of prompts number `first` … `first` + `count` - 1 of a split, fewer where the source ends or a
        prompt cannot be used."""
        ...


class SampledPrompts:
    """User turns that the target writes."""

    def __init__(self, kind: KindSettings, tokenizer: Tokenizer, seed: int, write: Write) -> None:
        self._kind, self._tokenizer, self._seed, self._write = kind, tokenizer, seed, write
        self._turn = user_turn(tokenizer)
        self._between = tokenizer.encode(next_turn(tokenizer), add_special=False) if kind.turns > 1 else []
        self._openings = [tokenizer.encode(self._turn.prefix + text, add_special=False) for text in kind.openings]

    def take(self, split: str, first: int, count: int) -> list[list[int]]:
        kind = self._kind
        base = seed_of(self._seed, split, kind.openings)
        numbers = range(first, first + count)
        requests = [self._asking(n, self._openings[n % len(self._openings)], base + n) for n in numbers]
        written = self._write(requests, "user turns")
        turns = [self._turn_of(request, ids) for request, ids in zip(requests, written, strict=True)]
        return [self._tokenizer.encode_chat([turn]) for turn in dict.fromkeys(turns) if turn]

    def follow(self, answered: Sequence[list[int]], label: str) -> list[list[int]]:
        """Token ids of conversations that ended with an answer, each with one more user turn, up to where its answer
        begins. Turns that were cut off are left out."""
        base, after = seed_of(self._seed, label), self._tokenizer.encode(self._turn.after, add_special=False)
        requests = [self._asking(n, [*ids, *self._between], base + n) for n, ids in enumerate(answered)]
        written = self._write(requests, "user turns") if requests else []
        pairs = zip(requests, written, strict=True)
        return [[*request.prompt_ids, *ids, *after] for request, ids in pairs if self._ended(ids) and len(ids) > 1]

    def _asking(self, number: int, prompt: Sequence[int], seed: int) -> Request:
        """A request to write what a user says behind `prompt`."""
        kind = self._kind
        return Request(
            id=number,
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(max_new_tokens=kind.prompt_tokens, temperature=kind.prompt_temperature, seed=seed),
            eos_token_ids=stop_ids(self._tokenizer),
            stop_token_ids=frozenset([self._turn.end]),
        )

    def _ended(self, written: list[int]) -> bool:
        """Whether the turn was not cut off, and no other special token ended it."""
        return bool(written) and written[-1] == self._turn.end

    def _turn_of(self, request: Request, written: list[int]) -> str:
        """The words of a first turn; none where it has not ended."""
        if not self._ended(written):
            return ""
        opening = self._kind.openings[request.id % len(self._openings)]
        return (opening + self._tokenizer.decode(written[:-1])).strip()


class ListedPrompts:
    """Prompts out of lists of texts, one for each split."""

    def __init__(self, kind: KindSettings, splits: Callable[[str], list[list[int]]]) -> None:
        self._kind, self._splits = kind, splits

    def take(self, split: str, first: int, count: int) -> list[list[int]]:
        chosen = self._splits(split)[first : first + count]
        return [ids for ids in chosen if len(ids) <= self._kind.prompt_tokens]


class ArithmeticPrompts:
    """Word problems, as many as are asked for."""

    def __init__(self, kind: KindSettings, tokenizer: Tokenizer, seed: int) -> None:
        self._kind, self._tokenizer, self._seed = kind, tokenizer, seed

    def take(self, split: str, first: int, count: int) -> list[list[int]]:
        stream = problem_stream(f"drafter-{self._seed}-{first}", "train" if split == TRAINING else "heldout")
        questions = dict.fromkeys(problem.question for problem in islice(stream, count))
        return [encoded(question, self._kind, self._tokenizer) for question in questions]


class WindowPrompts:
    """Random pieces of the standard library's source."""

    def __init__(self, kind: KindSettings, tokenizer: Tokenizer, seed: int) -> None:
        self._kind, self._tokenizer, self._seed = kind, tokenizer, seed

    @cached_property
    def _training(self) -> np.ndarray:
        return self._concatenated(training_files())

    @cached_property
    def _validation(self) -> np.ndarray:
        return self._concatenated(heldout_files())

    def _concatenated(self, files: Sequence[Path]) -> np.ndarray:
        ids = [self._tokenizer.encode(source) for path in files if (source := read_source(path)) is not None]
        return np.concatenate([np.asarray(piece, dtype=np.int64) for piece in ids])

    def take(self, split: str, first: int, count: int) -> list[list[int]]:
        tokens = self._training if split == TRAINING else self._validation
        rng, prompts = random.Random(f"windows-{self._seed}-{split}-{first}"), []
        for _ in range(count):
            length = rng.randint(min(MIN_WINDOW, self._kind.prompt_tokens), self._kind.prompt_tokens)
            start = rng.randrange(len(tokens) - length)
            prompts.append(tokens[start : start + length].tolist())
        return prompts


def encoded(text: str, kind: KindSettings, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt, as `kind` puts it to the target."""
    return tokenizer.encode(text) if kind.raw else tokenizer.encode_chat([kind.template.replace(PLACE, text)])


def open_prompts(kind: KindSettings, tokenizer: Tokenizer, seed: int, validation: int, write: Write) -> Prompts:
    """The prompts that `kind` asks for; `validation` of a file's are kept apart. `write` lets the target write.

    Raises ModelError where the folder's markup does not serve the source, DataError for a file that cannot be used.
    """
    if kind.source == "target":
        return SampledPrompts(kind, tokenizer, seed, write)
    if kind.source == "arithmetic":
        return ArithmeticPrompts(kind, tokenizer, seed)
    if kind.source == "windows":
        return WindowPrompts(kind, tokenizer, seed)
    read = _functions if kind.source == "functions" else _file
    lists: dict[str, list[list[int]]] = {}

    def splits(name: str) -> list[list[int]]:
        if not lists:
            training, held_out = read(kind, tokenizer, validation)
            random.Random(f"{kind.source}-{seed}").shuffle(training)
            lists.update({TRAINING: training, VALIDATION: held_out})
        return lists[name]

    return ListedPrompts(kind, splits)


def _functions(kind: KindSettings, tokenizer: Tokenizer, validation: int) -> tuple[list[list[int]], list[list[int]]]:
    """Functions of training modules, and functions of held-out modules that `data=code` does not ask for."""
    evaluated = {beginning.prompt for beginning in function_beginnings()}
    training = [beginning.prompt for path in training_files() for beginning in beginnings_of(path)]
    held_out = [beginning.prompt for path in heldout_files() for beginning in beginnings_of(path)]
    kept = [text for text in held_out if text not in evaluated][:validation]
    return [encoded(text, kind, tokenizer) for text in training], [encoded(text, kind, tokenizer) for text in kept]


def _file(kind: KindSettings, tokenizer: Tokenizer, validation: int) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts of a file; evenly spread ones, a tenth of it at most, are held out."""
    path = Path(str(kind.path))
    if path.suffix == ".txt":
        texts = [text.strip() for text in path.read_text(encoding="utf-8").split("\n\n")]
        prompts = [encoded(text, kind, tokenizer) for text in texts if text]
    else:
        found = load_prompts(JsonlData(path=str(path), raw=kind.raw)).prompts
        prompts = [
            prompt.encode(tokenizer) if prompt.turns else encoded(prompt.text, kind, tokenizer) for prompt in found
        ]
    if len(prompts) < 2:
        raise ValueError(f"{path}: expected at least 2 prompts, one of them held out, got {len(prompts)}")
    step = max(len(prompts) // validation, min(10, len(prompts)))
    held_out = set(range(0, len(prompts), step))
    return [p for i, p in enumerate(prompts) if i not in held_out], [prompts[i] for i in sorted(held_out)]
