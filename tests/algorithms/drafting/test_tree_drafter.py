"""Chains and trees that are drafted level by level: what is run, where it is stored, and how sure the drafter is; and a
chain of forced tokens in a draft, in front of a tree and in the place of the first tokens of a chain."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.algorithm import DraftTree
from algorithms.attention.paged_attention import LevelSizes, LevelViews
from algorithms.drafting.draft_sampling import TreeShape
from algorithms.drafting.tree_drafter import TreeDrafter, insert_chain
from specdec_kernels import build_chain, build_tree

VOCAB, LAST = 19, [4, 9]
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
"""Logits behind each token, whatever stands before it."""


def batch() -> Any:
    lengths = torch.tensor([7, 11])
    active = torch.ones(2, dtype=torch.int32)
    return SimpleNamespace(lengths=lengths, last_tokens=torch.tensor(LAST), active=active, adjust=lambda *_: None)


def drafter(shape: TreeShape, base: int = 0, needs_path_probs: bool = False, **changes: Any) -> TreeDrafter:
    memory: Any = SimpleNamespace(windowed=True, levels=Planned)
    resources: Any = SimpleNamespace(impl="reference", needs_path_probs=needs_path_probs)
    return TreeDrafter(resources, None, shape, memory, base, **changes)


class Planned:
    """Stands for the mixers of levels: records what was planned and which of them were used."""

    latest: "Planned"

    def __init__(self, batch: Any, sizes: LevelSizes, views: LevelViews | None = None) -> None:
        self.count, self.views = sizes.forwards, views
        self.used: list[int] = []
        Planned.latest = self

    def __call__(self, level: int) -> str:
        assert 0 <= level < self.count, f"forward {level} of {self.count}"
        self.used.append(level)
        return f"mixer {level}"


@pytest.mark.parametrize("base", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_chain_is_the_likeliest_token_behind_each(steps: int, base: int) -> None:
    """All forwards that are planned are run: node 0 and the last draft by drafters that store node 0 alone."""
    made = drafter(TreeShape.of(steps, 1, None), base, needs_path_probs=True)
    mixers: Any = made.chain_mixers(batch())
    ran: list[str] = []

    def run(tokens: Tensor, parents: Tensor | None, mixer: Any) -> Tensor:
        assert parents is None and tokens.shape == (2, 1)
        ran.append(mixer)
        return TABLE[tokens]

    draft = made.chain(batch(), TABLE[LAST], run, mixers)
    assert ran == [f"mixer {level}" for level in range(base, base + steps - 1)]
    assert mixers.count == steps - 1 + 2 * base
    assert draft.path_probs is not None and draft.tokens.shape == (2, steps + 1) == draft.links.positions.shape
    for row, last in enumerate(LAST):
        path, sure = [last], [1.0]
        for _ in range(steps):
            probs = TABLE[path[-1]].softmax(0)
            path.append(int(probs.argmax()))
            sure.append(sure[-1] * float(probs.max()))
        assert draft.tokens[row].tolist() == path
        assert draft.path_probs[row].tolist() == pytest.approx(sure, rel=1e-5)


@pytest.mark.parametrize("base", [0, 1])
def test_a_tree_runs_its_frontier_level_by_level(base: int) -> None:
    """Against lists: the best products along the paths are run, and the best of all offered are kept."""
    shape = TreeShape(3, 3, 9)
    ran: list[tuple[Tensor, Tensor, Tensor]] = []

    def run(tokens: Tensor, parents: Tensor | None, mixer: Any) -> Tensor:
        views = Planned.latest.views
        assert parents is not None and views is not None and mixer == f"mixer {len(ran)}"
        ran.append((tokens, parents, views.masks[len(ran)]))
        return TABLE[tokens]

    draft = drafter(shape, base).tree(batch(), TABLE[LAST], run)
    stored = 1 if base else 0
    own = [1 << base + column for column in range(3)]
    assert ran[0][2][:, :, 0].tolist() == [[stored | bit for bit in own]] * 2
    for row, above in enumerate(ran[1][1].tolist()):
        seen = [stored | own[parent] | bit << 3 for parent, bit in zip(above, own, strict=True)]
        assert ran[1][2][row, :, 0].tolist() == seen
    for row, last in enumerate(LAST):
        frontier: list[tuple[float, tuple[int, ...]]] = [(1.0, (last,))]
        offered: list[tuple[float, tuple[int, ...]]] = []
        for level in range(3):
            best = [(score, path, TABLE[path[-1]].softmax(0).topk(3)) for score, path in frontier]
            new = [
                (score * share, (*path, token))
                for score, path, top in best
                for share, token in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
            offered += new
            frontier = sorted(new, reverse=True)[:3]
            if level < 2:
                assert sorted(ran[level][0][row].tolist()) == sorted(path[-1] for _, path in frontier)
        kept = sorted(offered, reverse=True)[:8]
        assert draft.path_probs is not None
        assert sorted(draft.path_probs[row, 1:].tolist(), reverse=True) == pytest.approx([s for s, _ in kept], rel=1e-5)
        assert sorted(draft.tokens[row, 1:].tolist()) == sorted(path[-1] for _, path in kept)


def test_a_tree_may_have_one_level() -> None:
    def never(*_: Any) -> Tensor:
        raise AssertionError("there is no second level")

    draft = drafter(shape := TreeShape(1, 3, 4)).grow_tree(batch(), TABLE[LAST], never, shape, [])
    assert [set(row) for row in draft.tokens[:, 1:].tolist()] == [
        set(row) for row in TABLE[LAST].topk(3).indices.tolist()
    ]


def tree_of(tokens: list[list[int]], parents: list[list[int]], lengths: torch.Tensor) -> DraftTree:
    links = build_tree(torch.tensor(parents, dtype=torch.int32), lengths, impl="reference")
    return DraftTree(torch.tensor(tokens), links)


@pytest.mark.parametrize(("num_nodes", "grafted"), [(256, 0), (254, 2), (40, 3)])
def test_a_chain_in_a_tree_of_any_size(num_nodes: int, grafted: int) -> None:
    """The tree is a root with many children, the chain has three tokens, and no more nodes fit than 256."""
    lengths, chain = torch.tensor([5]), torch.tensor([[901, 902, 903]])
    tree = tree_of([list(range(num_nodes))], [[-1] + [0] * (num_nodes - 1)], lengths)
    joined = insert_chain(tree, chain, lengths, False, "reference")
    assert joined.tokens.shape == (1, num_nodes)
    assert joined.tokens[0, : 1 + grafted].tolist() == [0, 901, 902, 903][: 1 + grafted]
    assert joined.links.depth[0, : 1 + grafted].tolist() == [0, 1, 2, 3][: 1 + grafted]
    assert joined.tokens[0, 1 + grafted :].tolist() == list(range(1, num_nodes - grafted))


def test_a_forced_token_may_have_any_id() -> None:
    """Token 0 is a token; -1 ends a row's chain."""
    lengths = torch.tensor([5, 5])
    tree = tree_of([[9, 7, 6, 5]] * 2, [[-1, 0, 1, 2]] * 2, lengths)
    joined = insert_chain(tree, torch.tensor([[0, 3], [4, -1]]), lengths, False, "reference")
    assert joined.tokens.tolist() == [[9, 0, 3, 7], [9, 4, 7, 6]]
    assert joined.links.depth.tolist() == [[0, 1, 2, 1], [0, 1, 1, 2]]


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_the_last_nodes_of_a_tree_give_way(impl: str) -> None:
    """What both have stands once, unused nodes leave no gap, and nodes keep their parents."""
    lengths = torch.tensor([5, 8])
    parents = [[-1, 0, -2, 1, 0, 3], [-1, 0, 1, 1, 2, 0]]
    tree = tree_of([[9, 7, 1, 2, 3, 4], [9, 5, 6, 7, 8, 9]], parents, lengths)
    joined = insert_chain(tree, torch.tensor([[7, 8], [0, 1]]), lengths, False, impl)
    assert joined.tokens.tolist() == [[9, 7, 8, 2, 3, 4], [9, 0, 1, 5, 6, 7]]
    expected = build_tree(torch.tensor([[-1, 0, 1, 1, 0, 3], [-1, 0, 1, 0, 3, 3]], dtype=torch.int32), lengths)
    for found, wanted in zip(joined.links, expected, strict=True):
        assert torch.equal(found, wanted)


def test_the_first_tokens_of_a_chain_are_replaced() -> None:
    """Token 0 is a token here too, and what is drafted behind the forced tokens stays."""
    lengths = torch.tensor([5, 5, 7])
    draft = DraftTree(torch.tensor([[9, 7, 6, 5], [9, 1, 2, 3], [8, 1, 2, 3]]), build_chain(lengths, 4))
    joined = insert_chain(draft, torch.tensor([[0, 4], [0, -1], [-1, -1]]), lengths, True, "reference")
    assert joined.tokens.tolist() == [[9, 0, 4, 5], [9, 0, 2, 3], [8, 1, 2, 3]] and joined.links is draft.links
