"""Text on disk: one safetensors file a shard, written once and in one move.

Several programs may fill one folder. A shard belongs to the program that holds the lock on its `.lock` file; the
system gives the lock back when that program ends, however it ends.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from experiments.app.whole_file import whole_file

LARGEST_UINT16_VOCABULARY = 1 << 16


@dataclass(frozen=True)
class Continuation:
    """One prompt with the target's continuation; `tokens[start:]` is the continuation."""

    tokens: list[int]
    start: int


@dataclass(frozen=True)
class Text:
    """Prompts with continuations, one behind the other."""

    tokens: np.ndarray
    """[sum of lengths], uint16 or uint32."""
    lengths: np.ndarray
    """[R] int64: tokens of prompt and continuation."""
    starts: np.ndarray
    """[R] int64: tokens of the prompt."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the target wrote as answers."""
        return int((self.lengths - self.starts).sum())

    @classmethod
    def of(cls, sequences: Sequence[Continuation], vocab_size: int) -> Text:
        """The sequences; tokens of a vocabulary that 16 bits number take 16 bits, else 32."""
        dtype = np.uint16 if vocab_size <= LARGEST_UINT16_VOCABULARY else np.uint32
        pieces = [np.asarray(sequence.tokens, dtype=dtype) for sequence in sequences]
        lengths = np.asarray([len(piece) for piece in pieces], dtype=np.int64)
        starts = np.asarray([sequence.start for sequence in sequences], dtype=np.int64)
        return cls(np.concatenate([*pieces, np.empty(0, dtype)]), lengths, starts)

    @classmethod
    def join(cls, texts: Sequence[Text]) -> Text:
        """All `texts`, at least one, as one."""
        parts = zip(*((text.tokens, text.lengths, text.starts) for text in texts), strict=True)
        return cls(*(np.concatenate(part) for part in parts))

    def sequences(self) -> list[Continuation]:
        """Inverse of `of`."""
        pieces = np.split(self.tokens, np.cumsum(self.lengths)[:-1]) if len(self) else []
        return [Continuation(p.tolist(), int(s)) for p, s in zip(pieces, self.starts, strict=True)]


class ShardFolder:
    """The shards of one kind of text; a name is a number or `validation`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def file(self, name: str) -> Path:
        """Where the shard is, or will be."""
        return self.path / f"{name}.safetensors"

    def holds(self, name: str) -> bool:
        """Whether the shard has been written."""
        return self.file(name).is_file()

    def read(self, name: str) -> Text:
        """A shard that has been written."""
        content = load_file(self.file(name))
        return Text(content["tokens"], content["lengths"], content["starts"])

    def write(self, name: str, text: Text) -> None:
        """Store a shard; it appears in one move."""
        with whole_file(self.file(name)) as partial:
            save_file({"tokens": text.tokens, "lengths": text.lengths, "starts": text.starts}, partial)

    @contextmanager
    def claim(self, name: str, wait: bool = False) -> Iterator[bool]:
        """Whether this program is the one to write the shard: it is missing, and nobody else writes it.

        With `wait`, a program that writes it is waited for; then the answer is False, unless that program failed.
        """
        with (self.path / f"{name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield not self.holds(name)
