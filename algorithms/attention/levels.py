"""The rows of the forwards in which a drafter writes one level of its draft after another.

Forward i runs `width` tokens per request at position L + `first` + i. They are stored at slots L + `first` + i * width
and following.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from algorithms.algorithm import Batch
from specdec_kernels import AttentionMetadata, level_slots


class LevelSizes(NamedTuple):
    """How many forwards there are, their tokens per request, and the slots between L and the first of them."""

    forwards: int
    width: int = 1
    first: int = 0


class LevelViews(NamedTuple):
    """What the tokens of each forward see; without it they are a chain, and `width` is 1."""

    masks: Sequence[Tensor]
    """[B, width, W] per forward: which of the slots written by then a token sees. May be filled later than here."""
    depths: Sequence[tuple[Tensor, Tensor]] | None = None
    """Depths of these slots and of the tokens, for a drafter with windows."""


class LevelRows(NamedTuple):
    """Of each forward: slots and positions [B * width] int64, and the metadata of an attention without window."""

    slots: Tensor
    positions: Tensor
    calls: list[AttentionMetadata]


def level_rows(
    batch: Batch, sizes: LevelSizes, views: LevelViews | None, page_size: int, impl: str, scale: float | None = None
) -> LevelRows:
    count, width, first = sizes
    places = level_slots(
        batch.page_table, batch.lengths, batch.active, count, width, page_size, first=first, impl=impl
    )  # fmt: skip
    slots, positions = places.slots.flatten(1), places.positions.flatten(1)
    mode, longest = "chain" if views is None else "tree", batch.max_length + first + count * width
    shared = AttentionMetadata(
        batch.page_table, batch.lengths, mode, q_lens=places.counts, max_length=longest, scale=scale
    )
    if views is None:
        # The earlier tokens precede a token of a chain, whose position is the length by then.
        return LevelRows(slots, positions, [shared._replace(lengths=each) for each in positions])
    calls = [
        shared._replace(mask=mask, tree_width=first + (level + 1) * width) for level, mask in enumerate(views.masks)
    ]
    if views.depths is not None:
        calls = [
            call._replace(depths=by_slot, row_depths=by_row)
            for call, (by_slot, by_row) in zip(calls, views.depths, strict=True)
        ]
    return LevelRows(slots, positions, calls)
