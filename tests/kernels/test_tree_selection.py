"""Selection of draft nodes against heaps, sorts and enumeration in plain Python."""

import heapq
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_kernels import Candidates, Frontier, best_first_tree, draft_topk, expand_tree, rerank_tree
from specdec_kernels.cases import Maker
from specdec_kernels.sampling import philox_uniform
from specdec_kernels.sampling.types import DRAFT_STREAM
from specdec_kernels.tree import sample_children
from specdec_kernels.tree.cases import random_probs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN, INF = float("nan"), float("inf")
# Few values, all exact in float32, so that products tie often.
EIGHTHS = st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.875, 1.0])
HOSTILE = st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, -0.5, NAN, INF, -INF, 1e-30])


def floats(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def integers(values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def product(left: float, right: float) -> float:
    """float32 product."""
    with np.errstate(all="ignore"):
        return float(np.float32(left) * np.float32(right))


def heap_tree(probs: list[list[float]], num_nodes: int) -> list[tuple[int, int]]:
    """(parent, depth * C + rank) of each node, popped from a heap of (-value, parent, depth, rank, above)."""
    width = len(probs[0])
    heap: list[tuple[float, int, int, int, float]] = []

    def offer(above: float, parent: int, depth: int, rank: int) -> None:
        if depth < len(probs) and rank < width and probs[depth][rank] > 0:
            value = product(above, min(probs[depth][rank], 1.0))
            if value >= 2.0**-126:
                heapq.heappush(heap, (-value, parent, depth, rank, above))

    offer(1.0, 0, 0, 0)
    nodes = [(-1, -1)]
    while heap and len(nodes) < num_nodes:
        negated, parent, depth, rank, above = heapq.heappop(heap)
        nodes.append((parent, depth * width + rank))
        offer(above, parent, depth, rank + 1)
        offer(-negated, len(nodes) - 1, depth + 1, 0)
    return nodes + [(-2, -1)] * (num_nodes - len(nodes))


@st.composite
def marginals(draw: st.DrawFn, entry: st.SearchStrategy[float], falling: bool) -> list[list[list[float]]]:
    batch, depths, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows = [[[draw(entry) for _ in range(ranks)] for _ in range(depths)] for _ in range(batch)]
    return [[sorted(row, reverse=True) for row in request] for request in rows] if falling else rows


def assert_heap_trees(impl: str, probs: list[list[list[float]]], num_nodes: int) -> None:
    batch, cells = len(probs), len(probs[0]) * len(probs[0][0])
    tokens = torch.arange(100, 100 + batch * cells, device=DEVICE).reshape(floats(probs).shape)
    last_tokens = torch.arange(batch, device=DEVICE)
    chosen = best_first_tree(floats(probs), tokens, last_tokens, num_nodes, impl=impl)
    for b, request in enumerate(probs):
        expected = heap_tree(request, num_nodes)
        assert chosen.parents[b].tolist() == [parent for parent, _ in expected]
        assert chosen.candidates[b].tolist() == [candidate for _, candidate in expected]
        listed = [100 + b * cells + c if c >= 0 else 0 for _, c in expected]
        assert chosen.tokens[b].tolist() == [b, *listed[1:]]


@given(
    probs=st.one_of(marginals(EIGHTHS, falling=True), marginals(HOSTILE, falling=False)), num_nodes=st.integers(1, 12)
)
def test_best_first_pops_a_heap(impl: str, probs: list[list[list[float]]], num_nodes: int) -> None:
    assert_heap_trees(impl, probs, num_nodes)


@st.composite
def expansions(draw: st.DrawFn) -> tuple[list[list[float]], list[list[list[float]]], int]:
    batch, parents, children = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    entry = draw(st.sampled_from([EIGHTHS, HOSTILE]))
    scores = [[draw(entry) for _ in range(parents)] for _ in range(batch)]
    probs = [[[draw(entry) for _ in range(children)] for _ in range(parents)] for _ in range(batch)]
    return scores, probs, draw(st.integers(1, parents * children))


def empty_candidates(batch: int, count: int) -> Candidates:
    return Candidates(
        torch.zeros(batch, count, device=DEVICE),
        integers([[0] * count] * batch),
        integers([[0] * count] * batch, torch.int32),
    )


def frontier_of(scores: list[list[float]], ids: list[list[int]], seen: list[list[int]]) -> Frontier:
    none = torch.zeros_like(integers(ids))
    return Frontier(floats(scores), integers(ids, torch.int32), none, none, integers(seen)[..., None])


@given(inputs=expansions())
def test_expansion_sorts(impl: str, inputs: tuple[list[list[float]], list[list[list[float]]], int]) -> None:
    scores, probs, width = inputs
    parents, children, first, slot = len(scores[0]), len(probs[0][0]), 3, 5
    count = parents * children
    frontier = frontier_of(
        scores, [[10 + p for p in range(parents)]] * len(scores), [[1 << p for p in range(parents)]] * len(scores)
    )
    tokens, offset = torch.arange(count, device=DEVICE).reshape(1, parents, children), integers([7] * count)
    candidates = empty_candidates(len(scores), first + count + 1)
    mask = integers([[[-1]] * width] * len(scores))
    grown = expand_tree(
        frontier, floats(probs), tokens.repeat(len(scores), 1, 1), candidates, first, width, mask, slot=slot,
        vocabulary=offset, impl=impl,
    )  # fmt: skip
    assert grown is not None and grown.mask is mask
    for b, above in enumerate(scores):
        flat = [product(s, p) for s, row in zip(above, probs[b], strict=True) for p in row]
        flat = [-INF if math.isnan(value) else value for value in flat]
        order = sorted(range(len(flat)), key=lambda i: (-flat[i], i))[:width]
        assert candidates.path_scores[b].tolist() == [0.0] * first + flat + [0.0]
        assert candidates.tokens[b].tolist() == [0] * first + [7 + i for i in range(count)] + [0]
        assert candidates.parents[b].tolist() == [0] * first + [10 + i // children for i in range(count)] + [0]
        assert grown.scores[b].tolist() == [flat[i] for i in order]
        assert grown.candidates[b].tolist() == [first + i for i in order]
        assert grown.tokens[b].tolist() == [7 + i for i in order]
        assert grown.parents[b].tolist() == [i // children for i in order]
        assert mask[b, :, 0].tolist() == [1 << i // children | 1 << slot + t for t, i in enumerate(order)]


@pytest.mark.parametrize("stored", [False, True])
def test_the_first_level_hangs_on_the_root(impl: str, stored: bool) -> None:
    candidates, mask = empty_candidates(1, 3), integers([[[0]] * 2])
    probs, tokens = floats([[[0.2, 0.5, 0.3]]]), integers([[[4, 5, 6]]])
    grown = expand_tree(None, probs, tokens, candidates, 0, 2, mask, slot=1, root_is_stored=stored, impl=impl)
    assert grown is not None and grown.tokens.tolist() == [[5, 6]] and grown.parents.tolist() == [[0, 0]]
    assert candidates.parents.tolist() == [[-1, -1, -1]] and candidates.tokens.tolist() == [[4, 5, 6]]
    assert mask.tolist() == [[[2 | stored], [4 | stored]]]


def test_masks_grow_by_words(impl: str) -> None:
    """Slots 62 to 65: the frontier has one word, the next one two, the second without what the first had."""
    candidates, mask = empty_candidates(1, 4), integers([[[-1, -1]] * 4])
    frontier = frontier_of([[0.9, 0.1]], [[-1, -1]], [[-(1 << 63), 3]])
    probs, tokens = floats([[[0.9, 0.8], [0.9, 0.8]]]), integers([[[1, 2], [3, 4]]])
    expand_tree(frontier, probs, tokens, candidates, 0, 4, mask, slot=62, impl=impl)
    sign = -(1 << 63)
    assert mask.tolist() == [[[sign | 1 << 62, 0], [sign, 0], [3, 1], [3, 2]]]


def best_candidates(
    scores: list[float], tokens: list[int], parents: list[int], num_nodes: int, root: int
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and candidate ids of the tree, in plain Python."""
    usable = [c for c, score in enumerate(scores) if score > -INF]
    kept = sorted(sorted(usable, key=lambda c: (-scores[c], c))[: num_nodes - 1])
    node = {c: i + 1 for i, c in enumerate(kept)} | {-1: 0}
    above = [node.get(parents[c], -2) if parents[c] < c else -2 for c in kept]
    rest = num_nodes - 1 - len(kept)
    return ([root, *(tokens[c] for c in kept), *[0] * rest], [-1, *above, *[-2] * rest], [-1, *kept, *[-1] * rest])


@st.composite
def candidate_lists(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]], int]:
    batch, count = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    entry = draw(st.sampled_from([EIGHTHS, HOSTILE]))
    scores = [[draw(entry) for _ in range(count)] for _ in range(batch)]
    parents = [[draw(st.integers(-2, count + 1)) for _ in range(count)] for _ in range(batch)]
    return scores, parents, draw(st.integers(1, 15))


@given(inputs=candidate_lists())
def test_reranking_keeps_the_best(impl: str, inputs: tuple[list[list[float]], list[list[int]], int]) -> None:
    scores, parents, num_nodes = inputs
    tokens = [[100 * b + c for c in range(len(row))] for b, row in enumerate(scores)]
    last_tokens = list(range(len(scores)))
    chosen = rerank_tree(
        floats(scores), integers(tokens), integers(parents, torch.int32), integers(last_tokens), num_nodes, impl=impl
    )
    for b, row in enumerate(scores):
        expected = best_candidates(row, tokens[b], parents[b], num_nodes, b)
        actual = (chosen.tokens[b].tolist(), chosen.parents[b].tolist(), chosen.candidates[b].tolist())
        assert actual == expected


@pytest.mark.parametrize("replacement", [True, False])
def test_a_sample_takes_the_uniform_of_its_seed_position_and_node(impl: str, replacement: bool) -> None:
    """So that no two samples of a request share one, and a request samples the same in any row."""
    make = Maker.seeded(DEVICE)
    inputs: dict[str, Any] = dict(
        probs=random_probs(make, 3, 2, 40, sharpness=1.0), children=integers([[1, 2, 3], [5, 4, -1]], torch.int32),
        rows=integers([0, 1], torch.int32), top_tokens=integers([[[0], [0]]] * 3), temperature=floats([0.7, 1.0, 2.0]),
        replacement=replacement, impl=impl,
    )  # fmt: skip
    seeds, positions, nodes = integers([5, 1 << 40, 9]), integers([700, 3, 9]), torch.arange(6, device=DEVICE)
    own = philox_uniform(seeds[:, None].expand(3, 6), positions[:, None].expand(3, 6), DRAFT_STREAM, nodes.expand(3, 6))
    sampled, expected = integers([[7] * 6] * 3), integers([[7] * 6] * 3)
    sample_children(sampled, seeds=seeds, positions=positions, **inputs)
    sample_children(expected, seeds=None, positions=None, uniforms=own.contiguous(), **inputs)
    assert torch.equal(sampled, expected) and len(set(sampled[:, 1:].flatten().tolist())) > 5


def most_likely(row: list[float], k: int) -> tuple[list[float], list[int]]:
    """The k most likely ids and their probabilities in float64, for finite or -inf logits."""
    top = max(row)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    weight = [math.exp(x - top) if x > -INF else 0.0 for x in row]
    return [weight[i] / sum(weight) if top > -INF else 0.0 for i in order], order


LOGIT = st.one_of(st.integers(-3, 3).map(float), st.sampled_from([-INF, 20.0, -40.0, 0.5, -0.0]))


@given(
    rows=st.integers(1, 30).flatmap(
        lambda v: st.lists(st.lists(LOGIT, min_size=v, max_size=v), min_size=1, max_size=3)
    ),
    data=st.data(),
)
def test_topk_sorts(impl: str, rows: list[list[float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rows[0])))
    probs, tokens = draft_topk(floats(rows), k, impl=impl)
    for b, row in enumerate(rows):
        expected, order = most_likely(row, k)
        assert tokens[b].tolist() == order
        assert probs[b].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-30)
