"""Named inputs of the exchange: one tensor holds the memory of all ranks, and the other ranks have written already."""

from functools import partial
from typing import Any

import torch

from specdec_kernels.all_reduce.reference import packed
from specdec_kernels.all_reduce.types import SLOTS, Exchange, exchange_elements
from specdec_kernels.cases import Comparison, Maker, case_of

_8B = 4096


def exchange_inputs(
    make: Maker, *shape: int, parts: int = 1, ranks: int = 2, rank: int = 0, slot: int = 0, capacity: int = 8
) -> dict[str, Any]:
    """Rows `[*shape]` of `ranks` ranks, seen by `rank`, to which the others have sent theirs. Each row has been
    exchanged another number of times."""
    width = shape[-1]
    size = exchange_elements(ranks, capacity, width)
    first = rank * size + SLOTS * ranks * capacity * width + slot * capacity
    memory = torch.zeros(ranks * size, dtype=torch.int64, device=make.device)
    calls = make.integers(0, 3, capacity)
    memory[first : first + capacity] = calls
    first = rank * size + slot * ranks * capacity * width
    words = memory[first : first + ranks * capacity * width].view(torch.int32)
    received = words[: ranks * capacity * width].view(ranks * capacity, width)
    received.copy_(packed(make.normal(ranks * capacity, width), calls.repeat(ranks) + 1))
    offsets = make.tensor([other * size for other in range(ranks)], torch.int64)
    return dict(
        parts=make.normal(parts, *shape).float(),
        exchange=Exchange(memory, offsets, rank, capacity, width),
        slot=slot,
        residual=make.normal(*shape),
        weight=make.normal(width),
        eps=1e-6,
    )


COMPARISON = Comparison(float64=True)


_case = partial(case_of, "all_reduce_add_rms_norm", exchange_inputs)


CASES = (
    _case("exchange_empty", "launch on an empty grid", 0, 64),
    _case("exchange_one_row", "the other rank's memory not read", 1, 64),
    _case("exchange_odd", "lanes past the width", 5, 63),
    _case("exchange_parts", "partial sums of this rank left out", 3, 96, parts=4),
    _case("exchange_slot_1", "words of the other slot", 2, 64, slot=1),
    _case("exchange_second_rank", "own sum added twice", 2, 64, rank=1, slot=1),
    _case("exchange_four_ranks", "a rank left out; words of another rank", 2, 3, 64, ranks=4, rank=2, parts=2),
    _case("exchange_full", "the last row of the memory", 8, 32),
    # A second call on one device would wait for the others for ever, so the kernel is timed with one rank.
    _case("exchange_alone_1x4096", "no other rank", 1, _8B, parts=4, ranks=1, bench=True),
    _case("exchange_shipped", "registers and vector width", 2, _8B, parts=4, gate=True),
    _case("exchange_eight_shipped", "registers with eight ranks", 1, _8B, ranks=8, rank=3, gate=True),
)
