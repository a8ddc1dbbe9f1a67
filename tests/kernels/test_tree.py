"""Tree links, depths and masks against a walk in plain Python, for any parent array."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_kernels import TreeLinks, build_chain, build_tree, links_from_mask

IMPLS = ["reference", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def parent_arrays(draw: st.DrawFn, max_nodes: int = 20) -> list[list[int]]:
    """Batches of trees; now and then an entry that makes its node unused."""
    nodes = draw(st.integers(1, max_nodes))
    batch = draw(st.integers(0, 4))
    entry = [
        st.one_of(st.integers(0, max(0, i - 1)), st.sampled_from([-2, -1, i, i + 1, nodes + 3])) for i in range(nodes)
    ]
    return [[draw(entry[i]) for i in range(nodes)] for _ in range(batch)] or [[-1] * nodes][:batch]


def in_python(parents: list[int], length: int) -> dict[str, list]:
    """The same five fields, node by node."""
    nodes = range(len(parents))
    parent = [p if i > 0 and 0 <= p < i else -1 for i, p in enumerate(parents)]
    path = []
    for i in nodes:
        seen = [i]
        while parent[seen[-1]] >= 0:
            seen.append(parent[seen[-1]])
        path.append(seen)
    children = [[j for j in nodes if parent[j] == i] for i in nodes]
    later = [[j for j in nodes if j > i and parent[j] == parent[i] >= 0] for i in nodes]
    return {
        "first_child": [min(c, default=-1) for c in children],
        "next_sibling": [min(s, default=-1) for s in later],
        "depth": [len(p) - 1 for p in path],
        "positions": [length + len(p) - 1 for p in path],
        "mask": [[word_of(p, w) for w in range(-(-len(parents) // 64))] for p in path],
    }  # fmt: skip


def word_of(nodes: list[int], number: int) -> int:
    """The bits of `nodes` that lie in one 64-bit word, as a signed integer."""
    word = sum(1 << j % 64 for j in nodes if j // 64 == number)
    return word - (1 << 64) if word >= 1 << 63 else word


def assert_links(links: TreeLinks, rows: list[list[int]], lengths: list[int]) -> None:
    expected = [in_python(row, length) for row, length in zip(rows, lengths, strict=True)]
    for name in TreeLinks._fields:
        assert getattr(links, name).tolist() == [row[name] for row in expected], name


@pytest.mark.parametrize("impl", IMPLS)
@given(rows=parent_arrays(), start=st.integers(0, 1 << 50))
def test_any_tree(impl: str, rows: list[list[int]], start: int) -> None:
    lengths = [start + 5 * b for b in range(len(rows))]
    parents = torch.tensor(rows, dtype=torch.int32, device=DEVICE).reshape(len(rows), -1 if rows else 1)
    links = build_tree(parents, torch.tensor(lengths, dtype=torch.int64, device=DEVICE), impl=impl)
    assert_links(links, rows, lengths)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("nodes", [63, 64, 65, 130])
def test_word_borders(impl: str, nodes: int) -> None:
    rows = [[i // 2 if i else -1 for i in range(nodes)], list(range(-1, nodes - 1))]
    lengths = [7, 0]
    links = build_tree(
        torch.tensor(rows, dtype=torch.int32, device=DEVICE), torch.tensor(lengths, device=DEVICE), impl=impl
    )
    assert_links(links, rows, lengths)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("nodes", [1, 2, 64, 65])
def test_a_chain_is_a_degenerate_tree(impl: str, nodes: int) -> None:
    lengths = torch.tensor([0, 9, 1 << 40], device=DEVICE)
    parents = torch.arange(-1, nodes - 1, dtype=torch.int32, device=DEVICE).repeat(3, 1)
    tree, chain = build_tree(parents, lengths, impl=impl), build_chain(lengths, nodes, impl=impl)
    assert all(torch.equal(t, c) for t, c in zip(tree, chain, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_requests_do_not_touch_each_other(impl: str) -> None:
    generator = torch.Generator().manual_seed(3)
    parents = (torch.rand(9, 11, generator=generator) * torch.arange(11)).int().to(DEVICE)
    lengths = torch.randint(0, 99, (9,), generator=generator).to(DEVICE)
    order = torch.randperm(9, generator=generator).to(DEVICE)
    whole = build_tree(parents, lengths, impl=impl)
    shuffled = build_tree(parents[order].contiguous(), lengths[order].contiguous(), impl=impl)
    assert all(torch.equal(w[order], s) for w, s in zip(whole, shuffled, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rows", [[2, 0, 1], [0, 2, 1], [0, 1, 2], [1, 1, 1], [0, -2, 1], [9, 9, 9]])
def test_malformed_parents_stay_outside(impl: str, rows: list[int]) -> None:
    """Cycles, self-parents, -2 and indices past the end: no link, no ancestor, depth 0."""
    lengths = torch.tensor([5], device=DEVICE)
    links = build_tree(torch.tensor([rows], dtype=torch.int32, device=DEVICE), lengths, impl=impl)
    assert_links(links, [rows], [5])


@pytest.mark.parametrize("impl", IMPLS)
def test_siblings_may_be_many_and_equal(impl: str) -> None:
    parents = torch.tensor([[-1, 0, 0, 0, 2, 2]], dtype=torch.int32, device=DEVICE)
    links = build_tree(parents, torch.tensor([0], device=DEVICE), impl=impl)
    assert links.first_child.tolist() == [[1, -1, 4, -1, -1, -1]]
    assert links.next_sibling.tolist() == [[-1, 2, 3, -1, 5, -1]]


def as_bool(mask: torch.Tensor, nodes: int) -> torch.Tensor:
    """[B, N, W] words -> [B, N, N] bool."""
    bits = mask[..., None] >> torch.arange(64, device=mask.device) & 1
    return bits.bool().flatten(2)[:, :, :nodes].contiguous()


@pytest.mark.parametrize("impl", IMPLS)
@given(rows=parent_arrays(), start=st.integers(0, 1 << 50))
def test_masks_give_their_links_back(impl: str, rows: list[list[int]], start: int) -> None:
    lengths = torch.arange(start, start + len(rows), device=DEVICE)
    parents = torch.tensor(rows, dtype=torch.int32, device=DEVICE).reshape(len(rows), -1 if rows else 1)
    links = build_tree(parents, lengths, impl=impl)
    for mask in (links.mask, as_bool(links.mask, parents.shape[1])):
        again = links_from_mask(mask, lengths, impl=impl)
        assert all(torch.equal(one, other) for one, other in zip(again, links, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
@given(
    nodes=st.sampled_from([1, 2, 3, 7, 12, 66]), seed=st.integers(0, 1000), density=st.sampled_from([0.02, 0.2, 0.9])
)
def test_any_bits_are_read_as_parents(impl: str, nodes: int, seed: int, density: float) -> None:
    """The parent is the last earlier node of a row; nothing else of the row counts."""
    bits = torch.rand(2, nodes, nodes, generator=torch.Generator().manual_seed(seed)) < density
    rows = [[max((j for j in range(i) if row[j]), default=-2) for i, row in enumerate(b)] for b in bits.tolist()]
    words = [[[word_of([j for j in range(nodes) if row[j]], w) for w in range(-(-nodes // 64))] for row in b]
             for b in bits.tolist()]  # fmt: skip
    for mask in (bits.to(DEVICE), torch.tensor(words, device=DEVICE)):
        assert_links(links_from_mask(mask, torch.tensor([3, 0], device=DEVICE), impl=impl), rows, [3, 0])


@pytest.mark.parametrize("impl", IMPLS)
def test_links_of_a_four_node_mask(impl: str) -> None:
    words = torch.tensor([[[0b0001], [0b0011], [0b0101], [0b1101]]], device=DEVICE)
    links = links_from_mask(words, torch.tensor([12], device=DEVICE), impl=impl)
    assert links.first_child.tolist() == [[1, -1, 3, -1]]
    assert links.next_sibling.tolist() == [[-1, 2, -1, -1]]
    assert links.positions.tolist() == [[12, 13, 13, 14]]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_first_descendant_need_not_be_a_child(impl: str) -> None:
    """Node 2 sees node 0 through node 1, which comes first, but node 3 is the first child of node 1's sibling."""
    parents = torch.tensor([[-1, 0, 1, 0, 2, 3, 1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([4], device=DEVICE)
    links = build_tree(parents, lengths, impl=impl)
    assert links.first_child.tolist() == [[1, 2, 4, 5, -1, -1, -1]]
    again = links_from_mask(links.mask, lengths, impl=impl)
    assert all(torch.equal(one, other) for one, other in zip(again, links, strict=True))


def test_wrong_input_is_refused() -> None:
    parents, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"lengths: expected shape \[2\], got \[3\]"):
        build_tree(parents, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="parents: expected dtype torch.int32, got torch.int64"):
        build_tree(parents.long(), lengths)
    with pytest.raises(ValueError, match="at least one node"):
        build_tree(parents[:, :0], lengths)
    with pytest.raises(ValueError, match="num_nodes: expected at least 1"):
        build_chain(lengths, 0)
    with pytest.raises(ValueError, match="impl: expected one of"):
        build_chain(lengths, 2, impl="cuda")
    with pytest.raises(ValueError, match="to 256 nodes, got 257"):
        build_tree(torch.zeros(2, 257, dtype=torch.int32), lengths)
    with pytest.raises(ValueError, match=r"mask: expected shape \[\*, 3, 1\], got \[2, 3, 3\]"):
        links_from_mask(torch.zeros(2, 3, 3, dtype=torch.int64), lengths)
    with pytest.raises(ValueError, match="mask: expected dtype torch.int64 or torch.bool, got torch.int32"):
        links_from_mask(torch.zeros(2, 3, 1, dtype=torch.int32), lengths)
