"""Text as flat tensors on the device: a batch is a few gathers, without a loop over rows or a readback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.training.text.shards import Text

WIDTH_MULTIPLE = 32
"""Batches are as wide as their longest row, rounded up, so that few shapes occur."""

SAMPLED_ROWS = 32


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

    @property
    def within(self) -> Tensor:
        """[B, T] bool: whether a position belongs to its row's text."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

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
    """Rows of text on the device, in batches of about as many tokens each.

    Rows of a batch have about the same length. Over an epoch every row occurs once, in another batch and order than in
    the epoch before; which, is a function of the seed.
    """

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
