"""Training text as token rows; batch `step` is a pure function of (seed, step), so a resumed run sees the same data.

Arithmetic rows hold whole chats, each row starting with one, and pad with an ignored label; code rows are random
windows of the concatenated files.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from experiments.data.arithmetic import Problem, problem_stream
from experiments.data.code import heldout_files, read_source, training_files
from experiments.training.tokenizer import END, chat_prompt, token_id

IGNORED = -100
EQUATION = r"\d+ [-+*/] \d+ = \d+"
DRILL_PROBLEMS = 4
TOKENIZER_SAMPLE_PROBLEMS = 6000


@dataclass(frozen=True)
class Rows:
    """`inputs` and `labels` `[rows, length]` int64; ignored labels are -100."""

    inputs: Tensor
    labels: Tensor


def chat_text(problem: Problem) -> str:
    """A problem with its worked answer as one training document."""
    return chat_prompt(problem.question) + problem.solution + END


def drill_text(problems: Iterable[Problem]) -> str:
    """The equations of several problems without their stories: dense practice of the operations that occur."""
    equations = [eq for problem in problems for eq in re.findall(EQUATION, problem.solution)]
    questions = ", ".join(equation.split(" =")[0] for equation in equations)
    return chat_prompt(f"Work out {questions}.") + "\n".join(f"So {equation}." for equation in equations) + END


def tokenizer_sample(seed: int) -> Iterator[str]:
    """Documents of both kinds for BPE training."""
    stream = problem_stream(f"tokenizer-{seed}")
    for _ in range(TOKENIZER_SAMPLE_PROBLEMS):
        problem = next(stream)
        yield problem.question
        yield problem.solution
    for path in training_files():
        source = read_source(path)
        if source is not None:
            yield source


def encode_files(tokenizer: Tokenizer, paths: list[Path]) -> np.ndarray:
    """Token ids of the files one after the other, each ending with the end token: `[n]` uint16."""
    end = token_id(tokenizer, END)
    pieces: list[int] = []
    for path in paths:
        source = read_source(path)
        if source is not None:
            pieces += [*tokenizer.encode(source).ids, end]
    return np.asarray(pieces, dtype=np.uint16)


def join(first: Rows, second: Rows) -> Rows:
    """Rows of equal length one below the other."""
    return Rows(torch.cat([first.inputs, second.inputs]), torch.cat([first.labels, second.labels]))


class Corpus:
    """Batches of both kinds of text for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.end = token_id(tokenizer, END)
        self.train_code = encode_files(tokenizer, training_files())
        self.heldout_code = encode_files(tokenizer, heldout_files())

    def code_rows(self, step: int | str, rows: int, length: int, split: str = "train") -> Rows:
        """Random windows of the code tokens."""
        tokens = self.train_code if split == "train" else self.heldout_code
        rng = random.Random(f"code-{split}-{self.seed}-{step}")
        starts = [rng.randrange(len(tokens) - length) for _ in range(rows)]
        windows = torch.from_numpy(np.stack([tokens[s : s + length + 1].astype(np.int64) for s in starts]))
        return Rows(windows[:, :-1], windows[:, 1:])

    def arithmetic_rows(self, step: int | str, rows: int, length: int, split: str = "train") -> Rows:
        """Whole chats, as many as fit into each row."""
        stream = problem_stream(f"{self.seed}-{step}", split)
        return self._whole_documents(map(chat_text, stream), rows, length)

    def drill_rows(self, step: int, rows: int, length: int) -> Rows:
        """Whole drills, as many as fit into each row."""
        stream = problem_stream(f"{self.seed}-drill-{step}")
        drills = iter(lambda: drill_text(islice(stream, DRILL_PROBLEMS)), None)
        return self._whole_documents(drills, rows, length)

    def _whole_documents(self, documents: Iterator[str], rows: int, length: int) -> Rows:
        inputs = torch.full((rows, length + 1), self.end)
        labels = torch.full((rows, length + 1), IGNORED)
        row = column = 0
        while row < rows:
            ids = torch.tensor(self.tokenizer.encode(next(documents)).ids)
            if column + len(ids) > length + 1:
                row, column = row + 1, 0
            if row < rows:
                inputs[row, column : column + len(ids)] = labels[row, column : column + len(ids)] = ids
                column += len(ids)
        return Rows(inputs[:, :-1].contiguous(), labels[:, 1:].contiguous())
