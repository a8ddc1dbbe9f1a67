"""A chunk: what is prefilled at one time, as tiles of a fixed width.

Each tile is a row of the forward with a first position of its own. All tiles store their keys of a layer before the
layer attends, so a tile sees the earlier tiles of its prompt, whether they are in this chunk or in one before. The
padding of a prompt is less than one tile.

Everything that differs between two chunks of a size is sent to the device in one copy: text, places, pages and sampling
parameters. So work over a chunk can be captured in a CUDA graph. It enters new requests into the state of the batch
as padding, and at its end lets those with complete prompts take part in steps. Nothing is read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from algorithms.runtime.algorithm import Batch, Observation, Prompts
from algorithms.runtime.batch import number_fields, write_numbers
from algorithms.runtime.paged_attention import PagedMixer
from algorithms.runtime.parts import StepParts
from algorithms.runtime.scheduler import Piece, tiles_of
from algorithms.runtime.staging import Arrays, Fields, Staging

Size = TypeVar("Size")
PASS_ROWS = 256
"""Rows of a product that share a pass over its weights on a GPU: up to so many a further row costs little, and beyond
every row costs its arithmetic."""


def tile_counts(most: int, dense: int | None = None) -> tuple[int, ...]:
    """Tiles that a chunk may have: powers of two, three times powers of two, and `most`. Above `dense`, where tiles
    take time, also five and seven times powers of two."""
    sizes = {step << bit for bit in range(most.bit_length()) for step in (1, 3)}
    if dense is not None:
        sizes |= {size for bit in range(most.bit_length()) for step in (5, 7) if (size := step << bit) > dense}
    return tuple(sorted({min(size, most) for size in sizes}))


def chunk_fields(size: int, tile: int, max_pages: int) -> Fields:
    """What a chunk of `size` tiles tells the device: first what there is of each tile, then of each prompt. There are
    at most as many prompts as tiles."""
    return {
        "rows": ((size,), torch.int64),
        "starts": ((size,), torch.int64),
        "counts": ((size,), torch.int32),
        "tokens": ((size, tile + 1), torch.int64),  # and the token behind the tile
        "prompt_rows": ((size,), torch.int64),
        "prompt_starts": ((size,), torch.int64),
        "prompt_counts": ((size,), torch.int32),
        "prompt_last": ((size,), torch.int64),
        "complete": ((size,), torch.int32),
        "pages": ((size, max_pages), torch.int32),
        **number_fields(size),
    }


def every_second(sizes: Sequence[Size]) -> Sequence[Size]:
    """Every second one of `sizes`, the last one among them."""
    return sizes[(len(sizes) - 1) % 2 :: 2]


class Chunk:
    """`size` tiles of `tile` tokens. Send what they hold, begin, run the target over `tokens`, and finish."""

    tokens: Tensor
    """[size, tile] int64, since `begin`."""

    def __init__(self, parts: StepParts, size: int, tile: int) -> None:
        max_pages, device = parts.state.page_table.shape[1], parts.resources.device
        self.size, self.tile, self._parts = size, tile, parts
        self._columns = torch.arange(tile + 1, device=device)
        self._staging = Staging(chunk_fields(size, tile, max_pages), device)

    @property
    def num_tokens(self) -> int:
        """Rows of a forward over the chunk, padding included."""
        return self.size * self.tile

    @property
    def sent(self) -> dict[str, Tensor]:
        """What was sent last, by the names of `chunk_fields`."""
        return self._staging.tensors

    def send(self, pieces: Sequence[Piece]) -> None:
        """Tell the device what the chunk is; the rest of it is padding. The rows and pages of `pieces` are theirs."""
        arrays = self._staging.arrays()
        for name in ("starts", "counts", "tokens", "prompt_starts", "prompt_counts", "prompt_last", "complete"):
            arrays[name].fill(0)
        for name in ("rows", "prompt_rows"):
            arrays[name].fill(self._parts.state.spare_row)
        tile = 0
        for place, piece in enumerate(pieces):
            self._write_prompt(arrays, place, tile, piece)
            tile += self._write_tiles(arrays, tile, piece)
        self._staging.send()

    def _write_tiles(self, arrays: Arrays, first: int, piece: Piece) -> int:
        """The tiles of a piece, from tile `first` on; returns their number. A piece without tokens has a tile for the
        token behind it."""
        running, start, count = piece
        text = np.array(running.request.prompt_ids[start : start + count + 1])
        num_tiles = tiles_of(count, self.tile)
        for index in range(num_tiles):
            part = text[index * self.tile : (index + 1) * self.tile + 1]
            arrays["tokens"][first + index, : len(part)] = part
            arrays["counts"][first + index] = len(part) - 1
        arrays["rows"][first : first + num_tiles] = running.row
        arrays["starts"][first : first + num_tiles] = start + np.arange(num_tiles) * self.tile
        return num_tiles

    def _write_prompt(self, arrays: Arrays, place: int, first_tile: int, piece: Piece) -> None:
        """The entry of a piece among the prompts. It is padding until the chunk is finished, and stays so where its
        prompt is not complete."""
        running, start, count = piece
        arrays["prompt_rows"][place], arrays["prompt_starts"][place] = running.row, start
        arrays["prompt_counts"][place] = count
        # A tile is followed by the next one of its prompt, so the tokens of a piece stand side by side.
        arrays["prompt_last"][place] = first_tile * self.tile + max(0, count - 1)
        arrays["complete"][place] = piece.is_last
        arrays["pages"][place, : len(running.pages)] = running.pages
        request = running.request
        length = start + count if piece.is_last else 0
        write_numbers(arrays, place, request.sampling, length, request.prompt_ids[-1], active=False)

    def begin(self, longest: int) -> PagedMixer:
        """Enter the requests and their text into the state, and plan a forward over `tokens`, of which no tile begins
        behind position `longest`."""
        parts, sent = self._parts, self.sent
        rows, counts, state = sent["rows"], sent["counts"], self._parts.state
        state.enter(sent["prompt_rows"], sent)
        spots = (sent["starts"][:, None] + self._columns).clamp(max=state.history.shape[1] - 1)
        state.write_text(rows, spots, sent["tokens"], counts + 1)
        self.tokens = sent["tokens"][:, :-1].contiguous()
        self._positions = spots[:, :-1].contiguous()
        self._batch: Batch = state.tiles(rows, sent["starts"], counts, max_length=longest)
        return PagedMixer.over(
            self._batch, self._positions, parts.cache, parts.resources, counts=counts, phase="prefill"
        )

    def finish(self, hidden: Tensor, features: list[Tensor]) -> None:
        """Show the drafter what the target made of the tiles: `hidden` and each of `features` are [size, tile, hidden].
        Requests whose prompts are complete take part in steps from now on."""
        sent = self.sent
        whose = (sent["prompt_rows"], sent["prompt_starts"], sent["prompt_counts"], sent["prompt_last"])
        self._parts.observe(
            Observation(
                batch=self._batch,
                tokens=self.tokens,
                next_tokens=sent["tokens"][:, 1:].contiguous(),
                features=features,
                hidden=hidden,
                positions=self._positions,
                counts=sent["counts"],
                prompts=Prompts(*whose, width=self.size * self.tile),
            )
        )
        self._parts.state.activate(sent["prompt_rows"], sent["complete"])
