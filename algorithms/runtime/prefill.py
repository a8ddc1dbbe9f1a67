"""Prefill: the target runs over parts of prompts, and the drafter sees the result.

What one step prefills is a chunk. It is cut into tiles of a fixed width, and each tile is a row of the forward with a
first position of its own. All tiles store their keys of a layer before the layer attends, so a tile sees the earlier
tiles of its prompt, whether they are in this chunk or in one before. The padding of a prompt is less than one tile.

A chunk runs at one of a few sizes, and everything that differs between two chunks of a size is sent to the device in
one copy: text, places, pages and sampling parameters. So a chunk is one CUDA graph where whole steps are captured, and
the same code elsewhere. It enters new requests into the state of the batch and lets complete ones take part in steps.

Nothing is read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from algorithms.runtime.algorithm import Observation, Prompts
from algorithms.runtime.batch import number_fields, write_numbers
from algorithms.runtime.cuda_graph import Captured, Recorder
from algorithms.runtime.paged_attention import PagedMixer
from algorithms.runtime.scheduler import Piece, tiles_of
from algorithms.runtime.staging import Arrays, Fields, Staging
from algorithms.runtime.step import StepParts


def tile_counts(most: int) -> tuple[int, ...]:
    """Rows that a forward may have: powers of two, three times powers of two, and `most`."""
    sizes = {step << bit for bit in range(most.bit_length()) for step in (1, 3)}
    return tuple(sorted({size for size in sizes if size < most} | {most}))


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
        "pages": ((size, max_pages), torch.int32),
        **number_fields(size),
    }


class Prefiller:
    """Runs chunks of up to `num_tiles` tiles of `tile` tokens, captured by `recorder` if there is one."""

    def __init__(self, parts: StepParts, tile: int, num_tiles: int, recorder: Recorder | None = None) -> None:
        self._parts, self._tile, self._recorder = parts, tile, recorder
        self.sizes = tile_counts(num_tiles)
        self._columns = torch.arange(tile + 1, device=parts.resources.device)
        max_pages = parts.state.page_table.shape[1]
        self._longest = max_pages * parts.resources.page_size
        self._staging = {
            size: Staging(chunk_fields(size, tile, max_pages), parts.resources.device) for size in self.sizes
        }
        self._captured: dict[int, Captured] = {}
        self._is_warm = parts.resources.device.type != "cuda" or not parts.resources.backend.capturable

    def prepare(self) -> None:
        """Capture every size, or compile what it launches, unless done. No request may be running."""
        if self._recorder is None:
            if not self._is_warm:
                self.warm_up()
            self._is_warm = True
            return
        # The largest first: the others then fit in the memory that it leaves.
        for size in reversed(self.sizes):
            if size not in self._captured:
                self._send(size, ())
                self._captured[size] = self._recorder(partial(self._forward, size, self._longest))

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Sizes that are captured, in tiles."""
        return tuple(size for size in self.sizes if size in self._captured)

    def warm_up(self) -> None:
        """Run every size of forward without a token: no request, cache or store is touched."""
        for size in self.sizes:
            self._send(size, ())
            self._forward(size, 0)

    def run(self, pieces: Sequence[Piece]) -> None:
        """Prefill `pieces`, whose rows and pages are theirs. Together they fit the tiles."""
        wanted = sum(tiles_of(piece.num_tokens, self._tile) for piece in pieces)
        size = next(size for size in self.sizes if size >= wanted)
        self._send(size, pieces)
        if size in self._captured:
            self._captured[size].replay()
        else:
            ends = (piece.start + tiles_of(piece.num_tokens, self._tile) * self._tile for piece in pieces)
            self._forward(size, max(ends) - self._tile)

    def _send(self, size: int, pieces: Sequence[Piece]) -> None:
        """Tell the device what the next chunk of `size` tiles is; the rest of it is padding."""
        staging = self._staging[size]
        arrays = staging.arrays()
        for name in ("starts", "counts", "tokens", "prompt_starts", "prompt_counts", "prompt_last"):
            arrays[name].fill(0)
        for name in ("rows", "prompt_rows"):
            arrays[name].fill(self._parts.state.spare_row)
        tile = 0
        for place, piece in enumerate(pieces):
            self._write_prompt(arrays, place, tile, piece)
            tile += self._write_tiles(arrays, tile, piece)
        staging.send()

    def _write_tiles(self, arrays: Arrays, first: int, piece: Piece) -> int:
        """The tiles of a piece, from tile `first` on; returns their number. A piece without tokens has a tile for the
        token behind it."""
        running, start, count = piece
        text = np.array(running.request.prompt_ids[start : start + count + 1])
        num_tiles = tiles_of(count, self._tile)
        for index in range(num_tiles):
            part = text[index * self._tile : (index + 1) * self._tile + 1]
            arrays["tokens"][first + index, : len(part)] = part
            arrays["counts"][first + index] = len(part) - 1
        arrays["rows"][first : first + num_tiles] = running.row
        arrays["starts"][first : first + num_tiles] = start + np.arange(num_tiles) * self._tile
        return num_tiles

    def _write_prompt(self, arrays: Arrays, place: int, first_tile: int, piece: Piece) -> None:
        """The entry of a piece among the prompts. A request whose prompt is complete takes part in steps; another
        stays padding."""
        running, start, count = piece
        arrays["prompt_rows"][place], arrays["prompt_starts"][place] = running.row, start
        arrays["prompt_counts"][place] = count
        # A tile is followed by the next one of its prompt, so the tokens of a piece stand side by side.
        arrays["prompt_last"][place] = first_tile * self._tile + max(0, count - 1)
        arrays["pages"][place, : len(running.pages)] = running.pages
        request, done = running.request, piece.is_last
        length = start + count if done else 0
        write_numbers(arrays, place, request.sampling, length, request.prompt_ids[-1], done)

    def _forward(self, size: int, longest: int) -> None:
        """The chunk that was sent last, of `size` tiles that begin at position `longest` at most."""
        parts, values = self._parts, self._staging[size].tensors
        rows, counts = values["rows"], values["counts"]
        parts.state.enter(values["prompt_rows"], values)
        spots = (values["starts"][:, None] + self._columns).clamp(max=parts.state.history.shape[1] - 1)
        parts.state.write_text(rows, spots, values["tokens"], counts + 1)
        batch = parts.state.tiles(rows, values["starts"], counts, max_length=longest)
        tokens, next_tokens = values["tokens"][:, :-1].contiguous(), values["tokens"][:, 1:].contiguous()
        positions = spots[:, :-1].contiguous()
        mixer = PagedMixer.over(batch, positions, parts.cache, parts.resources, counts=counts, phase="prefill")
        whose = (values["prompt_rows"], values["prompt_starts"], values["prompt_counts"], values["prompt_last"])
        prompts = Prompts(*whose, width=size * self._tile)
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
                prompts=prompts,
            )
        )
