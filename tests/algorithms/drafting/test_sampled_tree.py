"""What each column of a level sees, and what its children are drawn from."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from algorithms.algorithm import Resources
from algorithms.drafting.draft_sampling import SampledShape, TreeShape
from algorithms.drafting.sampled_tree import SampledTree
from specdec_kernels import SamplingTensors

VOCAB = 23
SIZES = {
    "narrow": (3, 2, 9),
    "wide": (4, 30, 110),  # masks of two words
    "uneven": (3, 5, 12),
    "chain": (4, 1, 5),
}


def resources(rows: int) -> Resources:
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB))
    return SimpleNamespace(target=target, impl="reference", max_batch=rows, device=torch.device("cpu"))  # type: ignore


def bits(words: Tensor) -> set[int]:
    return {bit for bit in range(64 * len(words)) if int(words[bit // 64]) >> (bit % 64) & 1}


@pytest.mark.parametrize("base", [0, 1])
@pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))
def test_a_column_sees_itself_its_ancestors_and_a_stored_node_0(size: tuple[int, int, int], base: int) -> None:
    shape, width = SampledShape.of(TreeShape(*size)), size[1]
    tree = SampledTree(shape, resources(2), True, width=width, base=base)
    place: dict[int, int] = {}
    for depth, level in enumerate(tree.levels):
        nodes = level.nodes.tolist()
        have_children = shape.parents_at(depth)
        assert nodes[: len(have_children)] == have_children and set(nodes) == set(have_children)
        assert len(nodes) == (width if depth else 1)
        for column, node in enumerate(nodes):
            seen = {0} if base else set()
            above = shape.parents[node]
            while above > 0:
                seen.add(place[above])
                above = shape.parents[above]
            if depth:
                slot = base + (depth - 1) * width + column
                assert bits(level.mask[1, column]) == seen | {slot}
                place.setdefault(node, slot)
                parents = tree.levels[depth - 1].nodes
                assert int(parents[level.parents[1, column]]) == shape.parents[node]
    assert [mask.shape[2] for mask in tree.masks(2)] == [
        -(-(base + depth * width) // 64) for depth in range(1, len(tree.levels))
    ]


def sampled(rows: int) -> SamplingTensors:
    full = torch.full
    return SamplingTensors(full((rows,), 0.8), full((rows,), 5, dtype=torch.int32), seeds=torch.arange(rows))


@pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))
def test_children_are_sampled_behind_their_parents(size: tuple[int, int, int]) -> None:
    """Each row of probabilities is the filtered distribution behind the node whose children it is for."""
    rows, width = 3, size[1]
    shape = SampledShape.of(TreeShape(*size))
    tree = SampledTree(shape, resources(rows), True, width=width)
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    batch = SimpleNamespace(
        last_tokens=torch.tensor([4, 9, 17]), lengths=torch.tensor([5, 6, 7]), sampling=sampled(rows)
    )
    levels: list[int] = []

    def run(level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        levels.append(level)
        return table[tokens]

    draft = tree.grow(batch, table[batch.last_tokens], run)  # type: ignore[arg-type]
    assert levels == list(range(shape.max_depth - 1))
    assert draft.draft_probs is not None
    index = draft.draft_rows if draft.draft_rows is not None else torch.arange(size[2] - 1).expand(rows, -1)
    for row in range(rows):
        for node, parent in enumerate(shape.parents[1:], start=1):
            logits = table[draft.tokens[row, parent]] / 0.8
            kept = logits.where(logits >= logits.topk(5).values[-1], -torch.inf)
            found = draft.draft_probs[row, index[row, parent]]
            torch.testing.assert_close(found, kept.softmax(0).float(), rtol=1e-5, atol=1e-7)
            assert found[draft.tokens[row, node]] > 0


def test_siblings_may_be_more_than_there_are_tokens() -> None:
    """Independent draws repeat tokens."""
    tree = SampledTree(SampledShape.of(TreeShape(1, 4, 5)), resources(2), True, width=4)
    batch = SimpleNamespace(last_tokens=torch.tensor([1, 2]), lengths=torch.tensor([5, 6]), sampling=sampled(2))
    batch.sampling.temperature[1] = 0.0
    logits = torch.tensor([[0.0, 1.0, 0.5], [0.0, 1.0, 0.5]])
    draft = tree.grow(batch, logits, lambda *_: logits)  # type: ignore[arg-type]
    assert bool(((draft.tokens >= 0) & (draft.tokens < 3)).all()) and draft.tokens[1, 1:4].tolist() == [1, 2, 0]
