"""Shapes of drawn trees, and which draws and rules go together."""

import pytest

from algorithms.drafting.draft_sampling import FIRST_SHARE, DraftSampling, SampledShape, TreeShape


@pytest.mark.parametrize("size", [(6, 10, 32), (3, 3, 12), (2, 3, 13), (15, 4, 64), (4, 1, 5), (1, 3, 4), (3, 2, 11)])
def test_shapes(size: tuple[int, int, int]) -> None:
    steps, topk, num_nodes = size
    shape = SampledShape.of(TreeShape(*size))
    assert len(shape.parents) == num_nodes and shape.parents[0] == -1
    assert all(parent < node for node, parent in enumerate(shape.parents))
    assert list(shape.depths) == sorted(shape.depths) and shape.max_depth <= steps
    assert all(len(shape.children(node)) <= topk for node in range(num_nodes))
    assert all(1 <= len(shape.parents_at(depth)) <= topk for depth in range(shape.max_depth))


@pytest.mark.parametrize(
    "kind, rule, chain, found",
    [
        (None, None, True, ("topk", "target_only")),
        (None, "block", True, ("sample", "block")),
        ("sample", None, True, ("sample", "block")),
        (None, "traversal", False, ("without_replacement", "traversal")),
        (None, "k_seq", False, ("sample", "k_seq")),
        ("sample", None, False, ("sample", "traversal")),
    ],
)
def test_draft_sampling_and_rule_follow_from_each_other(
    kind: str | None, rule: str | None, chain: bool, found: tuple[str, str]
) -> None:
    sampling = DraftSampling.of(kind, rule, chain)
    assert (sampling.kind, sampling.rule) == found


@pytest.mark.parametrize(
    "kind, rule, chain, message",
    [
        ("gumbel", None, True, "algo.draft_sampling: expected one of topk, without_replacement, sample, got 'gumbel'"),
        (None, "greedy", True, "algo.rule: expected one of target_only, block, rejection for a chain, got 'greedy'"),
        ("without_replacement", None, True, "samples siblings: expected algo.topk above 1, got a chain"),
        ("topk", "block", True, "expected one of target_only for a chain with algo.draft_sampling=topk, got 'block'"),
        ("without_replacement", "k_seq", False, "for a tree with algo.draft_sampling=without_replacement, got 'k_seq'"),
    ],
)
def test_settings_that_do_not_fit(kind: str | None, rule: str | None, chain: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftSampling.of(kind, rule, chain)


@pytest.mark.parametrize("size", [(3, 3, 12), (6, 4, 9), (15, 2, 14)])
def test_the_nodes_of_a_shape_are_those_reached_most_often(size: tuple[int, int, int]) -> None:
    """Against a search that takes the likeliest allowed node each time, one after the other."""
    steps, topk, num_nodes = size
    tree: list[tuple[int, ...]] = [()]  # ranks along the path
    while len(tree) < num_nodes:
        open_nodes = []
        for path in tree:
            rank = sum(other[:-1] == path for other in tree if other)
            level = {other[:-1] for other in tree if other and len(other) == len(path) + 1}
            if len(path) < steps and rank < topk and (path in level or len(level) < topk):
                open_nodes.append((*path, rank))
        reached = {path: FIRST_SHARE ** len(path) * (1 - FIRST_SHARE) ** sum(path) for path in open_nodes}
        tree.append(max(open_nodes, key=lambda path: reached[path]))
    tree.sort(key=lambda path: (len(path), path))
    shape = SampledShape.of(TreeShape(*size))
    assert shape.parents == (-1, *(tree.index(path[:-1]) for path in tree[1:]))
    assert shape.depths == tuple(map(len, tree)) and shape.max_depth == len(tree[-1])


@pytest.mark.parametrize("kind", ["sample", "topk"])
def test_only_what_is_sampled_has_a_fixed_shape(kind: str) -> None:
    sampling = DraftSampling.of(kind, None, chain=False)
    assert (
        sampling.sampled
        == sampling.replacement
        == (kind == "sample")
        == (sampling.shape(TreeShape(2, 2, 5)) is not None)
    )
