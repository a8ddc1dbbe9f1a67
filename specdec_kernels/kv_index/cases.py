"""Named inputs of the kv_index family."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Case, Maker


def _table(make: Maker, batch: int, row_pages: int, held: float = 1.0) -> torch.Tensor:
    """Distinct shuffled pages; beyond a share of the columns -1, as an allocator leaves them."""
    table = make.page_table(batch, row_pages, batch * row_pages + 3)
    table[:, round(row_pages * held) :] = -1
    return table


def _slots(
    make: Maker, batch: int, row_pages: int, page_size: int, width: int, held: float = 1.0
) -> dict[str, Any]:
    end = row_pages * page_size
    return dict(
        page_table=_table(make, batch, row_pages, held),
        start=make.integers(-1, end + 2, batch),
        counts=make.integers(0, width + 2, batch, dtype=torch.int32),
        width=width,
        page_size=page_size,
    )


def _lengths(make: Maker, batch: int, row_pages: int, page_size: int, **extra: Any) -> dict[str, Any]:
    """Lengths 0, one page, one page and a token, full and too long, then random ones."""
    end = row_pages * page_size
    edges = torch.tensor([0, page_size, page_size + 1, end, end + 5, 1])
    lengths = make.integers(0, end + 1, batch)
    chosen = min(batch, len(edges))
    lengths[:chosen] = edges[:chosen].to(make.device)
    return dict(page_table=_table(make, batch, row_pages), lengths=lengths, page_size=page_size, **extra)


def _move(
    make: Maker,
    batch: int,
    layers: int,
    page_size: int,
    path: int,
    num_nodes: int,
    heads: int = 2,
    dim: int = 8,
) -> dict[str, Any]:
    """Rising paths of random lengths over pools whose requests start anywhere on a page."""
    row_pages = -(-(2 * page_size + num_nodes) // page_size)
    table = _table(make, batch, row_pages)
    nodes = torch.full((batch, path), -1, dtype=torch.int64)
    for row in range(batch):
        later = torch.randperm(num_nodes - 1, generator=make.generator) + 1
        kept = int(torch.randint(0, min(path, num_nodes), (1,), generator=make.generator))
        nodes[row, : kept + 1] = torch.cat([torch.zeros(1, dtype=torch.int64), later[:kept].sort().values])
    return dict(
        kv=make.normal(layers, 2, batch * row_pages + 3, page_size, heads, dim),
        page_table=table,
        lengths=make.integers(0, 2 * page_size + 1, batch),
        nodes=nodes.to(make.device, torch.int32),
    )


def _overlap(make: Maker) -> dict[str, Any]:
    """Every slot but the ends is both source and target."""
    inputs = _move(make, batch=1, layers=1, page_size=4, path=8, num_nodes=9)
    inputs["nodes"] = make.tensor([[0, 2, 3, 4, 5, 6, 7, 8]], torch.int32)
    return inputs


CASES = (
    Case(
        "slots_empty",
        "token_slots",
        partial(_slots, batch=0, row_pages=3, page_size=4, width=5),
        "empty grid",
    ),
    Case(
        "slots_width_0",
        "token_slots",
        partial(_slots, batch=2, row_pages=3, page_size=4, width=0),
        "empty grid",
    ),
    Case(
        "slots_no_pages",
        "token_slots",
        partial(_slots, batch=2, row_pages=0, page_size=4, width=3),
        "empty table",
    ),
    Case(
        "slots_page_1",
        "token_slots",
        partial(_slots, batch=5, row_pages=9, page_size=1, width=7),
        "page size 1",
    ),
    Case(
        "slots_page_16",
        "token_slots",
        partial(_slots, batch=9, row_pages=4, page_size=16, width=17),
        "page edges and positions beyond the table",
        gate=True,
        bench=True,
    ),
    Case(
        "slots_unheld",
        "token_slots",
        partial(_slots, batch=6, row_pages=6, page_size=3, width=9, held=0.5),
        "a negative page becomes a slot",
    ),
    Case(
        "flashinfer_empty",
        "flashinfer_indices",
        partial(_lengths, batch=0, row_pages=3, page_size=4),
        "B = 0",
    ),
    Case(
        "flashinfer_one",
        "flashinfer_indices",
        partial(_lengths, batch=1, row_pages=3, page_size=4),
        "only empty rows",
    ),
    Case(
        "flashinfer_no_pages",
        "flashinfer_indices",
        partial(_lengths, batch=3, row_pages=0, page_size=4),
        "P = 0",
    ),
    Case(
        "flashinfer_edges",
        "flashinfer_indices",
        partial(_lengths, batch=9, row_pages=5, page_size=16),
        "page edges, full rows, last page of length 0",
        gate=True,
    ),
    Case(
        "flashinfer_tail",
        "flashinfer_indices",
        partial(_lengths, batch=7, row_pages=3, page_size=1, capacity=40),
        "an unwritten tail",
    ),
    Case(
        "flashinfer_short",
        "flashinfer_indices",
        partial(_lengths, batch=7, row_pages=3, page_size=2, capacity=5),
        "writes past the capacity",
    ),
    Case(
        "flashinfer_many",
        "flashinfer_indices",
        partial(_lengths, batch=1500, row_pages=6, page_size=16),
        "carry between scanned blocks",
        gate=True,
        bench=True,
    ),
    Case(
        "table_empty", "flash_attention_table", partial(_lengths, batch=0, row_pages=3, page_size=4), "B = 0"
    ),
    Case(
        "table_no_pages",
        "flash_attention_table",
        partial(_lengths, batch=2, row_pages=0, page_size=4),
        "P = 0",
    ),
    Case(
        "table_edges",
        "flash_attention_table",
        partial(_lengths, batch=9, row_pages=5, page_size=16),
        "page edges",
        gate=True,
        bench=True,
    ),
    Case(
        "move_empty",
        "move_accepted",
        partial(_move, batch=0, layers=1, page_size=4, path=3, num_nodes=4),
        "B = 0",
    ),
    Case("move_overlap", "move_accepted", _overlap, "a source overwritten before it is read"),
    Case(
        "move_page_1",
        "move_accepted",
        partial(_move, batch=3, layers=2, page_size=1, path=5, num_nodes=9),
        "page 1",
    ),
    Case(
        "move_page_16",
        "move_accepted",
        partial(_move, batch=4, layers=2, page_size=16, path=7, num_nodes=21, heads=2, dim=64),
        "paths across a page edge",
        gate=True,
        bench=True,
    ),
    Case(
        "move_odd_row",
        "move_accepted",
        partial(_move, batch=2, layers=3, page_size=5, path=4, num_nodes=8, heads=3, dim=7),
        "features off the block",
    ),
)
