"""Chains and trees that are drafted level by level: what is run, where it is stored, and how sure the drafter is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.runtime import tree_drafting
from algorithms.runtime.drawing import DrawnShape
from algorithms.runtime.drawn_tree import DrawnTree
from algorithms.runtime.tree_drafting import TreeDrafter, grow_tree, level_masks
from algorithms.runtime.tree_shape import TreeShape
from specdec_kernels import SamplingTensors

VOCAB, LAST = 19, [4, 9]
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
"""Logits behind each token, whatever stands before it."""


def batch() -> Any:
    lengths = torch.tensor([7, 11])
    active = torch.ones(2, dtype=torch.int32)
    return SimpleNamespace(lengths=lengths, last_tokens=torch.tensor(LAST), active=active)


def drafter(shape: TreeShape, base: int = 0, confidence: bool = False, **changes: Any) -> TreeDrafter:
    cache: Any = SimpleNamespace(config=SimpleNamespace(sliding_windows=(None, 8)))
    resources: Any = SimpleNamespace(impl="reference", confidence=confidence)
    return TreeDrafter(shape, cache, resources, base, **changes)


class Planned:
    """Stands for the mixers of levels: records what was planned and which of them were used."""

    latest: Planned

    def __init__(self, batch: Any, cache: Any, resources: Any, count: int, *sizes: int, **tensors: Any) -> None:
        self.count, self.sizes, self.tensors = count, sizes, tensors
        self.used: list[int] = []
        Planned.latest = self

    def __getitem__(self, level: int) -> str:
        assert 0 <= level < self.count, f"forward {level} of {self.count}"
        self.used.append(level)
        return f"mixer {level}"


@pytest.mark.parametrize("base", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_chain_is_the_likeliest_token_behind_each(monkeypatch: pytest.MonkeyPatch, steps: int, base: int) -> None:
    """All forwards that are planned are run: node 0 and the last draft by drafters that store node 0 alone."""
    monkeypatch.setattr(tree_drafting, "PagedLevels", Planned)
    made = drafter(TreeShape.of(steps, 1, None), base, confidence=True)
    mixers: Any = made.chain_mixers(batch())
    ran: list[str] = []

    def run(tokens: Tensor, parents: Tensor | None, mixer: Any) -> Tensor:
        assert parents is None and tokens.shape == (2, 1)
        ran.append(mixer)
        return TABLE[tokens]

    draft = made.chain(batch(), TABLE[LAST], run, mixers)
    assert ran == [f"mixer {level}" for level in range(base, base + steps - 1)]
    assert mixers.count == steps - 1 + 2 * base
    assert draft.confidence is not None and draft.tokens.shape == (2, steps + 1) == draft.links.positions.shape
    for row, last in enumerate(LAST):
        path, sure = [last], [1.0]
        for _ in range(steps):
            probs = TABLE[path[-1]].softmax(0)
            path.append(int(probs.argmax()))
            sure.append(sure[-1] * float(probs.max()))
        assert draft.tokens[row].tolist() == path
        assert draft.confidence[row].tolist() == pytest.approx(sure, rel=1e-5)


def test_a_chain_says_how_sure_it_is_only_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_drafting, "PagedLevels", Planned)
    draft = drafter(TreeShape.of(3, 1, None)).chain(batch(), TABLE[LAST], lambda tokens, *_: TABLE[tokens])
    assert draft.confidence is None


@pytest.mark.parametrize("base", [0, 1])
def test_masks_have_room_for_the_slots_written_by_then(base: int) -> None:
    """One for each level that the drafter runs, which is all but the last."""
    masks = level_masks(batch(), TreeShape(4, 30, 90), base)
    assert [tuple(mask.shape) for mask in masks] == [(2, 30, 1), (2, 30, 1), (2, 30, 2)]
    assert [mask.shape[2] for mask in level_masks(batch(), TreeShape(4, 32, 90), base)] == [1, 1 + base, 2]
    assert level_masks(batch(), TreeShape(1, 3, 4), base) == []


@pytest.mark.parametrize("base", [0, 1])
def test_a_tree_runs_its_frontier_level_by_level(monkeypatch: pytest.MonkeyPatch, base: int) -> None:
    """Against lists: the best products along the paths are run, and the best of all offered are kept."""
    monkeypatch.setattr(tree_drafting, "PagedLevels", Planned)
    shape = TreeShape(3, 3, 9)
    ran: list[tuple[Tensor, Tensor, Tensor]] = []

    def run(tokens: Tensor, parents: Tensor | None, mixer: Any) -> Tensor:
        assert parents is not None and mixer == f"mixer {len(ran)}"
        ran.append((tokens, parents, Planned.latest.tensors["masks"][len(ran)]))
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
        assert draft.confidence is not None
        assert sorted(draft.confidence[row, 1:].tolist(), reverse=True) == pytest.approx([s for s, _ in kept], rel=1e-5)
        assert sorted(draft.tokens[row, 1:].tolist()) == sorted(path[-1] for _, path in kept)


@pytest.mark.parametrize("base", [0, 1])
def test_windows_reach_back_by_depth(monkeypatch: pytest.MonkeyPatch, base: int) -> None:
    """Node 0 has depth 0 and the columns of level i depth i + 1, or one less where node 0 is not stored."""
    monkeypatch.setattr(tree_drafting, "PagedLevels", Planned)
    made = drafter(TreeShape(4, 2, 9), base)
    planned: Any = made._tree_mixers(batch(), level_masks(batch(), made.shape, base))
    assert (planned.count, planned.sizes) == (3, (2, base))
    for level, (by_slot, by_row) in enumerate(planned.tensors["depths"]):
        slots = [0] * base + [base + each for each in range(level + 1) for _ in range(2)]
        assert by_slot.tolist() == [slots] * 2 and by_row.tolist() == [[base + level] * 2] * 2


def test_drafters_without_windows_plan_no_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_drafting, "PagedLevels", Planned)
    made = drafter(TreeShape(4, 2, 9))
    made.cache.config.sliding_windows = (None, None)  # type: ignore[misc]
    planned: Any = made._tree_mixers(batch(), level_masks(batch(), made.shape))
    assert planned.tensors["depths"] is None


def test_ids_of_the_drafter_become_those_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Id i of the drafter is 2 i here, in chains and in trees; what is run are the target's ids."""
    monkeypatch.setattr(tree_drafting, "PagedLevels", Planned)
    known, ran = torch.arange(VOCAB), list[Tensor]()

    def run(tokens: Tensor, *_: Any) -> Tensor:
        ran.append(tokens)
        return TABLE[tokens % VOCAB]

    chain = drafter(TreeShape.of(3, 1, None), vocabulary=known).chain(batch(), TABLE[LAST], run)
    tree = drafter(TreeShape(3, 2, 7), vocabulary=known).tree(batch(), TABLE[LAST], run)
    assert chain.tokens[:, 1].tolist() == (2 * TABLE[LAST].argmax(1)).tolist()
    for tokens in (chain.tokens[:, 1:], tree.tokens[:, 1:], *ran):
        assert bool((tokens % 2 == 0).all())


def test_a_tree_may_have_one_level() -> None:
    def never(*_: Any) -> Tensor:
        raise AssertionError("there is no second level")

    draft = grow_tree(batch(), TABLE[LAST], never, TreeShape(1, 3, 4), [], "reference")
    assert [set(row) for row in draft.tokens[:, 1:].tolist()] == [
        set(row) for row in TABLE[LAST].topk(3).indices.tolist()
    ]


@pytest.mark.parametrize("base", [0, 1])
@pytest.mark.parametrize("size", [(4, 1, 5), (3, 2, 9)], ids=["chain", "tree"])
def test_what_is_drawn_runs_in_the_same_places(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int, int], base: int
) -> None:
    monkeypatch.setattr(tree_drafting, "PagedLevels", Planned)
    shape, rows = TreeShape(*size), batch()
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB))
    device = torch.device("cpu")
    resources: Any = SimpleNamespace(target=target, impl="reference", max_batch=2, device=device)
    drawn = DrawnTree(DrawnShape.of(shape), resources, True, width=shape.topk, base=base)
    rows.sampling = SamplingTensors(torch.ones(2), seeds=torch.arange(2))
    made, ran = drafter(shape, base, drawn=drawn), list[tuple[str, bool]]()

    def run(tokens: Tensor, parents: Tensor | None, mixer: Any) -> Tensor:
        assert tokens.shape == (2, shape.topk)
        assert parents is None or int(parents.max()) < shape.topk
        ran.append((mixer, parents is None))
        return TABLE[tokens]

    draft = (made.chain if shape.chain else made.tree)(rows, TABLE[LAST], run)
    first = base if shape.chain else 0
    assert ran == [(f"mixer {first + level}", shape.chain) for level in range(len(drawn.levels) - 1)]
    assert draft.tokens[:, 0].tolist() == LAST and draft.draft_probs is not None
    assert made.limited(2) is made, "what is drawn keeps its shape"
