"""Named inputs of the kv_index family: page tables and accepted paths; ragged rows and drafts have modules of
their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Case, Maker
from specdec_kernels.kv_index.draft_cases import DRAFT_CASES
from specdec_kernels.kv_index.ragged_cases import RAGGED_CASES


def _table(make: Maker, batch: int, row_pages: int, held: float = 1.0) -> torch.Tensor:
    """Distinct shuffled pages; beyond a share of the columns -1, as an allocator leaves them."""
    table = make.page_table(batch, row_pages, batch * row_pages + 3)
    table[:, round(row_pages * held) :] = -1
    return table


def _slots(make: Maker, batch: int, row_pages: int, page_size: int, width: int, held: float = 1.0) -> dict[str, Any]:
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


def _evict(make: Maker, batch: int, nodes: int, page_size: int) -> dict[str, Any]:
    """Accepted prefixes of 0 to all nodes."""
    accepted = make.integers(0, nodes + 1, batch)
    return dict(
        evict=torch.arange(nodes, device=make.device) >= accepted[:, None],
        lengths=make.integers(0, 4 * page_size, batch),
        page_size=page_size,
    )


def _locations(make: Maker, batch: int, nodes: int, path: int, page_size: int) -> dict[str, Any]:
    """Slots from one shuffled pool; paths of 0 (a row that stands for no request) to all entries."""
    order = torch.randperm(batch * nodes + 3, generator=make.generator)[: batch * nodes]
    chosen = torch.full((batch, path), -1, dtype=torch.int32)
    for row in range(batch):
        kept = min(row % (path + 1), nodes)
        ids = torch.randperm(nodes, generator=make.generator)[:kept].sort().values
        chosen[row, :kept] = ids.int()
    return dict(
        slots=order.reshape(batch, nodes).to(make.device),
        lengths=make.integers(0, 4 * page_size, batch),
        nodes=chosen.to(make.device),
        page_size=page_size,
    )


def _slot_list(
    make: Maker, size: int, layers: int = 2, page_size: int = 4, heads: int = 2, dim: int = 8
) -> dict[str, Any]:
    """Sources anywhere, distinct targets, so that most slots are both; some pairs move nothing."""
    pages = -(-(size + 3) // page_size) + 1
    source = make.integers(0, pages * page_size, size)
    target = torch.randperm(pages * page_size, generator=make.generator)[:size].to(make.device)
    source[::5] = -1
    target[1::7] = -1
    return dict(
        kv=make.normal(layers, 2, pages, page_size, heads, dim),
        source=source,
        target=target,
    )


def _idle_list(make: Maker) -> dict[str, Any]:
    """Padding as others write it: slot 0 to slot 0, many times, beside one real move into slot 0."""
    inputs = _slot_list(make, size=6)
    inputs["source"] = make.tensor([0, 0, 7, 0, 99, 0], torch.int64)
    inputs["target"] = make.tensor([0, 0, 0, 0, 1, 0], torch.int64)
    return inputs


def _evict_case(name: str, catches: str, gate: bool = False, bench: bool = False, **shape: Any) -> Case:
    return Case(name, "align_eviction", partial(_evict, **shape), catches, gate, bench)


def _locations_case(name: str, catches: str, gate: bool = False, bench: bool = False, **shape: Any) -> Case:
    return Case(name, "accepted_locations", partial(_locations, **shape), catches, gate, bench)


PATH_CASES = (
    _evict_case("evict_empty", "B = 0", batch=0, nodes=4, page_size=4),
    _evict_case("evict_no_nodes", "N = 0", batch=2, nodes=0, page_size=4),
    _evict_case("evict_page_1", "the accepted token itself evicted", batch=7, nodes=5, page_size=1),
    _evict_case("evict_odd", "page arithmetic below position 0", batch=9, nodes=7, page_size=3),
    _evict_case("evict_b64", "registers", gate=True, bench=True, batch=64, nodes=16, page_size=16),
    _locations_case("locations_empty", "B = 0", batch=0, nodes=3, path=2, page_size=4),
    _locations_case("locations_one_node", "a tile of one lane", batch=2, nodes=1, path=1, page_size=4),
    _locations_case("locations_long_path", "a path wider than the tree", batch=5, nodes=2, path=4, page_size=2),
    _locations_case("locations_page_1", "a kept slot freed", batch=6, nodes=5, path=4, page_size=1),
    _locations_case("locations_odd", "the last page freed with its token", batch=9, nodes=7, path=5, page_size=3),
    _locations_case("locations_b64", "registers", gate=True, bench=True, batch=64, nodes=32, path=8, page_size=16),
    Case("list_empty", "move_slots", partial(_slot_list, size=0), "an empty list"),
    Case("list_one", "move_slots", partial(_slot_list, size=1), "a tile of one lane"),
    Case("list_idle", "move_slots", _idle_list, "slot 0 written by pairs that move nothing"),
    Case("list_overlap", "move_slots", partial(_slot_list, size=41, heads=3, dim=7), "a source overwritten first"),
    Case("list_staged", "move_slots", partial(_slot_list, size=150), "order between the two launches"),
    Case(
        "list_direct_shipped",
        "move_slots",
        partial(_slot_list, size=256, layers=2, page_size=16, heads=8, dim=128),
        "registers of the longest direct list",
        gate=True,
        tags=("large",),
    ),
    Case(
        "list_staged_shipped",
        "move_slots",
        partial(_slot_list, size=500, layers=2, page_size=16, heads=8, dim=128),
        "registers of the staged move",
        gate=True,
        bench=True,
        tags=("large",),
    ),
)

PAGE_CASES = (
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
    Case("table_empty", "flash_attention_table", partial(_lengths, batch=0, row_pages=3, page_size=4), "B = 0"),
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

CASES = (*PAGE_CASES, *PATH_CASES, *RAGGED_CASES, *DRAFT_CASES)


def _slot_bytes(kv: torch.Tensor) -> int:
    """Bytes of one slot in all layers, keys and values."""
    layers, planes, _, _, heads, dim = kv.shape
    return layers * planes * heads * dim * kv.element_size()


def _move_accepted_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """(bytes, operations): each slot that changes place is read and written; the pool around it is not."""
    nodes = inputs["nodes"]
    moves = (nodes > 0) & (nodes != torch.arange(nodes.shape[1], device=nodes.device))
    return 2 * int(moves.sum()) * _slot_bytes(inputs["kv"]), 0


def _move_slots_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """As `_move_accepted_work`, for a list of slots."""
    moves = (inputs["source"] >= 0) & (inputs["target"] >= 0) & (inputs["source"] != inputs["target"])
    return 2 * int(moves.sum()) * _slot_bytes(inputs["kv"]), 0


# The other functions handle a few KB: what counts there is the launch, and the benchmark counts every tensor once.
WORK = {"move_accepted": _move_accepted_work, "move_slots": _move_slots_work}
