"""Page-table arithmetic over random tables, position by position in plain Python."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_kernels import flash_attention_table, flashinfer_indices, move_accepted, token_slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def page_tables(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Rows of distinct pages, -1 after the held ones, and a page size."""
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


@given(table=page_tables(), data=st.data())
def test_backend_indices(impl: str, table: tuple[list[list[int]], int], data: st.DataObject) -> None:
    rows, page_size = table
    row_pages = len(rows[0]) if rows else 1
    lengths = [data.draw(st.integers(0, row_pages * page_size)) for _ in rows]
    used = [row[: -(-length // page_size)] for row, length in zip(rows, lengths, strict=True)]
    flat = [max(page, 0) for pages in used for page in pages]

    found = flashinfer_indices(as_table(rows), as_ints(lengths), page_size, impl=impl)
    assert found.indices.tolist() == flat + [0] * (len(rows) * row_pages - len(flat))
    assert found.indptr.tolist() == [sum(map(len, used[:b])) for b in range(len(rows) + 1)]
    whole = [
        (pages - 1) * page_size + last for pages, last in zip(map(len, used), found.last_page_len.tolist(), strict=True)
    ]
    assert [w if pages else 0 for w, pages in zip(whole, used, strict=True)] == lengths

    other = flash_attention_table(as_table(rows), as_ints(lengths), page_size, impl=impl)
    assert other.page_table.tolist() == [pages + [0] * (row_pages - len(pages)) for pages in used]
    assert other.seqused_k.tolist() == lengths


@given(
    page_size=st.sampled_from([1, 3, 16]), lengths=st.lists(st.integers(0, 20), min_size=1, max_size=3), data=st.data()
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


def test_a_path_outside_the_table_moves_nothing(impl: str) -> None:
    pool = torch.arange(8.0, device=DEVICE).view(1, 2, 2, 2, 1, 1)
    before = pool.clone()
    move_accepted(pool, as_table([[1]]), as_ints([1]), as_ints([[0, 3]], torch.int32), impl=impl)
    move_accepted(pool, as_table([[-1]]), as_ints([0]), as_ints([[0, 1]], torch.int32), impl=impl)
    assert torch.equal(pool, before)
