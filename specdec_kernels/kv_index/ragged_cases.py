"""Named inputs of the ragged rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Case, Maker


def token_table(make: Maker, rows: int, width: int) -> torch.Tensor:
    """[rows, width] int32 distinct slots in shuffled order."""
    order = torch.randperm(rows * width + 5, generator=make.generator)[: rows * width]
    return order.reshape(rows, width).to(make.device, torch.int32)


def pool_rows(make: Maker, batch: int, rows: int) -> torch.Tensor:
    """[batch] int64 distinct rows of a table."""
    return torch.randperm(rows, generator=make.generator)[:batch].to(make.device)


def _counts(make: Maker, batch: int, most: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Counts with empty rows among them."""
    counts = make.integers(0, most + 1, batch, dtype=dtype)
    counts[::4] = 0
    return counts


def _offsets(
    make: Maker, batch: int, most: int = 9, capacity: int | None = None, dtype: torch.dtype = torch.int32
) -> dict[str, Any]:
    counts = _counts(make, batch, most, dtype)
    counts[1::6] = -2
    return dict(counts=counts, capacity=capacity)


def _positions(make: Maker, batch: int, most: int = 5, capacity: int | None = None) -> dict[str, Any]:
    counts = _counts(make, batch, most)
    return dict(
        start=make.integers(0, 100, batch),
        counts=counts,
        capacity=batch * most if capacity is None else capacity,
    )


def _spans(make: Maker, batch: int, width: int, most: int, outside: bool = False) -> dict[str, Any]:
    """Table, rows, starts and counts within the table, or over its end."""
    counts = _counts(make, batch, most)
    ends = torch.full((batch,), width, dtype=torch.int64, device=make.device) - counts + 1
    start = (make.integers(0, 1 << 30, batch) % ends).to(torch.int64)
    if outside:
        start = start + most // 2 - 1
    rows = pool_rows(make, batch, batch + 2)
    if outside:
        rows[::3] = batch + 2
    return dict(table=token_table(make, batch + 2, width), rows=rows, start=start, counts=counts)


def _read(make: Maker, batch: int, width: int, most: int, outside: bool = False, **extra: Any) -> dict[str, Any]:
    spans = _spans(make, batch, width, most, outside)
    return spans | dict(capacity=batch * most) | extra


def _read_into(make: Maker) -> dict[str, Any]:
    """Offsets of the caller, with room between the rows, and a result that has contents."""
    spans = _spans(make, 4, 20, 5)
    offsets = make.tensor([0, 5, 10, 15, 20], torch.int32)
    out = make.integers(1000, 2000, 30, dtype=torch.int32)
    return spans | dict(capacity=30, offsets=offsets, out=out)


def _write(make: Maker, batch: int, width: int, most: int, outside: bool = False) -> dict[str, Any]:
    return _spans(make, batch, width, most, outside) | dict(values=make.integers(0, 1 << 20, batch * most))


def _compact(make: Maker, size: int, source: int | None = None, out: int = 0) -> dict[str, Any]:
    index = make.integers(-3, 8 if source is None else source + 1, size, dtype=torch.int32)
    values = None if source is None else make.integers(0, 1 << 40, source)
    return dict(index=index, source=values) | (dict(out=make.integers(50, 60, out)) if out else {})


def _filter(make: Maker, batch: int, most: int = 6, out: int | None = None) -> dict[str, Any]:
    counts = _counts(make, batch, most)
    finished = make.integers(0, 2, batch, dtype=torch.int32)
    inputs = dict(values=make.integers(0, 1 << 40, batch * most), counts=counts, kept=counts * finished)
    return inputs | (dict(out=make.integers(50, 60, out)) if out is not None else {})


def _case(
    function: str, build: Any, name: str, catches: str, gate: bool = False, bench: bool = False, **shape: Any
) -> Case:
    return Case(name, function, partial(build, **shape), catches, gate, bench)


_offsets_case = partial(_case, "row_offsets", _offsets)
_positions_case = partial(_case, "accepted_positions", _positions)
_read_case = partial(_case, "read_table", _read)
_write_case = partial(_case, "write_table", _write)
_compact_case = partial(_case, "compact", _compact)
_filter_case = partial(_case, "filter_rows", _filter)

RAGGED_CASES = (
    _offsets_case("offsets_empty", "B = 0", batch=0),
    _offsets_case("offsets_one", "a block of one lane", batch=1),
    _offsets_case("offsets_negative", "a negative count taken off the sum", batch=13, dtype=torch.int64),
    _offsets_case("offsets_capacity", "a sum past the capacity", batch=9, capacity=20),
    _offsets_case("offsets_blocks", "the carry between blocks", batch=20000, gate=True),
    _offsets_case("offsets_b64", "the step's shape", batch=64, gate=True, bench=True),
    _positions_case("positions_empty", "B = 0", batch=0, capacity=3),
    _positions_case("positions_ragged", "empty rows, an unwritten tail", batch=9),
    _positions_case("positions_short", "rows past the capacity", batch=9, capacity=7),
    _positions_case("positions_b64", "the step's shape", batch=64, gate=True, bench=True),
    _read_case("read_empty", "B = 0", batch=0, width=4, most=2),
    _read_case("read_ragged", "rows and starts", batch=9, width=21, most=7),
    _read_case("read_outside", "entries outside the table", batch=7, width=9, most=6, outside=True),
    _read_case("read_int32", "values in 32 bits", batch=5, width=9, most=6, dtype=torch.int32, fill=0),
    Case("read_into", "read_table", _read_into, "entries that no row owns overwritten"),
    _read_case("read_b64", "the step's shape", batch=64, width=2048, most=32, gate=True, bench=True),
    _write_case("write_table_empty", "B = 0", batch=0, width=4, most=2),
    _write_case("write_table_ragged", "rows and starts", batch=9, width=21, most=7),
    _write_case("write_table_outside", "a write past the row's end", batch=7, width=9, most=6, outside=True),
    _write_case("write_table_b64", "the step's shape", batch=64, width=2048, most=32, gate=True, bench=True),
    _compact_case("compact_empty", "no entries", size=0),
    _compact_case("compact_one", "a block of one lane", size=1),
    _compact_case("compact_plain", "order, an unwritten tail", size=37),
    _compact_case("compact_source", "an index past the source", size=37, source=11),
    _compact_case("compact_into", "entries behind the kept ones overwritten", size=29, out=40),
    _compact_case("compact_short", "kept entries past the result", size=29, out=4),
    _compact_case("compact_blocks", "the carry between blocks", size=17000),
    _compact_case("compact_b64", "the step's shape", size=512, source=2048, gate=True, bench=True),
    _filter_case("filter_empty", "B = 0", batch=0),
    _filter_case("filter_rows", "old and new offsets swapped", batch=9),
    _filter_case("filter_into", "a result shorter than the values", batch=9, out=12),
    _filter_case("filter_b64", "the step's shape", batch=64, gate=True, bench=True),
)
