"""Named inputs of the index functions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Maker, case_of
from specdec_kernels.compat.sglang.index.types import SequenceIndices
from specdec_kernels.kv_index.cases import slot_bytes
from specdec_kernels.tree import build_tree


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
    """Spans of no table."""
    return dict(
        table=None,
        rows=None,
        start=make.integers(0, 100, batch),
        counts=_counts(make, batch, most),
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


def _requests(make: Maker, batch: int, longest: int, width: int, table_rows: int | None = None) -> dict[str, Any]:
    """Lengths 0, 1 and the longest, then random ones."""
    lengths = make.integers(0, longest + 1, batch)
    lengths[: min(batch, 3)] = torch.tensor([0, 1, longest])[: min(batch, 3)].to(make.device)
    rows = batch + 2 if table_rows is None else table_rows
    return dict(table=token_table(make, rows, width), rows=pool_rows(make, batch, rows), lengths=lengths)


def _draft_width(longest: int, topk: int, num_steps: int, page_size: int) -> int:
    """Positions that the drafts of the longest request may take."""
    branch = -(-(page_size - 1 + num_steps) // page_size) * page_size
    return longest + topk * max(branch, num_steps)


def _slots(make: Maker, batch: int, topk: int, num_steps: int, page_size: int, longest: int = 9) -> dict[str, Any]:
    width = _draft_width(longest, topk, num_steps, page_size)
    sizes = dict(topk=topk, num_steps=num_steps, page_size=page_size)
    return _requests(make, batch, longest, width) | sizes


def _indices(
    make: Maker,
    batch: int,
    topk: int,
    num_steps: int,
    page_size: int,
    longest: int = 9,
    short: int = 0,
    into: bool = False,
    **extra: Any,
) -> dict[str, Any]:
    """`short`: how much the capacity lacks; `into`: into tensors with contents and a longer row."""
    inputs = _slots(make, batch, topk, num_steps, page_size, longest)
    kept = inputs["lengths"].sum().item() if extra.get("window") is None else batch * longest
    capacity = int(kept) * topk + batch * topk * num_steps + (-short if short else 3)
    if into:
        indptr = make.integers(50, 60, num_steps, batch * topk + 4, dtype=torch.int32)
        extra["out"] = SequenceIndices(indptr, make.integers(50, 60, num_steps, capacity))
    return inputs | dict(capacity=capacity) | extra


def _verify(
    make: Maker, batch: int, factor: int, longest: int = 9, short: int = 0, into: bool = False
) -> dict[str, Any]:
    inputs = _requests(make, batch, longest, longest + factor)
    total = int(inputs["lengths"].sum()) * factor + batch * factor * (factor + 1) // 2
    capacity = total - short if short else total + 3
    inputs |= dict(factor=factor, capacity=capacity)
    if into:
        indptr = make.integers(50, 60, batch * factor + 4, dtype=torch.int32)
        inputs["out"] = SequenceIndices(indptr, make.integers(50, 60, capacity, dtype=torch.int32))
    return inputs


def _evict(make: Maker, batch: int, nodes: int, page_size: int, scattered: bool = False) -> dict[str, Any]:
    """Accepted prefixes of 0 to all nodes."""
    accepted = make.integers(0, nodes + 1, batch)
    return dict(
        evict=make.integers(0, 2, batch, nodes).bool()
        if scattered
        else torch.arange(nodes, device=make.device) >= accepted[:, None],
        lengths=make.integers(0, 4 * page_size, batch),
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
    """Padding as others write it: slot 0 to slot 0, many times, beside one real move into slot 0 and slots past the
    last, which is 15."""
    inputs = _slot_list(make, size=6)
    inputs["source"] = make.tensor([0, 0, 7, 0, 99, 0, 16, 5], torch.int64)
    inputs["target"] = make.tensor([0, 0, 0, 0, 1, 0, 2, 16], torch.int64)
    return inputs


def _candidates(make: Maker, batch: int, num_nodes: int, topk: int, steps: int, closed: bool = True) -> dict[str, Any]:
    """The ids that a worker keeps after `steps` steps; not `closed`: any ids, also some without meaning."""
    rows, total = topk * (steps - 1) + 1, topk + topk * topk * (steps - 1)
    history = [torch.full((batch, 1), -1), torch.arange(topk).repeat(batch, 1)]
    for step in range(1, steps - 1):
        ids = torch.rand(batch, topk * topk, generator=make.generator).argsort(-1)[:, :topk].sort(-1).values
        history.append(ids + topk + topk * topk * (step - 1))
    parent_list = torch.cat(history, 1)[:, : rows if steps > 1 else 0]
    drafts = num_nodes - 1
    if closed:
        selected = torch.rand(batch, total, generator=make.generator).argsort(-1)[:, :drafts].sort(-1).values
    else:
        selected = torch.randint(-2, total + 3 * topk, (batch, drafts), generator=make.generator)
    return dict(selected=selected.to(make.device), parent_list=parent_list.to(make.device), topk=topk)


def _mask(make: Maker, batch: int, num_nodes: int, longest: int = 40, **options: Any) -> dict[str, Any]:
    """Words of random trees over requests of up to `longest` committed tokens."""
    lengths = make.integers(0, longest + 1, batch)
    parents = (torch.rand(batch, num_nodes, generator=make.generator) * torch.arange(num_nodes)).int()
    mask = build_tree(parents.to(make.device), lengths, impl="reference").mask
    return dict(mask=mask, lengths=lengths, **options)


def _noise_mask(make: Maker, batch: int, num_nodes: int, **options: Any) -> dict[str, Any]:
    words = make.integers(-(1 << 62), 1 << 62, batch, num_nodes, -(-num_nodes // 64))
    return dict(mask=words & (words >> 1), lengths=make.integers(0, 40, batch), **options)


_STEP: dict[str, Any] = dict(batch=64, topk=4, num_steps=3)
_offsets_case = partial(case_of, "row_offsets", _offsets)
_read_case = partial(case_of, "read_table", _read)
_positions_case = partial(case_of, "read_table", _positions)
_write_case = partial(case_of, "write_table", _write)
_compact_case = partial(case_of, "compact", _compact)
_draft_case = partial(case_of, "draft_slots", _slots)
_indices_case = partial(case_of, "draft_kv_indices", _indices)
_verify_case = partial(case_of, "verify_decode_indices", _verify)
_evict_case = partial(case_of, "align_eviction", _evict)
_list_case = partial(case_of, "move_slots", _slot_list)

TABLE_CASES = (
    _offsets_case("offsets_empty", "B = 0", batch=0),
    _offsets_case("offsets_one", "a block of one lane", batch=1),
    _offsets_case("offsets_negative", "a negative count taken off the sum", batch=13, dtype=torch.int64),
    _offsets_case("offsets_capacity", "a sum past the capacity", batch=9, capacity=20),
    _offsets_case("offsets_blocks", "the carry between blocks", gate=True, batch=20000),
    _offsets_case("offsets_b64", "the step's shape", gate=True, bench=True, batch=64),
    _read_case("read_empty", "B = 0", batch=0, width=4, most=2),
    _read_case("read_ragged", "rows and starts", batch=9, width=21, most=7),
    _read_case("read_outside", "entries outside the table", batch=7, width=9, most=6, outside=True),
    case_of("read_table", _read_into, "read_into", "entries that no row owns overwritten"),
    _read_case("read_b64", "the step's shape", gate=True, bench=True, batch=64, width=2048, most=32),
    _positions_case("positions_empty", "B = 0", batch=0, capacity=3),
    _positions_case("positions_ragged", "empty rows, an unwritten tail", batch=9),
    _positions_case("positions_short", "rows past the capacity", batch=9, capacity=7),
    _positions_case("positions_b64", "the step's shape", gate=True, bench=True, batch=64),
    _write_case("write_table_empty", "B = 0", batch=0, width=4, most=2),
    _write_case("write_table_ragged", "rows and starts", batch=9, width=21, most=7),
    _write_case("write_table_outside", "a write past the row's end", batch=7, width=9, most=6, outside=True),
    _write_case("write_table_b64", "the step's shape", gate=True, bench=True, batch=64, width=2048, most=32),
    _compact_case("compact_empty", "no entries", size=0),
    _compact_case("compact_one", "a block of one lane", size=1),
    _compact_case("compact_plain", "order, an unwritten tail", size=37),
    _compact_case("compact_source", "an index past the source", size=37, source=11),
    _compact_case("compact_into", "entries behind the kept ones overwritten", size=29, out=40),
    _compact_case("compact_short", "kept entries past the result", size=29, out=4),
    _compact_case("compact_blocks", "the carry between blocks", size=17000),
    _compact_case("compact_b64", "the step's shape", gate=True, bench=True, size=512, source=2048),
)

DRAFT_CASES = (
    _draft_case("draft_empty", "B = 0", batch=0, topk=2, num_steps=3, page_size=4),
    _draft_case("draft_page_1", "branches of unpaged drafts", batch=4, topk=3, num_steps=2, page_size=1),
    _draft_case("draft_chain", "one branch over pages", batch=4, topk=1, num_steps=5, page_size=4),
    _draft_case("draft_page_4", "the hole of a copied tail", batch=5, topk=2, num_steps=5, page_size=4),
    _draft_case("draft_page_16", "a tail longer than drafts", batch=7, topk=3, num_steps=2, page_size=16, longest=40),
    _draft_case("draft_one", "a tile of one lane", batch=1, topk=1, num_steps=1, page_size=1),
    _draft_case("draft_b64", "the step's shape", gate=True, bench=True, page_size=16, longest=256, **_STEP),
    _draft_case("draft_b64_page_1", "the variant without tails", gate=True, page_size=1, longest=40, **_STEP),
    _indices_case("indices_empty", "B = 0", batch=0, topk=2, num_steps=2, page_size=4),
    _indices_case("indices_page_1", "topk 1", batch=4, topk=1, num_steps=3, page_size=1),
    _indices_case("indices_branches", "branches of unpaged drafts", batch=3, topk=2, num_steps=3, page_size=1),
    _indices_case("indices_paged", "drafts behind a copied tail", batch=4, topk=2, num_steps=3, page_size=4),
    _indices_case(
        "indices_window", "window and sink by the uncut length", batch=5, topk=2, num_steps=2, page_size=4, window=2,
        sink=1,
    ),
    _indices_case("indices_no_window", "a window of nothing", batch=4, topk=2, num_steps=2, page_size=1, window=0),
    _indices_case("indices_short", "branches past the capacity", batch=4, topk=2, num_steps=3, page_size=1, short=20),
    _indices_case(
        "indices_into", "row strides, entries that no branch owns", batch=4, topk=2, num_steps=3, page_size=4,
        into=True,
    ),
    _indices_case("indices_gate", "several blocks a program", gate=True, page_size=16, longest=60, **_STEP),
    _indices_case("indices_gate_page_1", "the unpaged variant", gate=True, batch=2, topk=1, num_steps=3, page_size=1),
    _indices_case("indices_b64", "the step's shape", bench=True, tags=("large",), page_size=16, longest=1024, **_STEP),
    _verify_case("verify_empty", "B = 0", batch=0, factor=2),
    _verify_case("verify_2", "the pair of Naive-EAGLE", batch=5, factor=2),
    _verify_case("verify_1", "plain decoding", batch=3, factor=1),
    _verify_case("verify_7", "an odd factor", batch=4, factor=7),
    _verify_case("verify_short", "sequences past the capacity", batch=4, factor=3, short=15),
    _verify_case("verify_into", "entries that no sequence owns", batch=4, factor=3, into=True),
    _verify_case("verify_gate", "registers", gate=True, batch=6, factor=4),
    _verify_case("verify_b64", "the step's shape", bench=True, tags=("large",), batch=64, factor=4, longest=1024),
)  # fmt: skip

SLOT_CASES = (
    _evict_case("evict_empty", "B = 0", batch=0, nodes=4, page_size=4),
    _evict_case("evict_no_nodes", "N = 0", batch=2, nodes=0, page_size=4),
    _evict_case("evict_page_1", "the accepted token itself evicted", batch=7, nodes=5, page_size=1),
    _evict_case("evict_odd", "page arithmetic below position 0", batch=9, nodes=7, page_size=3),
    _evict_case("evict_scattered", "flags that are no suffix", batch=9, nodes=7, page_size=3, scattered=True),
    _evict_case("evict_b64", "registers", gate=True, bench=True, batch=64, nodes=16, page_size=16),
    _list_case("list_empty", "an empty list", size=0),
    _list_case("list_one", "a tile of one lane", size=1),
    case_of("move_slots", _idle_list, "list_idle", "slot 0 written by pairs that move nothing"),
    _list_case("list_overlap", "a source overwritten first", size=41, heads=3, dim=7),
    _list_case("list_staged", "order between the two launches", size=150),
    _list_case(
        "list_direct_shipped", "registers of the longest direct list", gate=True, tags=("large",), size=256,
        page_size=16, heads=8, dim=128,
    ),
    _list_case(
        "list_staged_shipped", "registers of the staged move", gate=True, bench=True, tags=("large",), size=500,
        page_size=16, heads=8, dim=128,
    ),
)  # fmt: skip

_candidates_case = partial(case_of, "parents_from_candidates", _candidates)
_mask_case = partial(case_of, "export_mask", _mask)
_noise_case = partial(case_of, "export_mask", _noise_mask)
_full_case = partial(_mask_case, form="full")
_bytes_case = partial(_mask_case, form="flashinfer")
_64: dict[str, Any] = dict(batch=64, num_nodes=64)

TREE_CASES = (
    _candidates_case("candidates_one_step", "an empty history", batch=2, num_nodes=4, topk=4, steps=1),
    _candidates_case("candidates_root_only", "no entry at all", batch=2, num_nodes=1, topk=2, steps=2),
    _candidates_case("candidates_64", "orphans of a random choice", gate=True, bench=True, topk=8, steps=6, **_64),
    _candidates_case(
        "candidates_strange", "ids outside the history", batch=5, num_nodes=9, topk=3, steps=4, closed=False
    ),
    _candidates_case("candidates_256", "a parent in another block", batch=1, num_nodes=256, topk=10, steps=8),
    _full_case("full_empty_batch", "offsets of nothing", batch=0, num_nodes=3, capacity=5),
    _full_case("full_odd", "rows off the block", gate=True, batch=3, num_nodes=7, capacity=999),
    _full_case("full_cut", "stores past the capacity", batch=4, num_nodes=5, capacity=301),
    _full_case("full_long", "a prefix of several blocks", batch=2, num_nodes=3, longest=5000, capacity=31000),
    _full_case(
        "full_64", "the second half of a word", bench=True, tags=("large",), batch=8, num_nodes=64, longest=8192,
        capacity=8 * 64 * 8256,
    ),
    _full_case("full_many", "sizes of a second block of requests", batch=1100, num_nodes=1, longest=3, capacity=3300),
    _mask_case("query_empty_batch", "launch on an empty grid", batch=0, num_nodes=3, form="query"),
    _mask_case("query_64", "the sign bit", gate=True, bench=True, form="query", **_64),
    _mask_case("query_130", "columns past the last word", batch=2, num_nodes=130, form="query"),
    _mask_case("packed_8", "bytes a row", batch=5, num_nodes=8, form="packed"),
    _mask_case("packed_13", "two bytes", batch=3, num_nodes=13, form="packed"),
    _mask_case("packed_32", "four bytes", batch=2, num_nodes=32, form="packed"),
    _mask_case("packed_64", "sign extension", gate=True, bench=True, form="packed", **_64),
    _noise_case("packed_noise", "bits beyond N", batch=2, num_nodes=5, form="packed"),
    _noise_case("full_noise", "column 0 taken for the prefix", batch=2, num_nodes=6, form="full", capacity=600),
    _noise_case(
        "flashinfer_noise", "column 0 taken for the prefix", batch=2, num_nodes=6, form="flashinfer", capacity=99
    ),
    _bytes_case("flashinfer_odd", "a byte that spans rows", batch=3, num_nodes=5, capacity=99),
    _bytes_case("flashinfer_short", "several rows in a byte", batch=6, num_nodes=3, longest=2, capacity=20),
    _bytes_case("flashinfer_130", "words of a byte", gate=True, batch=2, num_nodes=130, capacity=5000),
)  # fmt: skip

CASES = (*TABLE_CASES, *DRAFT_CASES, *SLOT_CASES, *TREE_CASES)


def _bytes_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _candidates_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """(bytes, operations): ids read once, parents written once."""
    return _bytes_of(inputs["selected"], inputs["parent_list"]) + inputs["selected"].numel() * 4, 0


def _export_work(inputs: dict[str, Any]) -> tuple[int, int]:
    batch, nodes = inputs["mask"].shape[:2]
    return _bytes_of(inputs["mask"], inputs["lengths"]) + (inputs.get("capacity") or batch * nodes * nodes), 0


def _move_slots_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """(bytes, operations): each slot that changes place is read and written; the pool around it is not."""
    moves = (inputs["source"] >= 0) & (inputs["target"] >= 0) & (inputs["source"] != inputs["target"])
    return 2 * int(moves.sum()) * slot_bytes(inputs["kv"]), 0


# The other functions handle a few KB: what counts there is the launch, and the benchmark counts every tensor once.
WORK = {"move_slots": _move_slots_work, "parents_from_candidates": _candidates_work, "export_mask": _export_work}
