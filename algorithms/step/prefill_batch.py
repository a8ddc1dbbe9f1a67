"""A prefill batch: prompt tokens that run in one forward, as tiles of a fixed width, each with a first position.

All tiles store their keys of a layer before the layer attends, so a tile sees the earlier tiles of its prompt, in this
batch or an earlier one. Everything that differs between two batches of a size is sent to the device in one copy, so the
work can be captured in a CUDA graph. It enters new requests into the state of the batch as padding, and at its end
activates those with complete prompts.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from algorithms.algorithm import Batch, Observation, Prompts
from algorithms.engine.scheduler import PrefillSegment, tiles_of
from algorithms.engine.transfers import Arrays, Fields, Staging
from algorithms.models.layers import Mixer
from algorithms.step.batch import number_fields, write_numbers
from algorithms.step.context import StepParts

PASS_ROWS = 256
"""Rows that share a pass over weights on a GPU: a further row costs little up to these, its arithmetic beyond."""


def tile_counts(most: int, dense: int | None = None) -> tuple[int, ...]:
    """Tiles that a prefill batch may have: powers of two, three times powers of two, and `most`. Above `dense`, where
    tiles take time, also five and seven times powers of two."""
    sizes = {step << bit for bit in range(most.bit_length()) for step in (1, 3)}
    if dense is not None:
        sizes |= {size for bit in range(most.bit_length()) for step in (5, 7) if (size := step << bit) > dense}
    return tuple(sorted({min(size, most) for size in sizes}))


def prefill_fields(size: int, tile: int, max_pages: int) -> Fields:
    """What a batch of `size` tiles sends to the device, by tile, then by prompt; no more prompts than tiles."""
    return {
        "slots": ((size,), torch.int64),
        "starts": ((size,), torch.int64),
        "counts": ((size,), torch.int32),
        "tokens": ((size, tile + 1), torch.int64),  # and the token after the tile
        "prompt_slots": ((size,), torch.int64),
        "prompt_starts": ((size,), torch.int64),
        "prompt_counts": ((size,), torch.int32),
        "prompt_last": ((size,), torch.int64),
        "complete": ((size,), torch.int32),
        "pages": ((size, max_pages), torch.int32),
        **number_fields(size),
    }


class PrefillBatch:
    """`size` tiles of `tile` tokens. Send what they hold, begin, run the target over `tokens`, and finish."""

    tokens: Tensor  # [size, tile] int64, since `begin`

    def __init__(self, parts: StepParts, size: int, tile: int) -> None:
        max_pages, device = parts.state.page_table.shape[1], parts.resources.device
        self.size, self.tile, self._parts = size, tile, parts
        self._columns = torch.arange(tile + 1, device=device)
        self._staging = Staging(prefill_fields(size, tile, max_pages), device)

    @property
    def num_tokens(self) -> int:
        """Query rows of a forward over the batch, padding included."""
        return self.size * self.tile

    @property
    def sent(self) -> dict[str, Tensor]:
        """The arrays that were sent last, by the names of `prefill_fields`."""
        return self._staging.tensors

    def send(self, segments: Sequence[PrefillSegment]) -> None:
        """Send the batch to the device; the rest of it is padding. The slots and pages of `segments` are theirs."""
        arrays = self._staging.arrays()
        for name in ("starts", "counts", "tokens", "prompt_starts", "prompt_counts", "prompt_last", "complete"):
            arrays[name].fill(0)
        for name in ("slots", "prompt_slots"):
            arrays[name].fill(self._parts.state.dummy_slot)
        tile = 0
        for place, segment in enumerate(segments):
            self._write_prompt(arrays, place, tile, segment)
            tile += self._write_tiles(arrays, tile, segment)
        self._staging.send()

    def _write_tiles(self, arrays: Arrays, first: int, segment: PrefillSegment) -> int:
        """Write a segment from tile `first` on; returns its tiles. Without tokens it has one for the token after it."""
        running, start, count = segment
        text = np.array(running.request.prompt_ids[start : start + count + 1])
        num_tiles = tiles_of(count, self.tile)
        for index in range(num_tiles):
            part = text[index * self.tile : (index + 1) * self.tile + 1]
            arrays["tokens"][first + index, : len(part)] = part
            arrays["counts"][first + index] = len(part) - 1
        arrays["slots"][first : first + num_tiles] = running.slot
        arrays["starts"][first : first + num_tiles] = start + np.arange(num_tiles) * self.tile
        return num_tiles

    def _write_prompt(self, arrays: Arrays, place: int, first_tile: int, segment: PrefillSegment) -> None:
        """A segment's entry among the prompts: padding until the prefill is finished, and while the prompt is not."""
        running, start, count = segment
        arrays["prompt_slots"][place], arrays["prompt_starts"][place] = running.slot, start
        arrays["prompt_counts"][place] = count
        # A tile is followed by the next one of its prompt, so the tokens of a segment are adjacent.
        arrays["prompt_last"][place] = first_tile * self.tile + max(0, count - 1)
        arrays["complete"][place] = segment.is_last
        arrays["pages"][place, : len(running.pages)] = running.pages
        request = running.request
        length = start + count if segment.is_last else 0
        write_numbers(arrays, place, request.sampling, length, request.prompt_ids[-1])

    @property
    def _prompts(self) -> Prompts:
        sent = self.sent
        whose = (sent["prompt_slots"], sent["prompt_starts"], sent["prompt_counts"], sent["prompt_last"])
        return Prompts(*whose, width=self.size * self.tile)

    def begin(self, longest: int) -> Mixer:
        """Enter the requests and prompts, and plan a forward over `tokens`; no tile begins after position `longest`."""
        parts, sent = self._parts, self.sent
        slots, counts, state = sent["slots"], sent["counts"], self._parts.state
        state.enter(sent["prompt_slots"], sent)
        spots = (sent["starts"][:, None] + self._columns).clamp(max=state.history.shape[1] - 1)
        state.write_text(slots, spots, sent["tokens"], counts + 1)
        self.tokens = sent["tokens"][:, :-1].contiguous()
        self._positions = spots[:, :-1].contiguous()
        self._batch: Batch = state.tiles(slots, sent["starts"], counts, max_length=longest)
        return parts.memory.tiles(self._batch, self._positions, counts, self._prompts)

    def finish(self, hidden: Tensor, features: list[Tensor]) -> None:
        """Let the drafter observe the results of the tiles: `hidden` and each of `features` are [size, tile, hidden].
        Requests whose prompts are complete take part in steps from now on."""
        sent = self.sent
        self._parts.observe(
            Observation(
                batch=self._batch,
                tokens=self.tokens,
                next_tokens=sent["tokens"][:, 1:].contiguous(),
                features=features,
                hidden=hidden,
                positions=self._positions,
                counts=sent["counts"],
                prompts=self._prompts,
            )
        )
        self._parts.state.activate(sent["prompt_slots"], sent["complete"])
