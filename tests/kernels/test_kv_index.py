"""Index arithmetic over random tables, position by position in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_kernels import (
    StepIndices,
    accepted_locations,
    accepted_positions,
    align_eviction,
    compact,
    draft_kv_indices,
    draft_slots,
    filter_rows,
    flash_attention_table,
    flashinfer_indices,
    move_accepted,
    move_slots,
    read_table,
    row_offsets,
    token_slots,
    verify_decode_indices,
    write_table,
)

IMPLS = ["reference", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def page_tables(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Rows of distinct pages, -1 behind what a row holds, and a page size."""
    batch, row_pages = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    pages = draw(st.permutations(range(batch * row_pages + 2)))
    held = [draw(st.integers(0, row_pages)) for _ in range(batch)]
    rows = [[pages[b * row_pages + p] if p < held[b] else -1 for p in range(row_pages)] for b in range(batch)]
    return rows, draw(st.sampled_from([1, 2, 3, 16]))


def as_table(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE).reshape(len(rows), len(rows[0]) if rows else 1)


def as_ints(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def slot_of(row: list[int], position: int, page_size: int) -> int:
    if not 0 <= position < len(row) * page_size or row[position // page_size] < 0:
        return -1
    return row[position // page_size] * page_size + position % page_size


@pytest.mark.parametrize("impl", IMPLS)
@given(table=page_tables(), data=st.data())
def test_token_slots(impl: str, table: tuple[list[list[int]], int], data: st.DataObject) -> None:
    rows, page_size = table
    end = len(rows[0]) * page_size if rows else 1
    start = [data.draw(st.integers(-2, end + 2)) for _ in rows]
    counts = [data.draw(st.integers(0, 8)) for _ in rows]
    slots = token_slots(as_table(rows), as_ints(start), as_ints(counts, torch.int32), 7, page_size, impl=impl)
    expected = [
        [slot_of(rows[b], start[b] + j, page_size) if j < counts[b] else -1 for j in range(7)] for b in range(len(rows))
    ]
    assert slots.tolist() == expected


@pytest.mark.parametrize("impl", IMPLS)
@given(table=page_tables(), data=st.data())
def test_backend_indices(impl: str, table: tuple[list[list[int]], int], data: st.DataObject) -> None:
    rows, page_size = table
    row_pages = len(rows[0]) if rows else 1
    lengths = [data.draw(st.integers(0, row_pages * page_size)) for _ in rows]
    used = [row[: -(-length // page_size)] for row, length in zip(rows, lengths, strict=True)]
    flat = [page for pages in used for page in pages]
    capacity = data.draw(st.sampled_from([None, len(flat), len(flat) + 5]))

    found = flashinfer_indices(as_table(rows), as_ints(lengths), page_size, capacity, impl=impl)
    size = len(rows) * row_pages if capacity is None else capacity
    assert found.indices.tolist() == flat + [0] * (size - len(flat))
    assert found.indptr.tolist() == [sum(map(len, used[:b])) for b in range(len(rows) + 1)]
    whole = [
        (pages - 1) * page_size + last for pages, last in zip(map(len, used), found.last_page_len.tolist(), strict=True)
    ]
    assert [w if pages else 0 for w, pages in zip(whole, used, strict=True)] == lengths

    other = flash_attention_table(as_table(rows), as_ints(lengths), page_size, impl=impl)
    assert other.page_table.tolist() == [pages + [0] * (row_pages - len(pages)) for pages in used]
    assert other.seqused_k.tolist() == lengths


@pytest.mark.parametrize("impl", IMPLS)
def test_a_short_capacity_is_never_passed(impl: str) -> None:
    table, lengths = as_table([[4, 2], [1, 3], [0, 5]]), as_ints([4, 4, 4])
    found = flashinfer_indices(table, lengths, 2, capacity=3, impl=impl)
    assert found.indices.tolist() == [4, 2, 1]
    assert found.indptr.tolist() == [0, 2, 3, 3]


@pytest.mark.parametrize("impl", IMPLS)
@given(
    page_size=st.sampled_from([1, 3, 16]),
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    data=st.data(),
)
def test_an_accepted_path_moves_to_the_front(
    impl: str, page_size: int, lengths: list[int], data: st.DataObject
) -> None:
    """Every slot of the pool, moved or not, is what a copy position by position leaves."""
    nodes, depth = 9, 5
    row_pages = -(-(20 + nodes) // page_size)
    pages = data.draw(st.permutations(range(len(lengths) * row_pages)))
    rows = [pages[b * row_pages : (b + 1) * row_pages] for b in range(len(lengths))]
    paths = [[0] + sorted(data.draw(st.sets(st.integers(1, nodes - 1), max_size=depth))) for _ in lengths]
    pool = torch.arange(2 * 2 * len(pages) * page_size * 2, dtype=torch.float32, device=DEVICE)
    pool = pool.view(2, 2, len(pages), page_size, 1, 2)
    flat, expected = pool.view(2, 2, -1, 2).clone(), pool.view(2, 2, -1, 2).clone()
    for row, length, path in zip(rows, lengths, paths, strict=True):
        for step, node in enumerate(path):
            source, target = (slot_of(row, length + place, page_size) for place in (node, step))
            expected[:, :, target] = flat[:, :, source]
    padded = [path + [-1] * (depth + 1 - len(path)) for path in paths]
    move_accepted(pool, as_table(rows), as_ints(lengths), as_ints(padded, torch.int32), impl=impl)
    assert torch.equal(pool.view(2, 2, -1, 2), expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_path_outside_the_table_moves_nothing(impl: str) -> None:
    pool = torch.arange(8.0, device=DEVICE).view(1, 2, 2, 2, 1, 1)
    before = pool.clone()
    move_accepted(pool, as_table([[1]]), as_ints([1]), as_ints([[0, 3]], torch.int32), impl=impl)
    move_accepted(pool, as_table([[-1]]), as_ints([0]), as_ints([[0, 1]], torch.int32), impl=impl)
    assert torch.equal(pool, before)


def test_wrong_input_is_refused() -> None:
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    counts = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="page_size: expected at least 1, got 0"):
        flashinfer_indices(table, lengths, 0)
    with pytest.raises(ValueError, match="capacity: expected at least 0"):
        flashinfer_indices(table, lengths, 4, capacity=-1)
    with pytest.raises(ValueError, match="counts: expected dtype torch.int32"):
        token_slots(table, lengths, lengths, 3, 4)
    with pytest.raises(ValueError, match="width: expected at least 0"):
        token_slots(table, lengths, counts, -1, 4)
    with pytest.raises(ValueError, match="page_table: expected a contiguous tensor"):
        flash_attention_table(torch.zeros(3, 2, dtype=torch.int32).t(), lengths, 4)
    with pytest.raises(ValueError, match=r"kv: expected shape \[\*, 2, \*, \*, \*, \*\]"):
        move_accepted(torch.zeros(1, 3, 2, 2, 1, 1), table, lengths, counts[:, None])


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
def test_accepted_positions(impl: str, data: st.DataObject, spans: list[tuple[int, int]]) -> None:
    start, counts = [s for s, _ in spans], [c for _, c in spans]
    flat = [s + j for s, c in spans for j in range(c)]
    capacity = data.draw(st.integers(0, len(flat) + 3))
    found = accepted_positions(as_ints(start), as_ints(counts, torch.int32), capacity, impl=impl)
    assert found.values.tolist() == (flat + [-1] * capacity)[:capacity]


@pytest.mark.parametrize("impl", IMPLS)
@given(tables=token_tables(), data=st.data())
def test_what_is_written_is_read(impl: str, tables: tuple[list[list[int]], list[int]], data: st.DataObject) -> None:
    """Writing changes the named entries alone, a read of the same spans gives the values back, and a span that
    leaves the row is cut and not continued in the next one."""
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
@given(rows=st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=5), st.booleans()), max_size=6))
def test_finished_rows_are_dropped(impl: str, rows: list[tuple[list[int], bool]]) -> None:
    flat = [value for row, _ in rows for value in row]
    going = [value for row, finished in rows for value in row if not finished]
    counts = as_ints([len(row) for row, _ in rows], torch.int32)
    kept = as_ints([0 if finished else len(row) for row, finished in rows], torch.int32)
    found = filter_rows(as_ints(flat), counts, kept, impl=impl)
    assert found.values.tolist() == going + [0] * (len(flat) - len(going))
    assert found.offsets.tolist() == starts_of(kept.tolist())


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
    """Every branch writes slots of its own, on pages of its own where pages are shared by nobody; the tail
    copies go to the positions right before a branch's drafts."""
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
    """What a request gets does not depend on its place in the batch."""
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
@given(page=st.sampled_from([1, 3, 4]), data=st.data())
def test_locations_of_paths(impl: str, page: int, data: st.DataObject) -> None:
    nodes, width, batch = 6, 4, data.draw(st.integers(0, 3))
    slots = data.draw(st.permutations(range(batch * nodes)))
    rows = [slots[b * nodes : (b + 1) * nodes] for b in range(batch)]
    lengths = [data.draw(st.integers(0, 9)) for _ in rows]
    paths = [sorted(data.draw(st.sets(st.integers(0, nodes - 1), max_size=width))) for _ in rows]
    padded = torch.tensor([path + [-1] * (width - len(path)) for path in paths], dtype=torch.int32, device=DEVICE)
    found = accepted_locations(
        as_ints(list(slots)).view(batch, nodes), as_ints(lengths), padded.reshape(batch, width), page, impl=impl
    )
    for b, path in enumerate(paths):
        padding = [-1] * (width - len(path))
        assert found.source[b].tolist() == [rows[b][node] for node in path] + padding
        assert found.target[b].tolist() == rows[b][: len(path)] + padding
        last_kept = lengths[b] + len(path) - 1
        freed = [slot for node, slot in enumerate(rows[b]) if (lengths[b] + node) // page > last_kept // page]
        assert found.freed[b].tolist() == freed + [-1] * (nodes - len(freed))
        assert found.num_freed[b].item() == len(freed)


@pytest.mark.parametrize("impl", IMPLS)
@given(data=st.data(), size=st.sampled_from([0, 1, 5, 17, 90]))
def test_moves_of_a_list_are_simultaneous(impl: str, data: st.DataObject, size: int) -> None:
    """Any list, chains and cycles among it: each target holds what its source held before the call."""
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


@pytest.mark.parametrize("impl", IMPLS)
def test_tails_are_copied_before_branches_draft(impl: str) -> None:
    """draft_slots and move_slots together: every branch sees the prefix tail on its own first page."""
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
    with pytest.raises(ValueError, match=r"out.indptr's columns: expected at least 3, got 2"):
        out = StepIndices(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 5, dtype=torch.int32))
        draft_kv_indices(table, rows, ints, 1, 1, 1, 5, out=out)
    with pytest.raises(ValueError, match="factor: expected at least 1, got 0"):
        verify_decode_indices(table, rows, ints, 0, 4)
    with pytest.raises(ValueError, match="counts: expected dtype torch.int32 or torch.int64, got torch.float32"):
        row_offsets(torch.zeros(3))
    with pytest.raises(ValueError, match="evict: expected dtype torch.bool"):
        align_eviction(table, ints, 4)
    with pytest.raises(ValueError, match=r"target: expected shape \[2\], got \[3\]"):
        move_slots(torch.zeros(1, 2, 2, 2, 1, 1), ints, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="dtype: expected torch.int32 or torch.int64, got torch.float32"):
        read_table(table, rows, ints, ints, 3, dtype=torch.float32)
