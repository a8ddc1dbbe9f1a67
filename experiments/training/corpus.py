"""Training text as token rows; batch `step` is a pure function of (seed, step), so a resumed run sees the same data.

Arithmetic rows hold whole chats, each row starting with one, and pad with an ignored label; code rows are random
windows of the concatenated files.

The tokenizer is byte-level BPE in which every digit is a token of its own. Single digits make column arithmetic
learnable for a small model, because a number always has the same spelling.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from experiments.data.arithmetic import Problem, problem_stream
from experiments.data.code import heldout_files, read_source, training_files

END, USER, ASSISTANT, MASK = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|mask|>"
SPECIAL_TOKENS = (END, USER, ASSISTANT, MASK)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|endoftext|>' }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
IGNORED = -100
EQUATION = r"\d+ [-+*/] \d+ = \d+"
DRILL_PROBLEMS = 4
TOKENIZER_SAMPLE_PROBLEMS = 6000


class Rows(NamedTuple):
    """`inputs` and `labels` `[rows, length]` int64; ignored labels are -100."""

    inputs: Tensor
    labels: Tensor

    @property
    def num_labels(self) -> int:
        return int((self.labels != IGNORED).sum())


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a special token; ValueError where the tokenizer is not of this family."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token}, expected {', '.join(SPECIAL_TOKENS)}")
    return found


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of `vocab_size` entries in all; the special tokens take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the sample yields a vocabulary of {tokenizer.get_vocab_size()}, expected {vocab_size}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the tokenizer, its config, the chat template and `generation_config.json` as transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": END,
        "pad_token": END,
        "mask_token": MASK,
        "additional_special_tokens": [USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    end = token_id(tokenizer, END)
    generation = {"eos_token_id": end, "pad_token_id": end, "do_sample": False}
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def chat_text(question: str, answer: str) -> str:
    """A question with its worked answer as one training document."""
    return f"{USER}{question}{ASSISTANT}{answer}{END}"


def drill_text(problems: Iterable[Problem]) -> str:
    """The equations of several problems without their stories: dense practice of the operations that occur."""
    equations = [eq for problem in problems for eq in re.findall(EQUATION, problem.solution)]
    questions = ", ".join(equation.split(" =")[0] for equation in equations)
    return chat_text(f"Work out {questions}.", "\n".join(f"So {equation}." for equation in equations))


def tokenizer_sample(seed: int) -> Iterator[str]:
    """Documents of both kinds for BPE training."""
    for problem in islice(problem_stream(f"tokenizer-{seed}"), TOKENIZER_SAMPLE_PROBLEMS):
        yield problem.question
        yield problem.solution
    yield from (source for path in training_files() if (source := read_source(path)) is not None)


def encode_files(tokenizer: Tokenizer, paths: list[Path]) -> np.ndarray:
    """Token ids of the files one after the other, each ending with the end token: `[n]` uint16."""
    end = token_id(tokenizer, END)
    sources = [source for path in paths if (source := read_source(path)) is not None]
    ids = [number for source in sources for number in (*tokenizer.encode(source).ids, end)]
    return np.asarray(ids, dtype=np.uint16)


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
        return self._whole_documents((chat_text(p.question, p.solution) for p in stream), rows, length)

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
