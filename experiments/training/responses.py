"""The drafter's training text: what the target itself writes, greedily, after training-split prompts.

A drafter is judged by agreement with its target, so the labels are the target's own tokens, right or wrong. Code
prompts are function beginnings and random windows from the modules the target was trained on, never from held-out ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from algorithms.runtime.models.decoder import Decoder
from experiments.data.arithmetic import problems
from experiments.data.code import beginnings_of, training_files
from experiments.training.generate import greedy
from experiments.training.tokenizer import chat_prompt

GENERATION_BATCH = 256
MIN_WINDOW, MAX_WINDOW = 24, 160


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


def respond(
    model: Decoder, prompts: Sequence[list[int]], max_new_tokens: int, stop: int, label: str | None = None
) -> list[Continuation]:
    """Greedy continuations of `prompts`; shows a progress bar when `label` is given."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = [order[i : i + GENERATION_BATCH] for i in range(0, len(order), GENERATION_BATCH)]
    sequences: dict[int, Continuation] = {}
    for batch in track(batches, description=label or "", disable=label is None):
        outputs = greedy(model, [prompts[i] for i in batch], max_new_tokens, stop, GENERATION_BATCH)
        for index, output in zip(batch, outputs, strict=True):
            sequences[index] = Continuation(prompts[index] + output, len(prompts[index]))
    return [sequences[i] for i in range(len(prompts))]


def save_sequences(sequences: Sequence[Continuation], path: Path) -> None:
    """Store as safetensors: concatenated tokens, lengths and starts."""
    content = {
        "tokens": np.concatenate([np.asarray(s.tokens, dtype=np.int32) for s in sequences]),
        "lengths": np.asarray([len(s.tokens) for s in sequences], dtype=np.int32),
        "starts": np.asarray([s.start for s in sequences], dtype=np.int32),
    }
    save_file(content, path)


def load_sequences(path: Path) -> list[Continuation]:
    """Inverse of `save_sequences`."""
    content = load_file(path)
    pieces = np.split(content["tokens"], np.cumsum(content["lengths"])[:-1])
    return [Continuation(p.tolist(), int(s)) for p, s in zip(pieces, content["starts"], strict=True)]


def pad(sequences: Sequence[Continuation], filler: int) -> torch.Tensor:
    """Right-padded tokens `[B, T]` int64."""
    width = max(len(s.tokens) for s in sequences)
    return torch.tensor([s.tokens + [filler] * (width - len(s.tokens)) for s in sequences])

