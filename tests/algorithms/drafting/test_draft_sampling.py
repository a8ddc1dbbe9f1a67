"""Sizes of draft trees, shapes of drawn ones, and which draws and rules go together."""

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


@pytest.mark.parametrize(
    ("steps", "topk", "nodes"),
    [
        (1, 1, 2),
        (6, 1, 7),
        (40, 1, 41),  # a chain verifies all of its drafts
        (1, 3, 4),
        (2, 2, 7),
        (3, 3, 22),
        (2, 5, 31),
        (4, 3, 31),
        (5, 3, 32),
        (8, 10, 32),
    ],
)
def test_a_tree_has_all_candidates_or_32_nodes(steps: int, topk: int, nodes: int) -> None:
    shape = TreeShape.of(steps, topk, None)
    assert (shape.num_nodes, shape.chain) == (nodes, topk == 1)
    assert nodes <= 1 + shape.num_candidates == 1 + topk + (steps - 1) * topk**2


def test_fewer_nodes_have_fewer_levels() -> None:
    """No path of n nodes is deeper than n - 1."""
    shape = TreeShape(5, 3, 20)
    assert [(each.steps, each.num_nodes) for each in map(shape.limited, (2, 4, 6, 7))] == [
        (1, 2), (3, 4), (5, 6), (5, 7),
    ]  # fmt: skip
    assert (shape.max_depth, TreeShape(5, 3, 6).max_depth, TreeShape(5, 3, 5).max_depth) == (5, 5, 4)


def test_slots_of_the_drafters_cache() -> None:
    """One for each token that the drafter runs: all levels but the last, and node 0 where it stores it."""
    assert [TreeShape.of(steps, topk, None).draft_slots(stored) for steps, topk, stored in
            ((1, 1, 0), (4, 1, 0), (4, 1, 1), (4, 3, 0), (2, 2, 1))] == [0, 3, 4, 9, 3]  # fmt: skip
