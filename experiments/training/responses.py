"""The drafters' training text: what the target writes greedily after training-split prompts.

A drafter must agree with its target, so the labels are the target's own tokens, right or wrong. Code prompts are
function beginnings and random windows from the modules that the target was trained on, never from held-out modules.
All drafters learn from the same text. It is written once per target and settings, and kept.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.progress import track
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from algorithms.runtime.models.loading import Target
from experiments.data.arithmetic import heldout_problems, problems
from experiments.data.code import beginnings_of, function_beginnings, heldout_files, training_files
from experiments.training.corpus import encode_files
from experiments.training.dense_generation import greedy
from experiments.training.tokenizer import END, chat_prompt, token_id

KINDS = ("arithmetic", "code")
MIN_WINDOW, MAX_WINDOW = 24, 160


@dataclass
class ResponseSettings:
    """How much text the target writes for training, how long it may be, and where it is kept."""

    arithmetic_prompts: int = 6000
    function_prompts: int = 2000
    window_prompts: int = 1200
    max_arithmetic_tokens: int = 100
    max_code_tokens: int = 160
    validation_prompts: int = 48
    seed: int = 0
    generation_batch: int = 256
    folder: str = "outputs/responses"


@dataclass(frozen=True)
class Continuation:
    """One prompt with the target's continuation; `tokens[start:]` is the continuation."""

    tokens: list[int]
    start: int


def arithmetic_prompts(tokenizer: Tokenizer, seed: int, count: int, split: str = "train") -> list[list[int]]:
    """Token ids of chat-formatted questions."""
    found = problems(f"drafter-{seed}", count, split)
    return [tokenizer.encode(chat_prompt(problem.question)).ids for problem in found]


def window_prompts(tokens: np.ndarray, seed: int | str, count: int) -> list[list[int]]:
    """Random windows of a concatenated corpus `tokens [n]`."""
    rng = random.Random(f"windows-{seed}")
    prompts = []
    for _ in range(count):
        length = rng.randint(MIN_WINDOW, MAX_WINDOW)
        start = rng.randrange(len(tokens) - length)
        prompts.append(tokens[start : start + length].tolist())
    return prompts


def function_prompts(tokenizer: Tokenizer, seed: int, count: int) -> list[list[int]]:
    """Beginnings of functions of the training modules."""
    found = [beginning.prompt for path in training_files() for beginning in beginnings_of(path)]
    random.Random(f"functions-{seed}").shuffle(found)
    return [tokenizer.encode(prompt).ids for prompt in found[:count]]


class ResponseSource:
    """The target's continuations of training, validation and evaluation prompts."""

    def __init__(self, target: Target, tokenizer: Tokenizer, settings: ResponseSettings) -> None:
        self.target, self.tokenizer, self.settings = target, tokenizer, settings
        self.stop = token_id(tokenizer, END)

    def _respond(self, prompts: Sequence[list[int]], kind: str, label: str | None = None) -> list[Continuation]:
        settings = self.settings
        limit = settings.max_arithmetic_tokens if kind == "arithmetic" else settings.max_code_tokens
        size = settings.generation_batch
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        sequences: dict[int, Continuation] = {}
        for batch in track(batches, description=label or "", disable=label is None):
            outputs = greedy(self.target.model, [prompts[i] for i in batch], limit, self.stop, size)
            for index, output in zip(batch, outputs, strict=True):
                sequences[index] = Continuation(prompts[index] + output, len(prompts[index]))
        return [sequences[i] for i in range(len(prompts))]

    def _training_prompts(self, kind: str) -> list[list[int]]:
        settings, seed = self.settings, self.settings.seed
        if kind == "arithmetic":
            return arithmetic_prompts(self.tokenizer, seed, settings.arithmetic_prompts)
        windows = window_prompts(encode_files(self.tokenizer, training_files()), seed, settings.window_prompts)
        return function_prompts(self.tokenizer, seed, settings.function_prompts) + windows

    def _stored_at(self, kind: str) -> Path:
        """A name of its own for every target and every setting that changes the text."""
        settings = {
            key: value for key, value in asdict(self.settings).items() if key not in ("folder", "generation_batch")
        }
        weights = hashlib.sha256()
        for path in sorted(self.target.path.glob("*.safetensors")):
            weights.update(path.read_bytes())
        name = hashlib.sha256(f"{kind} {sorted(settings.items())} {weights.hexdigest()}".encode()).hexdigest()
        return Path(self.settings.folder) / f"{kind}-{name[:16]}.safetensors"

    def training(self, kind: str) -> list[Continuation]:
        """Continuations of training-split prompts, from the file of an earlier run if there is one."""
        path = self._stored_at(kind)
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            save_sequences(self._respond(self._training_prompts(kind), kind, f"target writes {kind}"), path)
        return load_sequences(path)

    def validation(self, kind: str) -> list[Continuation]:
        """Continuations of held-out text that is not among the evaluation prompts."""
        count = self.settings.validation_prompts
        if kind == "arithmetic":
            prompts = arithmetic_prompts(self.tokenizer, self.settings.seed, count, "heldout")
        else:
            prompts = window_prompts(encode_files(self.tokenizer, heldout_files()), "validation", count)
        return self._respond(prompts, kind)

    def evaluation(self, kind: str) -> list[Continuation]:
        """Continuations of the evaluation prompts `data=arithmetic` and `data=code`."""
        if kind == "arithmetic":
            texts = [chat_prompt(problem.question) for problem in heldout_problems()]
        else:
            texts = [beginning.prompt for beginning in function_beginnings()]
        return self._respond([self.tokenizer.encode(text).ids for text in texts], kind)


def save_sequences(sequences: Sequence[Continuation], path: Path) -> None:
    """Store as safetensors, in one move: concatenated tokens, lengths and starts."""
    content = {
        "tokens": np.concatenate([np.asarray(s.tokens, dtype=np.int32) for s in sequences]),
        "lengths": np.asarray([len(s.tokens) for s in sequences], dtype=np.int32),
        "starts": np.asarray([s.start for s in sequences], dtype=np.int32),
    }
    partial = path.with_suffix(".tmp")
    save_file(content, partial)
    partial.replace(path)


def load_sequences(path: Path) -> list[Continuation]:
    """Inverse of `save_sequences`."""
    content = load_file(path)
    pieces = np.split(content["tokens"], np.cumsum(content["lengths"])[:-1])
    return [Continuation(p.tolist(), int(s)) for p, s in zip(pieces, content["starts"], strict=True)]
