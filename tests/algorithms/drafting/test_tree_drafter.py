"""Chains and trees that are drafted level by level: what is run, where it is stored, and how sure the drafter is."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.attention.paged_attention import LevelSizes, LevelViews
from algorithms.drafting.draft_sampling import TreeShape
from algorithms.drafting.tree_drafter import TreeDrafter

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
