"""Responses as padded tensors on the device: a batch is a few gathers, without a loop over rows or a readback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.training.responses import Continuation

WIDTH_MULTIPLE = 32
"""Batches are as wide as their longest row, rounded up, so that few shapes occur."""


@dataclass(frozen=True)
class TrainingBatch:
    """Rows of prompt and continuation: the tokens from `starts` to `lengths` are the target's."""

    tokens: Tensor
    """[B, T] int64, zeros behind a row's end."""
    lengths: Tensor
    """[B] int64."""
    starts: Tensor
    """[B] int64."""
    num_tokens: int
    """Tokens of all continuations."""

    def continues(self, offset: int) -> Tensor:
        """[B, T] bool: whether position t + offset of a row belongs to its continuation."""
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device) + offset
        return (positions >= self.starts[:, None]) & (positions < self.lengths[:, None])


def shifted(values: Tensor, by: int) -> Tensor:
    """`values [B, T, ...]` with entry t + by at t, zeros behind."""
    if by >= values.shape[1]:
        return torch.zeros_like(values)
    tail = values.new_zeros(values.shape[0], by, *values.shape[2:])
    return torch.cat([values[:, by:], tail], dim=1)


class ResponseSet:
    """Continuations of one kind, padded and on the device."""

    def __init__(self, sequences: Sequence[Continuation], device: torch.device | str) -> None:
        if not sequences:
            raise ValueError("responses: expected at least one, got none")
        self.lengths = np.asarray([len(s.tokens) for s in sequences])
        self.starts = np.asarray([s.start for s in sequences])
        padded = np.zeros((len(sequences), int(self.lengths.max())), dtype=np.int64)
        for row, sequence in zip(padded, sequences, strict=True):
            row[: len(sequence.tokens)] = sequence.tokens
        self.device = device
        self._tokens = torch.from_numpy(padded).to(device)

    def __len__(self) -> int:
        return len(self.lengths)

    def draw(self, rng: np.random.Generator, count: int) -> TrainingBatch:
        """`count` rows at random, with replacement."""
        return self.rows(rng.integers(len(self), size=count))

    def chunks(self, size: int) -> Iterator[TrainingBatch]:
        """All rows in order, `size` at a time."""
        for first in range(0, len(self), size):
            yield self.rows(np.arange(first, min(first + size, len(self))))

    def rows(self, indices: np.ndarray) -> TrainingBatch:
        """The rows `indices [B]`."""
        lengths, starts = self.lengths[indices], self.starts[indices]
        width = -(-int(lengths.max()) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        tokens = self._tokens[torch.from_numpy(indices).to(self.device), :width]
        return TrainingBatch(
            tokens,
            torch.from_numpy(lengths).to(self.device),
            torch.from_numpy(starts).to(self.device),
            int((lengths - starts).sum()),
        )

    def token_shares(self, vocab_size: int) -> np.ndarray:
        """[V] float64: how often each token occurs in the continuations, as a share."""
        positions = np.arange(self._tokens.shape[1])
        mine = (positions >= self.starts[:, None]) & (positions < self.lengths[:, None])
        counts = np.bincount(self._tokens.cpu().numpy()[mine], minlength=vocab_size)
        return counts / counts.sum()
