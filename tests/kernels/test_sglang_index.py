"""Index functions of the SGLang layer, entry by entry in plain Python: tables, drafts, eviction, moves and trees."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_kernels import TreeLinks, build_tree
from specdec_kernels.compat import sglang
from specdec_kernels.compat.sglang.index import (
    SequenceIndices,
    align_eviction,
    compact,
    draft_kv_indices,
    draft_slots,
    export_mask,
    kernel_slots,
    move_slots,
    parents_from_candidates,
    read_table,
    row_offsets,
    verify_decode_indices,
    write_table,
)
from specdec_kernels.launch import record_launches

IMPLS = ["reference", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_tree(nodes: int, lengths: list[int], seed: int = 0) -> tuple[list[list[list[bool]]], torch.Tensor]:
    """Cells of random trees, found by walking the parents, and their mask words."""
    draws = torch.rand(len(lengths), nodes, generator=torch.Generator().manual_seed(seed))
    parents = (draws * torch.arange(nodes)).int()
    cells = []
    for row in parents.tolist():
        seen: list[list[bool]] = []
        for i in range(nodes):
            above = seen[row[i]] if i else [False] * nodes
            seen.append([above[j] or j == i for j in range(nodes)])
        cells.append(seen)
    committed = torch.tensor(lengths, dtype=torch.int64, device=DEVICE)
    return cells, build_tree(parents.to(DEVICE), committed, impl="reference").mask


def flat_cells(cells: list[list[list[bool]]], lengths: list[int]) -> list[list[bool]]:
    """Each request's rows, a prefix of true cells before each."""
    return [
        [bit for row in request for bit in [True] * max(length, 0) + row]
        for request, length in zip(cells, lengths, strict=True)
    ]


shapes = st.tuples(st.integers(1, 20), st.lists(st.integers(-1, 30), max_size=4), st.integers(0, 99))


@pytest.mark.parametrize("impl", IMPLS)
@given(shape=shapes, spare=st.integers(-40, 40))
def test_full_form(impl: str, shape: tuple[int, list[int], int], spare: int) -> None:
    nodes, lengths, seed = shape
    cells, mask = random_tree(nodes, lengths, seed)
    parts = flat_cells(cells, lengths)
    flat = [bit for part in parts for bit in part]
    capacity = max(0, len(flat) + spare)
    full = export_mask(mask, torch.tensor(lengths, dtype=torch.int64, device=DEVICE), "full", capacity, impl=impl)
    assert full.cells.tolist() == (flat + [False] * capacity)[:capacity]
    assert full.offsets is not None
    assert full.offsets.tolist() == [sum(map(len, parts[:b])) for b in range(len(parts) + 1)]


@pytest.mark.parametrize("impl", IMPLS)
@given(shape=shapes, spare=st.integers(-9, 9))
def test_flashinfer_form(impl: str, shape: tuple[int, list[int], int], spare: int) -> None:
    nodes, lengths, seed = shape
    cells, mask = random_tree(nodes, lengths, seed)
    parts = [
        [sum(bit << k for k, bit in enumerate(part[i : i + 8])) for i in range(0, len(part), 8)]
        for part in flat_cells(cells, lengths)
    ]
    flat = [byte for part in parts for byte in part]
    capacity = max(0, len(flat) + spare)
    packed = export_mask(
        mask, torch.tensor(lengths, dtype=torch.int64, device=DEVICE), "flashinfer", capacity, impl=impl
    )
    assert packed.cells.tolist() == (flat + [0] * capacity)[:capacity]
    assert packed.offsets is not None
    assert packed.offsets.tolist() == [sum(map(len, parts[:b])) for b in range(len(parts) + 1)]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("nodes", [1, 8, 9, 16, 17, 32, 33, 64, 65, 200])
def test_forms_agree(impl: str, nodes: int) -> None:
    lengths = [0, 5]
    cells, mask = random_tree(nodes, lengths)
    committed = torch.tensor(lengths, device=DEVICE)
    query = export_mask(mask, committed, "query", impl=impl)
    assert query.cells.tolist() == cells and query.offsets is None
    full = export_mask(mask, committed, "full", 2 * nodes * nodes + 5 * nodes, impl=impl).cells
    assert torch.equal(full[: nodes * nodes], query.cells[0].flatten())
    assert torch.equal(full[nodes * nodes :].reshape(nodes, 5 + nodes)[:, 5:], query.cells[1])
    if nodes <= 64:
        packed = export_mask(mask, committed, "packed", impl=impl).cells
        assert packed.dtype.itemsize * 8 == next(bits for bits in (8, 16, 32, 64) if nodes <= bits)
        assert packed.tolist() == [[sum(bit << j for j, bit in enumerate(row)) for row in b] for b in cells]


@pytest.mark.parametrize("impl", IMPLS)
def test_offsets_pass_32_bits(impl: str) -> None:
    """The second request starts beyond 2^31 cells; only what fits is written."""
    _, mask = random_tree(4, [0, 0])
    lengths = torch.tensor([1 << 31, 3], device=DEVICE)
    full = export_mask(mask, lengths, "full", 100, impl=impl)
    assert full.offsets is not None and full.cells.all()
    assert full.offsets.tolist() == [0, 4 * ((1 << 31) + 4), 4 * ((1 << 31) + 4) + 28]
    packed = export_mask(mask, lengths, "flashinfer", 100, impl=impl)
    assert packed.offsets is not None and packed.offsets.tolist() == [0, (1 << 30) + 2, (1 << 30) + 2 + 4]
    assert packed.cells.tolist() == [255] * 100


@pytest.mark.parametrize("impl", IMPLS)
def test_requests_do_not_touch_each_other(impl: str) -> None:
    _, mask = random_tree(11, [0] * 6)
    order = [4, 2, 5, 0, 3, 1]
    lengths = torch.tensor([3, 0, 9, 1, 40, 2], device=DEVICE)
    full = export_mask(mask, lengths, "full", 2000, impl=impl)
    moved = export_mask(mask[order].contiguous(), lengths[order].contiguous(), "full", 2000, impl=impl)
    assert full.offsets is not None and moved.offsets is not None
    for place, source in enumerate(order):
        there = moved.cells[moved.offsets[place] : moved.offsets[place + 1]]
        assert torch.equal(there, full.cells[full.offsets[source] : full.offsets[source + 1]])


def word_of(nodes: list[int], number: int) -> int:
    """The bits of `nodes` that lie in one 64-bit word, as a signed integer."""
    word = sum(1 << j % 64 for j in nodes if j // 64 == number)
    return word - (1 << 64) if word >= 1 << 63 else word


def candidate_tree(
    impl: str, selected: list[list[int]], parent_list: list[list[int]], topk: int, lengths: list[int]
) -> TreeLinks:
    batch = len(selected)
    parents = parents_from_candidates(
        torch.tensor(selected, dtype=torch.int64, device=DEVICE).reshape(batch, -1),
        torch.tensor(parent_list, dtype=torch.int64, device=DEVICE).reshape(batch, -1),
        topk,
        impl=impl,
    )
    return build_tree(parents, torch.tensor(lengths, device=DEVICE), WALK, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_candidates_of_a_deep_tree(impl: str) -> None:
    selected, history = [0, 4, 5, 6, 7, 24, 36], [-1, 0, 1, 2, 3, 4, 5, 6, 7, 24, 28, 20, 21]
    links = candidate_tree(impl, [selected], [history], 4, [10])
    assert links.first_child.tolist() == [[1, 2, -1, 6, -1, -1, 7, -1]]
    assert links.next_sibling.tolist() == [[-1, -1, 3, 4, 5, -1, -1, -1]]
    assert links.mask.flatten().tolist() == [1, 3, 7, 11, 19, 35, 75, 203]


@pytest.mark.parametrize("impl", IMPLS)
def test_candidates_of_two_branches(impl: str) -> None:
    selected, history = [0, 1, 4, 8, 20, 24, 36], [-1, 0, 1, 2, 3, 4, 8, 9, 12, 20, 24, 21, 28]
    links = candidate_tree(impl, [selected], [history], 4, [5])
    assert links.depth.tolist() == [[0, 1, 1, 2, 2, 3, 3, 4]]
    assert links.first_child.tolist() == [[1, 3, 4, 5, 6, 7, -1, -1]]
    assert links.next_sibling.tolist() == [[-1, 2, -1, -1, -1, -1, -1, -1]]


WALK = 6
"""Longest walk to the root in these tests: shorter than some of the trees."""


def walked(selected: list[int], history: list[int], topk: int, length: int) -> dict[str, list]:
    """Links, positions and masks as the fixed contract of SGLang's builder states them, entry by entry."""
    nodes = range(len(selected) + 1)

    def parent(i: int) -> int | None:
        row = selected[i - 1] // topk
        if row <= 0:
            return 0
        wanted = history[row] if row < len(history) else None
        return selected.index(wanted) + 1 if wanted in selected else None

    paths = [[0]]
    for i in nodes[1:]:
        path, above = [i], parent(i)
        while above and len(path) < WALK:
            path.append(above)
            above = parent(above)
        paths.append([*path, 0])
    children = [[j for j in nodes[1:] if parent(j) == i] for i in nodes]
    order = {left: right for row in children for left, right in zip(row, row[1:], strict=False)}
    return {
        "first_child": [min(row, default=-1) for row in children],
        "next_sibling": [order.get(i, -1) for i in nodes],
        "depth": [len(path) - 1 for path in paths],
        "positions": [length + len(path) - 1 for path in paths],
        "mask": [[word_of(sorted(set(path)), w) for w in range(-(-len(nodes) // 64))] for path in paths],
    }


@st.composite
def candidate_choices(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], int]:
    topk, rows = draw(st.integers(1, 4)), draw(st.integers(0, 9))
    drafts, batch = draw(st.integers(0, 10)), draw(st.integers(1, 3))
    ids = st.integers(-1, topk * max(1, rows) + 2)
    any_ids = st.lists(ids, min_size=drafts, max_size=drafts)
    selected = [sorted(draw(any_ids)) if draw(st.booleans()) else draw(any_ids) for _ in range(batch)]
    history = [[draw(ids) for _ in range(rows)] for _ in range(batch)]
    return selected, history, topk


@pytest.mark.parametrize("impl", IMPLS)
@given(choice=candidate_choices())
def test_any_candidates(impl: str, choice: tuple[list[list[int]], list[list[int]], int]) -> None:
    selected, history, topk = choice
    lengths = [7 * b for b in range(len(selected))]
    links = candidate_tree(impl, selected, history, topk, lengths)
    expected = [
        walked(*row, topk, length) for row, length in zip(zip(selected, history, strict=True), lengths, strict=True)
    ]
    for name in TreeLinks._fields:
        assert getattr(links, name).tolist() == [row[name] for row in expected], name


def test_wrong_tree_input_is_refused() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    mask, lengths = torch.zeros(2, 70, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="form: expected one of full, query, packed, flashinfer, got 'bits'"):
        export_mask(mask, lengths, "bits")
    with pytest.raises(ValueError, match="packed holds up to 64 nodes, got 70"):
        export_mask(mask, lengths, "packed")
    with pytest.raises(
        ValueError, match=r"capacity: form full expects the length of the flat result \(>= 0\), got None"
    ):
        export_mask(mask, lengths, "full")
    with pytest.raises(ValueError, match="capacity: form query has a fixed shape and expects None, got 3"):
        export_mask(mask, lengths, "query", 3)
    with pytest.raises(ValueError, match=r"mask: expected shape \[\*, \*, 2\], got \[2, 70, 1\]"):
        export_mask(mask[:, :, :1].contiguous(), lengths, "query")
    with pytest.raises(ValueError, match="topk: expected at least 1, got 0"):
        parents_from_candidates(ids, ids, 0)
    with pytest.raises(ValueError, match=r"parent_list: expected shape \[2, \*\], got \[1, 3\]"):
        parents_from_candidates(ids, ids[:1], 2)


def as_ints(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@st.composite
def token_tables(draw: st.DrawFn, width: int = 40) -> tuple[list[list[int]], list[int]]:
    """Rows of distinct slots, more rows than requests, and the row of each request."""
    batch = draw(st.integers(0, 4))
    rows = batch + draw(st.integers(1, 2))
    slots = draw(st.permutations(range(rows)))
    table = [[row * 100 + column + 1 for column in range(width)] for row in slots]
    return table, draw(st.permutations(range(rows)))[:batch]


def entry(row: list[int], position: int, outside: int) -> int:
    return row[position] if 0 <= position < len(row) else outside


def tabled(table: list[list[int]]) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.int32, device=DEVICE)


def starts_of(counts: list[int]) -> list[int]:
    return [sum(counts[:b]) for b in range(len(counts) + 1)]


@pytest.mark.parametrize("impl", IMPLS)
@given(counts=st.lists(st.integers(-2, 9), max_size=20), capacity=st.one_of(st.none(), st.integers(0, 60)))
def test_offsets_are_sums(impl: str, counts: list[int], capacity: int | None) -> None:
    found = row_offsets(as_ints(counts, torch.int32), capacity, impl=impl)
    limit = sum(abs(c) for c in counts) if capacity is None else capacity
    assert found.tolist() == [min(total, limit) for total in starts_of([max(c, 0) for c in counts])]


@pytest.mark.parametrize("impl", IMPLS)
@given(data=st.data(), spans=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), max_size=6))
def test_positions_are_read_without_a_table(impl: str, data: st.DataObject, spans: list[tuple[int, int]]) -> None:
    start, counts = [s for s, _ in spans], [c for _, c in spans]
    flat = [s + j for s, c in spans for j in range(c)]
    capacity = data.draw(st.integers(0, len(flat) + 3))
    found = read_table(None, None, as_ints(start), as_ints(counts, torch.int32), capacity, impl=impl)
    assert found.values.tolist() == (flat + [-1] * capacity)[:capacity]


@pytest.mark.parametrize("impl", IMPLS)
@given(tables=token_tables(), data=st.data())
def test_what_is_written_is_read(impl: str, tables: tuple[list[list[int]], list[int]], data: st.DataObject) -> None:
    """A write changes the named entries alone, and a read of the same spans returns the values. A span that leaves its
    row is cut and does not continue in the next row."""
    table, rows = tables
    width = len(table[0])
    counts = [data.draw(st.integers(0, 6)) for _ in rows]
    start = [data.draw(st.integers(-2, width)) for _ in rows]
    values = [1000 + i for i in range(sum(counts))]
    first = starts_of(counts)
    expected = [list(row) for row in table]
    for b, row in enumerate(rows):
        for j in range(counts[b]):
            if 0 <= start[b] + j < width:
                expected[row][start[b] + j] = values[first[b] + j]
    pool = tabled(table)
    named = (as_ints(list(rows)), as_ints(start), as_ints(counts))
    write_table(pool, *named, as_ints(values), impl=impl)
    assert pool.tolist() == expected
    capacity = len(values) + 2
    found = read_table(pool, *named, capacity, impl=impl)
    back = [entry(expected[row], start[b] + j, -1) for b, row in enumerate(rows) for j in range(counts[b])]
    assert found.values.tolist() == back + [-1, -1]
    assert found.offsets.tolist() == first


@pytest.mark.parametrize("impl", IMPLS)
@given(index=st.lists(st.integers(-3, 12), max_size=40), data=st.data())
def test_compaction_keeps_order(impl: str, index: list[int], data: st.DataObject) -> None:
    source = data.draw(st.one_of(st.none(), st.lists(st.integers(0, 99), max_size=15)))
    room = data.draw(st.one_of(st.none(), st.integers(0, 45)))
    kept = [i for i in index if i >= 0]
    if source is not None:
        kept = [source[i] if i < len(source) else -5 for i in kept]
    out = None if room is None else torch.full((room,), 7, device=DEVICE)
    found = compact(
        as_ints(index, torch.int32), None if source is None else as_ints(source), fill=-5, out=out, impl=impl
    )
    size = len(index) if room is None else room
    assert found.values.tolist() == (kept + [-5 if room is None else 7] * size)[:size]
    assert found.num_kept.tolist() == [len(kept)]


@pytest.mark.parametrize("impl", IMPLS)
@given(rows=st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=5), st.booleans()), max_size=6))
def test_finished_rows_are_dropped(impl: str, rows: list[tuple[list[int], bool]]) -> None:
    flat = [value for row, _ in rows for value in row]
    going = [value for row, finished in rows for value in row if not finished]
    accepted = as_ints([len(row) - 1 for row, _ in rows], torch.int32)
    kept = as_ints([0 if finished else len(row) for row, finished in rows], torch.int32)
    found = torch.full((len(flat),), 7, device=DEVICE)
    sglang.filter_finished_cache_loc_kernel(found, as_ints(flat), accepted, kept, impl=impl)
    assert found.tolist() == going + [7] * (len(flat) - len(going))


def branch_position(length: int, branch: int, step: int, topk: int, steps: int, page: int) -> int:
    if page == 1 or topk == 1:
        return length + branch * steps + step
    pages = math.ceil((length % page + steps) / page)
    return length // page * page + branch * pages * page + length % page + step


DRAFTS = dict(
    lengths=st.lists(st.integers(0, 11), max_size=4),
    topk=st.integers(1, 3),
    steps=st.integers(1, 4),
    page=st.sampled_from([1, 2, 4, 5]),
)


@pytest.mark.parametrize("impl", IMPLS)
@given(**DRAFTS)
def test_draft_slots(impl: str, lengths: list[int], topk: int, steps: int, page: int) -> None:
    """Every branch writes its own slots, with paged drafts on its own pages; the copies of the prefix tail go to the
    positions right before the drafts of a branch."""
    table = [[100 * b + p for p in range(90)] for b in range(len(lengths))]
    rows = as_ints(list(range(len(lengths))))
    pool = tabled(table).reshape(len(lengths), 90 if table else 0)
    found = draft_slots(pool, rows, as_ints(lengths), topk, steps, page, impl=impl)
    place = [(b, t) for b in range(len(lengths)) for t in range(topk)]
    expected = [
        [100 * b + branch_position(lengths[b], t, s, topk, steps, page) for b, t in place] for s in range(steps)
    ]
    assert found.slots.tolist() == expected
    assert len({slot for row in expected for slot in row}) == len(place) * steps
    pairs = list(zip(found.source.flatten().tolist(), found.target.flatten().tolist(), strict=True))
    copies = [
        (100 * b + lengths[b] // page * page + o, 100 * b + branch_position(lengths[b], t, 0, topk, steps, page)
         - lengths[b] % page + o)
        for b, t in place if t and page > 1
        for o in range(lengths[b] % page)
    ]  # fmt: skip
    assert [pair for pair in pairs if pair != (-1, -1)] == copies
    if page > 1 and topk > 1:
        written = [
            (b, (expected[step][z] - 100 * b) // page, t) for step in range(steps) for z, (b, t) in enumerate(place)
        ]
        assert len({(b, own) for b, own, _ in written}) == len(set(written)), "two branches write one page"


@pytest.mark.parametrize("impl", IMPLS)
@given(window=st.one_of(st.none(), st.integers(0, 6)), sink=st.integers(0, 3), short=st.integers(0, 9), **DRAFTS)
def test_draft_kv_indices(
    impl: str, lengths: list[int], topk: int, steps: int, page: int, window: int | None, sink: int, short: int
) -> None:
    table = [[100 * b + p + 1 for p in range(90)] for b in range(len(lengths))]
    pool = tabled(table).reshape(len(lengths), 90 if table else 0)
    expected = []
    for step in range(steps):
        sequences = []
        for b, length in enumerate(lengths):
            prefix = list(range(length))
            if window is not None and length > sink + window:
                prefix = prefix[:sink] + prefix[length - window :]
            for t in range(topk):
                drafts = [branch_position(length, t, s, topk, steps, page) for s in range(step + 1)]
                sequences.append([100 * b + position + 1 for position in prefix + drafts])
        expected.append(sequences)
    capacity = max(0, max(sum(map(len, sequences)) for sequences in expected) - short)
    found = draft_kv_indices(
        pool, as_ints(list(range(len(lengths)))), as_ints(lengths), topk, steps, page, capacity,
        window=window, sink=sink, impl=impl,
    )  # fmt: skip
    for step, sequences in enumerate(expected):
        flat = [slot for sequence in sequences for slot in sequence]
        assert found.indices[step].tolist() == (flat + [0] * capacity)[:capacity]
        ends = starts_of([len(sequence) for sequence in sequences])
        assert found.indptr[step].tolist() == [min(end, capacity) for end in ends]


@pytest.mark.parametrize("impl", IMPLS)
@given(tables=token_tables(), factor=st.integers(1, 6), data=st.data())
def test_verify_decode_indices(
    impl: str, tables: tuple[list[list[int]], list[int]], factor: int, data: st.DataObject
) -> None:
    table, rows = tables
    lengths = [data.draw(st.integers(0, 12)) for _ in rows]
    sequences = [table[row][: length + q + 1] for row, length in zip(rows, lengths, strict=True) for q in range(factor)]
    flat = [slot for sequence in sequences for slot in sequence]
    capacity = max(0, len(flat) + data.draw(st.integers(-7, 3)))
    found = verify_decode_indices(tabled(table), as_ints(list(rows)), as_ints(lengths), factor, capacity, impl=impl)
    assert found.indices.tolist() == (flat + [0] * capacity)[:capacity]
    ends = starts_of([len(sequence) for sequence in sequences])
    assert found.indptr.tolist() == [min(end, capacity) for end in ends]


@pytest.mark.parametrize("impl", IMPLS)
@given(data=st.data(), order=st.permutations(range(4)))
def test_a_permuted_batch_is_permuted(impl: str, data: st.DataObject, order: list[int]) -> None:
    """The indices of a request do not depend on its place in the batch."""
    lengths = [data.draw(st.integers(0, 9)) for _ in range(4)]
    pool = tabled([[100 * b + p for p in range(60)] for b in range(4)])

    def sequences(rows: list[int]) -> list[list[list[int]]]:
        named = (as_ints(rows), as_ints([lengths[row] for row in rows]))
        found = draft_kv_indices(pool, *named, 2, 2, 4, 80, window=4, sink=1, impl=impl)
        ends, flat = found.indptr[1].tolist(), found.indices[1].tolist()
        pieces = [flat[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        return [pieces[2 * place : 2 * place + 2] for place in range(4)]

    plain = sequences([0, 1, 2, 3])
    assert sequences(order) == [plain[row] for row in order]


@pytest.mark.parametrize("impl", IMPLS)
@given(
    page=st.sampled_from([1, 3, 4, 16]),
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), min_size=1, max_size=5),
)
def test_only_whole_pages_are_evicted(impl: str, page: int, rows: list[tuple[int, int]]) -> None:
    """A slot is kept iff it was accepted or lies on the page of the last kept token."""
    nodes = 6
    evict = [[node >= accepted for node in range(nodes)] for _, accepted in rows]
    found = align_eviction(torch.tensor(evict, device=DEVICE), as_ints([length for length, _ in rows]), page, impl=impl)
    expected = [
        [node >= accepted and (length + node) // page != (length + accepted - 1) // page for node in range(nodes)]
        for length, accepted in rows
    ]
    assert found.tolist() == expected


@pytest.mark.parametrize("impl", IMPLS)
@given(data=st.data(), size=st.sampled_from([0, 1, 5, 17, 90]))
def test_moves_of_a_list_are_simultaneous(impl: str, data: st.DataObject, size: int) -> None:
    """For any list, with chains and cycles, each target holds what its source held before the call."""
    pages, page = 25, 4
    target = data.draw(st.permutations(range(pages * page)))[:size]
    source = [data.draw(st.integers(-1, pages * page)) for _ in target]
    pool = torch.arange(2 * 2 * pages * page * 3, dtype=torch.float32, device=DEVICE).view(2, 2, pages, page, 1, 3)
    before = pool.flatten(2, 3).clone()
    expected = before.clone()
    for old, new in zip(source, target, strict=True):
        if 0 <= old < pages * page:
            expected[:, :, new] = before[:, :, old]
    move_slots(pool, as_ints(source), as_ints(list(target)), impl=impl)
    assert torch.equal(pool.flatten(2, 3), expected)


@pytest.mark.parametrize(("staged_layers", "at_once"), [(0, 1), (1, 1), (2, 2), (9, 5)])
def test_long_lists_are_staged_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, staged_layers: int, at_once: int
) -> None:
    """As many of five layers at once as the buffer holds, and one at least: a launch to gather and one to scatter."""
    size, row, layers = 300, 6, 5
    pool = torch.zeros(layers, 2, 80, 4, 2, 3, device=DEVICE)
    monkeypatch.setattr(kernel_slots, "_STAGING_BYTES", staged_layers * 2 * size * row * 4)
    slots = torch.arange(size, device=DEVICE)
    with record_launches("sm90") as launches:
        move_slots(pool, slots, slots.flip(0), impl="triton")
    assert len(launches) == 2 * -(-layers // at_once)
    assert {each.args[1].numel() for each in launches} == {at_once * 2 * size * row}


@pytest.mark.parametrize("impl", IMPLS)
def test_tails_are_copied_before_branches_draft(impl: str) -> None:
    """With draft_slots and move_slots together every branch sees the prefix tail on its own first page."""
    pool = torch.arange(2 * 20.0, device=DEVICE).view(1, 2, 5, 4, 1, 1)
    table = torch.arange(20, dtype=torch.int32, device=DEVICE).view(1, 20)
    found = draft_slots(table, as_ints([0]), as_ints([6]), 3, 2, 4, impl=impl)
    move_slots(pool, found.source.flatten(), found.target.flatten(), impl=impl)
    flat = pool.view(2, 20)
    for branch in (1, 2):
        first = int(found.slots[0, branch]) - 2
        assert torch.equal(flat[:, first : first + 2], flat[:, 4:6])


def test_wrong_index_input_is_refused() -> None:
    table = torch.zeros(2, 9, dtype=torch.int32)
    rows, ints = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"lengths: expected shape \[2\], got \[3\]"):
        draft_slots(table, rows, torch.zeros(3, dtype=torch.int64), 2, 2, 4)
    with pytest.raises(ValueError, match="topk: expected at least 1, got 0"):
        draft_slots(table, rows, ints, 0, 2, 4)
    with pytest.raises(ValueError, match="window: expected at least 0, got -1"):
        draft_kv_indices(table, rows, ints, 1, 1, 1, 5, window=-1)
    with pytest.raises(ValueError, match=r"out.indptr's entries: expected at least 3, got 2"):
        out = SequenceIndices(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 5, dtype=torch.int32))
        draft_kv_indices(table, rows, ints, 1, 1, 1, 5, out=out)
    with pytest.raises(ValueError, match="factor: expected at least 1, got 0"):
        verify_decode_indices(table, rows, ints, 0, 4)
    with pytest.raises(ValueError, match="counts: expected dtype torch.int32 or torch.int64, got torch.float32"):
        row_offsets(torch.zeros(3))
    with pytest.raises(ValueError, match="evict: expected dtype torch.bool"):
        align_eviction(table, ints, 4)
    with pytest.raises(ValueError, match=r"target: expected shape \[2\], got \[3\]"):
        move_slots(torch.zeros(1, 2, 2, 2, 1, 1), ints, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="table, rows: expected both or neither"):
        read_table(table, None, ints, ints, 3)
