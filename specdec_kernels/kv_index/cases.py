"""Named inputs of the kv_index family: page tables and accepted paths."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.cases import Maker, case_of
from specdec_kernels.kv_index.types import FlashInferChunks


def _table(make: Maker, batch: int, row_pages: int, held: float = 1.0) -> Tensor:
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


def _levels(
    make: Maker, batch: int, levels: int, width: int, page_size: int = 4, row_pages: int = 5, first: int = 0
) -> dict[str, Any]:
    return dict(
        page_table=_table(make, batch, row_pages, 0.8),
        lengths=make.integers(0, row_pages * page_size, batch),
        active=make.integers(0, 2, batch, dtype=torch.int32),
        levels=levels,
        width=width,
        page_size=page_size,
        first=first,
    )


def _lengths(make: Maker, batch: int, row_pages: int, page_size: int, **extra: Any) -> dict[str, Any]:
    """Lengths 0, one page, one page and a token, full and too long, then random ones."""
    end = row_pages * page_size
    lengths = make.integers(0, end + 1, batch)
    edges = make.tensor([0, page_size, page_size + 1, end, end + 5, 1][:batch], torch.int64)
    lengths[: len(edges)] = edges
    return dict(page_table=_table(make, batch, row_pages), lengths=lengths, page_size=page_size, **extra)


def _chunked(
    make: Maker, batch: int, row_tiles: int, most: int, rows: int, longest: int, limit: int | None = None
) -> dict[str, Any]:
    """Tiles of every chunk, then two that never run."""
    tiles = [(b, index) for b in range(batch) for _ in range(row_tiles) for index in range(most)] + 2 * [(-1, 0)]
    request, index = make.tensor(tiles, torch.int32).T.contiguous()
    sizes = dict(size=1, begins=batch + 1, ends=batch * rows + 1)
    written = {name: make.integers(-9, 0, size, dtype=torch.int32) for name, size in sizes.items()}
    runs = make.integers(7, 9, len(tiles), dtype=torch.uint8)
    keys = make.integers(1, longest + 1, batch)
    return dict(keys=keys, most=most, out=FlashInferChunks(request, index, **written, runs=runs), limit=limit)


def _packed(
    make: Maker, batch: int, nodes: int, width: int, slots: int, window: int | None = None, depths: bool = False
) -> dict[str, Any]:
    """Prefixes of every length that the width holds, among them none, before `slots` draft slots."""
    words = -(-slots // 64)
    by_depth: dict[str, Any] = {}
    if depths:
        sizes = dict(depths=slots, row_depths=nodes)
        by_depth = {name: make.integers(0, 5, batch, size, dtype=torch.int32) for name, size in sizes.items()}
    lengths = make.integers(0, width - slots + 1, batch)
    lengths[:1] = 0
    return dict(
        mask=make.integers(-(2**62), 2**62, batch, nodes, words),
        lengths=lengths,
        keys=lengths + slots,
        width=width,
        window=window,
        **by_depth,
    )


def _move(
    make: Maker,
    batch: int,
    layers: int,
    page_size: int,
    path: int,
    num_nodes: int,
    heads: int = 2,
    dim: int = 8,
    sides: int = 2,
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
        kv=make.normal(layers, sides, batch * row_pages + 3, page_size, heads, dim),
        page_table=table,
        lengths=make.integers(0, 2 * page_size + 1, batch),
        nodes=nodes.to(make.device, torch.int32),
    )


def _overlap(make: Maker) -> dict[str, Any]:
    """Every slot but the ends is both source and target."""
    inputs = _move(make, batch=1, layers=1, page_size=4, path=8, num_nodes=9)
    inputs["nodes"] = make.tensor([[0, 2, 3, 4, 5, 6, 7, 8]], torch.int32)
    return inputs


_slots_case = partial(case_of, "token_slots", _slots)
_levels_case = partial(case_of, "level_slots", _levels)
_flashinfer = partial(case_of, "flashinfer_indices", _lengths)
_chunks_case = partial(case_of, "flashinfer_chunks", _chunked)
_mask_case = partial(case_of, "flashinfer_mask", _packed)
_table_case = partial(case_of, "flash_attention_table", _lengths)
_move_case = partial(case_of, "move_accepted", _move)

CASES = (
    _slots_case("slots_empty", "empty grid", batch=0, row_pages=3, page_size=4, width=5),
    _slots_case("slots_no_pages", "empty table", batch=2, row_pages=0, page_size=4, width=3),
    _slots_case("slots_page_1", "page size 1", batch=5, row_pages=9, page_size=1, width=7),
    _slots_case(
        "slots_page_16", "page edges and positions beyond the table", gate=True, bench=True, batch=9, row_pages=4,
        page_size=16, width=17,
    ),
    _slots_case("slots_unheld", "a negative page becomes a slot", batch=6, row_pages=6, page_size=3, width=9, held=0.5),
    _levels_case("levels_empty", "empty grid", batch=0, levels=3, width=2),
    _levels_case("levels_none", "no level", batch=3, levels=0, width=2),
    _levels_case("levels_chain", "a level of one token", batch=5, levels=4, width=1, page_size=1, row_pages=9),
    _levels_case("levels_tree", "positions by slot", gate=True, bench=True, batch=8, levels=5, width=10, first=1,
                 page_size=16, row_pages=8),
    _flashinfer("flashinfer_empty", "B = 0", batch=0, row_pages=3, page_size=4),
    _flashinfer("flashinfer_no_pages", "P = 0", batch=3, row_pages=0, page_size=4),
    _flashinfer("flashinfer_edges", "page edges, full and empty rows", gate=True, batch=9, row_pages=5, page_size=16),
    _flashinfer("flashinfer_tail", "an unwritten tail", batch=7, row_pages=3, page_size=1),
    _flashinfer(
        "flashinfer_many", "carry between scanned blocks", gate=True, bench=True, batch=1500, row_pages=6,
        page_size=16,
    ),
    _flashinfer("flashinfer_columns", "a length beyond the table", batch=6, row_pages=3, page_size=4, columns=5),
    _chunks_case("chunks_short", "one chunk each", batch=3, row_tiles=1, most=4, rows=1, longest=90),
    _chunks_case(
        "chunks_long", "requests of fewer chunks", gate=True, bench=True, batch=5, row_tiles=2, most=6, rows=9,
        longest=4000,
    ),
    _chunks_case("chunks_window", "keys before a window", batch=4, row_tiles=1, most=2, rows=3, longest=900, limit=270),
    _mask_case("mask_one_row", "a row of every length", batch=6, nodes=1, width=19, slots=1),
    _mask_case("mask_tree", "rows off the bytes", gate=True, bench=True, batch=4, nodes=32, width=1056, slots=32),
    _mask_case("mask_two_words", "slots of the second word", batch=3, nodes=9, width=200, slots=70),
    _mask_case("mask_window", "a window by slot", batch=4, nodes=6, width=40, slots=6, window=5),
    _mask_case(
        "mask_depths", "a window by depth", gate=True, batch=4, nodes=6, width=40, slots=9, window=5, depths=True
    ),
    _table_case("table_no_pages", "P = 0", batch=2, row_pages=0, page_size=4),
    _table_case("table_edges", "page edges", gate=True, bench=True, batch=9, row_pages=5, page_size=16),
    _move_case("move_empty", "B = 0", batch=0, layers=1, page_size=4, path=3, num_nodes=4),
    case_of("move_accepted", _overlap, "move_overlap", "a source overwritten before it is read"),
    _move_case("move_page_1", "page 1", batch=3, layers=2, page_size=1, path=5, num_nodes=9),
    _move_case(
        "move_page_16", "paths across a page edge", gate=True, bench=True, batch=4, layers=2, page_size=16, path=7,
        num_nodes=21, dim=64,
    ),
    _move_case(
        "move_latents", "one tensor a layer", batch=2, layers=3, page_size=4, path=4, num_nodes=8, heads=1, dim=48,
        sides=1,
    ),
    _move_case(
        "move_odd_row", "features off the block", batch=2, layers=3, page_size=5, path=4, num_nodes=8, heads=3, dim=7
    ),
)  # fmt: skip


def _move_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """(bytes, operations): each slot that changes place is read and written; the pool around it is not."""
    nodes = inputs["nodes"]
    moves = (nodes > 0) & (nodes != torch.arange(nodes.shape[1], device=nodes.device))
    kv = inputs["kv"]
    slot_bytes = kv.numel() // (kv.shape[2] * kv.shape[3]) * kv.element_size()
    return 2 * int(moves.sum()) * slot_bytes, 0


# The other functions handle a few KB: what counts there is the launch, and the benchmark counts every tensor once.
WORK = {"move_accepted": _move_work}
