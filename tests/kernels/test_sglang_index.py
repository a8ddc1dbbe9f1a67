"""Index functions of the SGLang layer against plain Python: exported masks and parents of candidates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_kernels import TreeLinks, build_tree
from specdec_kernels.compat.sglang.index import export_mask, parents_from_candidates

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
    return build_tree(parents, torch.tensor(lengths, device=DEVICE), orphans_see_root=True, impl=impl)


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


def walked(selected: list[int], history: list[int], topk: int, length: int) -> dict[str, list]:
    """Links, positions and masks as the fixed contract of SGLang's builder states them, entry by entry."""
    nodes = range(len(selected) + 1)

    def parent(i: int) -> int | None:
        row = selected[i - 1] // topk
        if selected[i - 1] < 0 or row >= max(1, len(history)):
            return None
        if row == 0:
            return 0
        wanted = history[row]
        return selected.index(wanted) + 1 if wanted >= 0 and wanted in selected[: i - 1] else None

    paths = [[0]]
    for i in nodes[1:]:
        path, above = [i], parent(i)
        while above:
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
        "mask": [[word_of(path, w) for w in range(-(-len(nodes) // 64))] for path in paths],
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


def test_wrong_input_is_refused() -> None:
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
