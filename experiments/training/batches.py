"""Text as flat tensors on the device: a batch is a few gathers, without a loop over rows or a readback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from experiments.app.files import whole_file

WIDTH_MULTIPLE = 32  # batches are as wide as their longest row, rounded up, so that few shapes occur

SAMPLED_ROWS = 32
LARGEST_UINT16_VOCABULARY = 1 << 16


@dataclass(frozen=True)
class Continuation:
    """One prompt with the target's continuation; `tokens[start:]` is the continuation."""

    tokens: list[int]
    start: int


@dataclass(frozen=True)
class Text:
    """Prompts with continuations, concatenated."""

    tokens: np.ndarray  # [sum of lengths], uint16 or uint32
    lengths: np.ndarray  # [R] int64: tokens of prompt and continuation
    starts: np.ndarray  # [R] int64: tokens of the prompt

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the target wrote as answers."""
        return int((self.lengths - self.starts).sum())

    @property
    def prompts(self) -> list[list[int]]:
        first = np.cumsum(self.lengths) - self.lengths
        return [self.tokens[i : i + n].tolist() for i, n in zip(first, self.starts, strict=True)]

    @classmethod
    def of(cls, sequences: Sequence[Continuation], vocab_size: int) -> Text:
        """The sequences; tokens of a vocabulary that 16 bits number take 16 bits, else 32."""
        dtype = np.uint16 if vocab_size <= LARGEST_UINT16_VOCABULARY else np.uint32
        parts = [np.asarray(sequence.tokens, dtype=dtype) for sequence in sequences]
        lengths = np.asarray([len(part) for part in parts], dtype=np.int64)
        starts = np.asarray([sequence.start for sequence in sequences], dtype=np.int64)
        return cls(np.concatenate([*parts, np.empty(0, dtype)]), lengths, starts)

    @classmethod
    def join(cls, texts: Sequence[Text]) -> Text:
        """All `texts`, at least one, as one."""
        parts = zip(*((text.tokens, text.lengths, text.starts) for text in texts), strict=True)
        return cls(*(np.concatenate(part) for part in parts))

    @classmethod
    def read(cls, path: Path) -> Text:
        """What `write` has stored."""
        return cls(**load_file(path))

    def write(self, path: Path) -> None:
        """Store the text as a safetensors file, which appears in one move."""
        with whole_file(path) as partial:
            save_file({"tokens": self.tokens, "lengths": self.lengths, "starts": self.starts}, partial)


@dataclass(frozen=True)
class TrainingBatch:
    """Rows of prompt and continuation: the tokens from `starts` to `lengths` are the target's."""

    tokens: Tensor  # [B, T] int64, zeros past a row's end
    lengths: Tensor  # [B] int64
    starts: Tensor  # [B] int64
    num_tokens: int  # tokens of all continuations

    @property
    def within(self) -> Tensor:
        """[B, T] bool: whether a position belongs to its row's text."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    def continues(self, offset: int) -> Tensor:
        """[B, T] bool: whether position t + offset of a row belongs to its continuation."""
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device) + offset
        return (positions >= self.starts[:, None]) & (positions < self.lengths[:, None])


def shifted(values: Tensor, by: int) -> Tensor:
    """`values [B, T, ...]` with entry t + by at t, then zeros."""
    if by >= values.shape[1]:
        return torch.zeros_like(values)
    tail = values.new_zeros(values.shape[0], by, *values.shape[2:])
    return torch.cat([values[:, by:], tail], dim=1)


class ResponseSet:
    """Rows of text on the device, in batches of about as many tokens each. Rows of a batch have about the same length.
    Over an epoch every row occurs once, in another batch and order than in the epoch before; which, is a function of
    the seed."""

    def __init__(self, text: Text, device: torch.device | str, batch_tokens: int) -> None:
        if not len(text):
            raise ValueError("text: expected at least one continuation, got none")
        self.lengths, self.starts, self.device = text.lengths, text.starts, device
        self._widths = -(-self.lengths // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        self._tokens = torch.from_numpy(text.tokens.astype(np.int32)).to(device)
        self._offsets = np.cumsum(self.lengths) - self.lengths
        self._cuts = _cuts(np.sort(self._widths), batch_tokens)
        self._epoch: tuple[tuple[int, int], list[np.ndarray]] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return len(self._cuts)

    def batch(self, seed: int, number: int) -> TrainingBatch:
        """Batch `number` of an endless run over shuffled epochs, a pure function of its arguments."""
        epoch, place = divmod(number, self.num_batches)
        if self._epoch is None or self._epoch[0] != (seed, epoch):
            rng = np.random.default_rng([seed, epoch])
            rows = np.lexsort((rng.random(len(self)), self._widths))
            chosen = [rows[first:last] for first, last in self._cuts]
            self._epoch = (seed, epoch), [chosen[index] for index in rng.permutation(len(chosen))]
        return self.rows(self._epoch[1][place])

    def sample(self) -> TrainingBatch:
        """A few rows, the same at every call."""
        return self.rows(np.linspace(0, len(self) - 1, min(SAMPLED_ROWS, len(self))).astype(np.int64))

    def in_order(self) -> Iterator[TrainingBatch]:
        """All rows once, short ones first."""
        rows = np.argsort(self._widths, kind="stable")
        for first, last in self._cuts:
            yield self.rows(rows[first:last])

    def rows(self, indices: np.ndarray) -> TrainingBatch:
        """The rows `indices [B]`."""
        table = torch.from_numpy(np.stack([self._offsets[indices], self.lengths[indices], self.starts[indices]]))
        offsets, lengths, starts = table.to(self.device)
        places = torch.arange(int(self._widths[indices].max()), device=self.device)
        inside = places < lengths[:, None]
        tokens = self._tokens[torch.where(inside, offsets[:, None] + places, 0)].long()
        count = int((self.lengths[indices] - self.starts[indices]).sum())
        return TrainingBatch(torch.where(inside, tokens, 0), lengths, starts, count)

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """[V] int64: how often each token occurs in the continuations."""
        tokens = self._tokens.cpu().numpy()
        ends = np.repeat(self._offsets + self.starts, self.lengths)
        return np.bincount(tokens[np.arange(len(tokens)) >= ends], minlength=vocab_size)


def _cuts(widths: np.ndarray, batch_tokens: int) -> list[tuple[int, int]]:
    """Ranges of rows whose number times the largest of their rising `widths [R]` is at most `batch_tokens`, or of 1."""
    found, first = [], 0
    for row, width in enumerate(widths.tolist()):
        if row > first and (row - first + 1) * width > batch_tokens:
            found.append((first, row))
            first = row
    return [*found, (first, len(widths))]
