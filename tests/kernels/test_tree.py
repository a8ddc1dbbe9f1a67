"""Tree links, depths and masks against a walk in plain Python, for any parent array."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_kernels import TreeLinks, build_chain, build_tree

IMPLS = ["reference", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def parent_arrays(draw: st.DrawFn, max_nodes: int = 20) -> list[list[int]]:
    """Batches of trees; now and then an entry that makes its node unused."""
    nodes = draw(st.integers(1, max_nodes))
    batch = draw(st.integers(0, 4))
    entry = [
        st.one_of(st.integers(0, max(0, i - 1)), st.sampled_from([-1, i, nodes + 3])) for i in range(nodes)
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
    with pytest.raises(ValueError, match="impl must be one of"):
        build_chain(lengths, 2, impl="cuda")
