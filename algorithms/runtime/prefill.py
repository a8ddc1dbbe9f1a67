"""Prefill between two steps: the target runs over a chunk of prompts, and the drafter sees the result.

A chunk runs at one of a few sizes, so it is one CUDA graph where whole steps are captured, and the same code elsewhere.
Where others decode, chunks ride in their steps instead, see `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from algorithms.runtime.chunk import Chunk
from algorithms.runtime.cuda_graph import Captured, Recorder
from algorithms.runtime.parts import StepParts
from algorithms.runtime.scheduler import Piece, tiles_of


class Prefiller:
    """Runs chunks, captured by `recorder` if there is one. `chunks` have different sizes, in ascending order."""

    def __init__(self, parts: StepParts, chunks: Sequence[Chunk], recorder: Recorder | None = None) -> None:
        self._parts, self.chunks, self._recorder = parts, chunks, recorder
        self._longest = parts.state.page_table.shape[1] * parts.resources.page_size
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
        for chunk in reversed(self.chunks):
            if chunk.size not in self._captured:
                chunk.send(())
                self._captured[chunk.size] = self._recorder(partial(self._forward, chunk, self._longest))

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Sizes that are captured, in tiles."""
        return tuple(chunk.size for chunk in self.chunks if chunk.size in self._captured)

    def warm_up(self) -> None:
        """Run every size of forward without a token: no request, cache or store is touched."""
        for chunk in self.chunks:
            chunk.send(())
            self._forward(chunk, 0)

    def run(self, pieces: Sequence[Piece]) -> None:
        """Prefill `pieces`, whose rows and pages are theirs. Together they fit the largest chunk."""
        chunk = chunk_for(self.chunks, pieces)
        chunk.send(pieces)
        if chunk.size in self._captured:
            self._captured[chunk.size].replay()
        else:
            ends = (piece.start + tiles_of(piece.num_tokens, chunk.tile) * chunk.tile for piece in pieces)
            self._forward(chunk, max(ends) - chunk.tile)

    def _forward(self, chunk: Chunk, longest: int) -> None:
        """The chunk that was sent last, whose tiles begin at position `longest` at most."""
        mixer = chunk.begin(longest)
        chunk.finish(*self._parts.resources.target.model(chunk.tokens, mixer, self._parts.algorithm.capture))


def chunk_for(chunks: Sequence[Chunk], pieces: Sequence[Piece]) -> Chunk:
    """The smallest of `chunks`, which are in ascending order, that holds `pieces`."""
    wanted = sum(tiles_of(piece.num_tokens, chunks[0].tile) for piece in pieces)
    return next(chunk for chunk in chunks if chunk.size >= wanted)
