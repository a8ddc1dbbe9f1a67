"""Sizes of draft trees: their defaults, their bounds, and what a shape says about itself."""

import pytest

from algorithms.drafting.draft_sampling import TreeShape


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


@pytest.mark.parametrize(
    ("steps", "topk", "nodes", "message"),
    [
        (0, 1, None, "algo.steps: expected at least 1, got 0"),
        (0, 0, None, "algo.steps: expected at least 1, got 0"),
        (2, 0, None, "algo.topk: expected 1 to 64, got 0"),
        (2, 65, 8, "algo.topk: expected 1 to 64, got 65"),
        (2, 2, 1, "2 steps with topk 2 draft 2 to 7 nodes, node 0 included, got 1"),
        (2, 2, 8, "2 steps with topk 2 draft 2 to 7 nodes, node 0 included, got 8"),
        (9, 10, 257, "9 steps with topk 10 draft 2 to 256 nodes, node 0 included, got 257"),
    ],
)
def test_sizes_that_no_tree_has(steps: int, topk: int, nodes: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeShape.of(steps, topk, nodes)


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
