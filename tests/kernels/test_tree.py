"""Tree links, depths and masks against plain Python, for any parent array."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_kernels import TreeLinks, build_chain, build_tree, links_from_mask

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


@given(rows=parent_arrays(), start=st.integers(0, 1 << 50))
def test_any_tree(impl: str, rows: list[list[int]], start: int) -> None:
    lengths = [start + 5 * b for b in range(len(rows))]
    parents = torch.tensor(rows, dtype=torch.int32, device=DEVICE).reshape(len(rows), -1 if rows else 1)
    links = build_tree(parents, torch.tensor(lengths, dtype=torch.int64, device=DEVICE), impl=impl)
    assert_links(links, rows, lengths)


@pytest.mark.parametrize("nodes", [63, 64, 65, 130])
def test_word_borders(impl: str, nodes: int) -> None:
    rows = [[i // 2 if i else -1 for i in range(nodes)], list(range(-1, nodes - 1))]
    lengths = [7, 0]
    links = build_tree(
        torch.tensor(rows, dtype=torch.int32, device=DEVICE), torch.tensor(lengths, device=DEVICE), impl=impl
    )
    assert_links(links, rows, lengths)


@pytest.mark.parametrize("nodes", [1, 2, 64, 65])
def test_a_chain_is_a_degenerate_tree(impl: str, nodes: int) -> None:
    lengths = torch.tensor([0, 9, 1 << 40], device=DEVICE)
    parents = torch.arange(-1, nodes - 1, dtype=torch.int32, device=DEVICE).repeat(3, 1)
    tree, chain = build_tree(parents, lengths, impl=impl), build_chain(lengths, nodes, impl=impl)
    assert all(torch.equal(t, c) for t, c in zip(tree, chain, strict=True))


def as_bool(mask: torch.Tensor, nodes: int) -> torch.Tensor:
    """[B, N, W] words -> [B, N, N] bool."""
    bits = mask[..., None] >> torch.arange(64, device=mask.device) & 1
    return bits.bool().flatten(2)[:, :, :nodes].contiguous()


@given(rows=parent_arrays(), start=st.integers(0, 1 << 50))
def test_masks_give_their_links_back(impl: str, rows: list[list[int]], start: int) -> None:
    lengths = torch.arange(start, start + len(rows), device=DEVICE)
    parents = torch.tensor(rows, dtype=torch.int32, device=DEVICE).reshape(len(rows), -1 if rows else 1)
    links = build_tree(parents, lengths, impl=impl)
    for mask in (links.mask, as_bool(links.mask, parents.shape[1])):
        again = links_from_mask(mask, lengths, impl=impl)
        assert all(torch.equal(one, other) for one, other in zip(again, links, strict=True))


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
