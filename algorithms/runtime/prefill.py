"""Prefill: the target runs over parts of prompts, and the drafter sees the result.

What one step prefills is a chunk. It is cut into tiles of a fixed width, and each tile is a row of the forward with a
first position of its own. All tiles store their keys of a layer before the layer attends, so a tile sees the earlier
tiles of its prompt, whether they are in this chunk or in one before. The padding of a prompt is less than one tile.

Nothing is read back, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms.runtime.algorithm import Batch, Observation, Prompts
from algorithms.runtime.batch import upload
from algorithms.runtime.paged_attention import PagedMixer
from algorithms.runtime.scheduler import Piece
from algorithms.runtime.step import StepParts


def tile_counts(most: int) -> tuple[int, ...]:
    """Rows that a forward may have: powers of two, three times powers of two, and `most`."""
    sizes = {step << bit for bit in range(most.bit_length()) for step in (1, 3)}
    return tuple(sorted({size for size in sizes if size < most} | {most}))


class Prefiller:
    """Runs chunks of up to `num_tiles` tiles of `tile` tokens."""

    def __init__(self, parts: StepParts, tile: int, num_tiles: int) -> None:
        self._parts, self._tile, self._sizes = parts, tile, tile_counts(num_tiles)
        self._columns = torch.arange(tile + 1, device=parts.resources.device)
        self._is_warm = parts.resources.device.type != "cuda" or not parts.resources.backend.capturable

    def prepare(self) -> None:
        """Run every size of forward once on a GPU, where kernels are compiled."""
        if not self._is_warm:
            self.warm_up()
        self._is_warm = True

    def warm_up(self) -> None:
        """Run every size of forward without a token: no request, cache or store is touched."""
        for size in self._sizes:
            self._forward([], [(0, 0, 0)] * size)

    def run(self, pieces: Sequence[Piece]) -> None:
        """Prefill `pieces`, whose requests are in their rows of the state. Together they fit the tiles."""
        tiles: list[tuple[int, int, int]] = []
        prompts: list[tuple[int, int, int, int]] = []
        for running, start, count in pieces:
            end = start + count
            tiles += [(running.row, at, min(self._tile, end - at)) for at in range(start, end, self._tile)]
            last = (len(tiles) - 1) * self._tile + tiles[-1][2] - 1 if count else 0
            prompts.append((running.row, start, count, last))
        # A drafter hears of a prompt of one token too.
        wanted = max(1, len(tiles))
        size = next(size for size in self._sizes if size >= wanted)
        self._forward(prompts, tiles + [(0, 0, 0)] * (size - len(tiles)))

    def _forward(self, prompts: Sequence[tuple[int, int, int, int]], tiles: Sequence[tuple[int, int, int]]) -> None:
        """One forward over `tiles`, each (state row, start, count), of `prompts`, each (state row, start, count, place
        of the last token in the flattened tiles)."""
        parts, width = self._parts, max((count for _, _, count, _ in prompts), default=0)
        lists = [*_columns_of(tiles, 3), *_columns_of(prompts, 4)]
        rows, starts, counts, owners, firsts, totals, last = upload(lists, parts.resources.device)
        counts = counts.to(torch.int32)
        batch = parts.state.tiles(rows, starts, counts, max_length=max(start for _, start, _ in tiles))
        tokens, next_tokens, positions = self._text(batch, counts)
        mixer = PagedMixer.over(batch, positions, parts.cache, parts.resources, counts=counts, phase="prefill")
        hidden, features = parts.resources.target.model(tokens, mixer, parts.algorithm.capture)
        parts.algorithm.observe(
            Observation(
                batch=batch,
                tokens=tokens,
                next_tokens=next_tokens,
                features=features,
                hidden=hidden,
                positions=positions,
                counts=counts,
                prompts=Prompts(owners, firsts, totals.to(torch.int32), last, width),
            )
        )

    def _text(self, batch: Batch, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, the tokens behind them, and positions, each [tiles, tile] int64; zeros and valid positions past
        `counts`."""
        last = batch.history.shape[1] - 1
        spots = (batch.lengths[:, None] + self._columns).clamp(max=last)
        # Behind a prompt the row may hold what a former request left there.
        text = torch.where(self._columns <= counts[:, None], batch.history.gather(1, spots), 0)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous(), spots[:, :-1].contiguous()


def _columns_of(table: Sequence[tuple[int, ...]], width: int) -> list[list[int]]:
    return [[entry[column] for entry in table] for column in range(width)]
