"""Named inputs of the tree family."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.cases import Comparison, Maker, case_of
from specdec_kernels.tree.reference import build_tree
from specdec_kernels.tree.types import Candidates, Frontier

_VOCAB = 151936


def random_probs(make: Maker, *shape: int, sharpness: float = 3.0) -> Tensor:
    """float32 rows of the last dimension: the head of a distribution, in falling order."""
    probs = (torch.randn(*shape, generator=make.generator) * sharpness).softmax(-1)
    return probs.sort(-1, descending=True).values.to(make.device)


def _tree(make: Maker, batch: int, num_nodes: int, unused: bool = False, **options: Any) -> dict[str, Any]:
    parents = make.parents(batch, num_nodes, unused)
    return dict(parents=parents, lengths=make.integers(0, 1 << 40, batch), **options)


def _shaped(make: Maker, parents: list[int]) -> dict[str, Any]:
    return dict(parents=make.tensor([parents], torch.int32), lengths=make.integers(0, 100, 1))


def _chain(make: Maker, batch: int, num_nodes: int) -> dict[str, Any]:
    return dict(lengths=make.integers(0, 1 << 40, batch), num_nodes=num_nodes)


def _mask(make: Maker, batch: int, num_nodes: int, longest: int = 40, **options: Any) -> dict[str, Any]:
    """Words of random trees over requests of up to `longest` committed tokens."""
    lengths = make.integers(0, longest + 1, batch)
    mask = build_tree(make.parents(batch, num_nodes), lengths).mask
    return dict(mask=mask, lengths=lengths, **options)


def _bool_mask(make: Maker, batch: int, num_nodes: int) -> dict[str, Any]:
    """Any bits at all, so most rows are not closed under ancestors."""
    draws = torch.rand(batch, num_nodes, num_nodes, generator=make.generator)
    return dict(mask=(draws < 0.1).to(make.device), lengths=make.integers(0, 40, batch))


def _noise_mask(make: Maker, batch: int, num_nodes: int, **options: Any) -> dict[str, Any]:
    words = make.integers(-(1 << 62), 1 << 62, batch, num_nodes, -(-num_nodes // 64))
    return dict(mask=words & (words >> 1), lengths=make.integers(0, 40, batch), **options)


def _masks(make: Maker, batch: int, num_nodes: int) -> dict[str, Any]:
    return dict(mask=_mask(make, batch, num_nodes)["mask"])


def _two_trees(
    make: Maker, batch: int, first: int, second: int, tokens: int = 4, unused: bool = False
) -> dict[str, Any]:
    """Trees over few tokens, so that they share paths; two children may carry one token."""
    trees = [(make.integers(0, tokens, batch, size), make.parents(batch, size, unused)) for size in (first, second)]
    (ours, parents), (theirs, other_parents) = trees
    return dict(tokens=ours, parents=parents, other_tokens=theirs, other_parents=other_parents)


def _logits(make: Maker, rows: int, vocab: int, k: int, scale: float = 4.0) -> dict[str, Any]:
    return dict(logits=make.normal(rows, vocab, scale=scale), k=k)


def _equal_logits(make: Maker, rows: int, vocab: int, k: int) -> dict[str, Any]:
    return dict(logits=make.integers(0, 3, rows, vocab).to(make.dtype), k=k)


def _hostile_logits(make: Maker, vocab: int, k: int) -> dict[str, Any]:
    """NaN, infinities, nothing usable, one usable entry, and a strided view whose neighbours are larger."""
    nan, inf = float("nan"), float("inf")
    logits = make.normal(6, vocab + 5)
    logits[:, vocab:] = 1e4
    logits[0, ::3] = nan
    logits[1, :vocab] = -inf
    logits[2, vocab - 1] = inf
    logits[3, :vocab] = nan
    logits[4, :vocab] = -inf
    logits[4, vocab // 2] = 1.0
    logits[5, :vocab] = 0.0
    return dict(logits=logits[:, :vocab], k=k)


def expansion(
    make: Maker,
    probs: Tensor,
    scores: Tensor | None,
    width: int,
    first: int = 0,
    slot: int = 0,
    reduced: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """A level after `first` candidates: a frontier with random masks over the slots before `slot`, or the root."""
    batch, parents, children = probs.shape
    words, before, vocab = -(-(slot + max(width, 1)) // 64), -(-max(slot, 1) // 64), 50
    frontier = None
    if scores is not None:
        seen = make.integers(-(1 << 62), 1 << 62, batch, parents, before)
        ids = make.integers(0, max(first, 1), batch, parents, dtype=torch.int32)
        none = torch.zeros_like(ids, dtype=torch.int64)
        frontier = Frontier(scores, ids, none, none, seen)
    offered = (batch, first + parents * children + 3)
    return dict(
        frontier=frontier,
        probs=probs,
        tokens=make.integers(0, vocab, batch, parents, children),
        candidates=Candidates(
            torch.full(offered, -7.0, device=make.device),
            make.integers(0, vocab, *offered),
            make.integers(-1, 9, *offered, dtype=torch.int32),
        ),
        first=first,
        width=width,
        mask=make.integers(-9, 9, batch, width, words) if width else None,
        slot=slot,
        vocabulary=make.integers(0, 1 << 40, vocab) if reduced else None,
        **options,
    )


def _expand(make: Maker, batch: int, parents: int, children: int, width: int, **options: Any) -> dict[str, Any]:
    return expansion(
        make, random_probs(make, batch, parents, children), random_probs(make, batch, parents), width, **options
    )


def _expand_root(make: Maker, batch: int, children: int, width: int, **options: Any) -> dict[str, Any]:
    return expansion(make, random_probs(make, batch, 1, children), None, width, **options)


def _expand_ties(make: Maker) -> dict[str, Any]:
    """Distributions of few values, so that most products are equal."""
    probs = make.tensor([0.5, 0.25, 0.25, 0.0], torch.float32).repeat(3, 4, 1)
    return expansion(make, probs, make.tensor([[1.0, 0.5, 0.5, 0.0]] * 3, torch.float32), 7, first=4)


def _expand_hostile(make: Maker) -> dict[str, Any]:
    nan, inf = float("nan"), float("inf")
    scores = make.tensor([[nan, 0.5, -inf], [0.0, inf, -1.0]], torch.float32)
    probs = make.tensor([[[0.5, nan], [0.9, nan], [0.0, 1.0]], [[-1.0, 0.1], [0.0, 0.2], [nan, 0.5]]], torch.float32)
    return expansion(make, probs, scores, 6)


def _rerank(
    make: Maker, batch: int, candidates: int, num_nodes: int, levels: int = 1 << 20, closed: bool = True
) -> dict[str, Any]:
    """Random candidate trees whose scores fall along each path; `levels` different factors make ties."""
    parents = make.parents(batch, candidates + 1)[:, 1:].cpu() - 1
    if not closed:
        strange = torch.rand(batch, candidates, generator=make.generator) < 0.4
        parents = torch.where(strange, candidates - 3 - parents, parents)
    factor = torch.randint(1, levels + 1, (batch, candidates), generator=make.generator) / levels
    scores = factor.clone()
    for candidate in range(candidates):
        parent = parents[:, candidate].long()
        inside = closed & (parent >= 0)
        above = scores.gather(1, parent.clamp(0, candidates - 1)[:, None])[:, 0]
        scores[:, candidate] = torch.where(inside, above * factor[:, candidate], factor[:, candidate])
    if not closed:
        scores[torch.rand(batch, candidates, generator=make.generator) < 0.3] = float("nan")
        scores[0] = -float("inf")
    return dict(
        path_scores=scores.to(make.device),
        tokens=make.integers(0, 1 << 40, batch, candidates),
        parents=parents.to(make.device, torch.int32),
        num_nodes=num_nodes,
        last_tokens=make.integers(0, 1 << 40, batch),
    )


def _marginals(make: Maker, batch: int, depths: int, ranks: int, num_nodes: int) -> dict[str, Any]:
    return dict(
        probs=random_probs(make, batch, depths, ranks),
        tokens=make.integers(0, 1 << 40, batch, depths, ranks),
        last_tokens=make.integers(0, 1 << 40, batch),
        num_nodes=num_nodes,
    )


def _marginals_hostile(make: Maker) -> dict[str, Any]:
    """Zeros, NaN, more than 1, ties, tiny products and too few candidates."""
    nan = float("nan")
    probs = [
        [[0.5, 0.5, 0.5], [1.0, 1.0, 0.0]],
        [[0.9, nan, 0.3], [0.8, 0.1, -0.5]],
        [[7.0, 2.0, 1.0], [float("inf"), 0.5, 0.5]],
        [[1e-30, 1e-37, 1e-40], [1e-8, 1e-9, 0.0]],
        [[0.0, 0.9, 0.9], [1.0, 1.0, 1.0]],
        [[2.0**-63, 0.5, 0.25], [2.0**-63, 2.0**-64, 0.0]],  # 2^-126 is the smallest product
    ]
    return dict(
        probs=make.tensor(probs, torch.float32),
        tokens=make.integers(0, 100, 6, 2, 3),
        last_tokens=make.integers(0, 100, 6),
        num_nodes=14,
    )


_STAR = [-1] + [0] * 16
_DEEP = [-1] + list(range(69))
_MALFORMED = [5, 1, -2, 0, 3, 3, 9, -(1 << 31), (1 << 31) - 1, 4]


_tree_case = partial(case_of, "build_tree", _tree)
_chain_case = partial(case_of, "build_chain", _chain)
_mask_case = partial(case_of, "links_from_mask", _mask)
_topk_case = partial(case_of, "draft_topk", _logits)
_expand_case = partial(case_of, "expand_tree", _expand)
_rerank_case = partial(case_of, "rerank_tree", _rerank)
_first_case = partial(case_of, "best_first_tree", _marginals)
_parents_case = partial(case_of, "tree_parents", _masks)
_merge_case = partial(case_of, "merge_trees", _two_trees)
_LARGE = ("large",)


def _children(
    make: Maker, batch: int, vocab: int, replacement: bool, kept: int | None = None, troubled: bool = False
) -> dict[str, Any]:
    """A tree of eleven nodes over four rows, rows at temperature 0 among them; `kept` tokens of each row can be
    sampled. Node 0 is sampled too, as any node may be."""
    rows, children = [0, 1, 2, 2], [[1, 2, 3, 4], [5, 6, -1, 7], [8, 9, -1, -1], [10, -1, 0, -1]]
    logits = make.normal(batch, 4, vocab, scale=2.0).float()
    if kept is not None:
        logits = torch.where(logits >= logits.topk(kept).values[..., -1:], logits, float("-inf"))
    probs = torch.softmax(logits, -1)
    if troubled:
        probs[0] = 0.0
        probs[1, :, ::2] = float("nan")
        probs[2, 0, 1:] = -1.0
        probs[3] *= 3.0
    temperature = torch.rand(batch, generator=make.generator) + 0.1
    temperature[4::5] = 0.0
    return dict(
        tokens=make.integers(0, vocab, batch, 11), probs=probs, children=make.tensor(children, torch.int32),
        rows=make.tensor(rows, torch.int32), top_tokens=logits.topk(min(3, vocab)).indices,
        temperature=temperature.to(make.device), seeds=make.integers(-(1 << 62), 1 << 62, batch),
        positions=make.integers(0, 1 << 40, batch), replacement=replacement,
    )  # fmt: skip


_sample_case = partial(case_of, "sample_children", _children)

CASES = (
    _tree_case("tree_empty_batch", "launch on an empty grid", batch=0, num_nodes=5),
    _tree_case("tree_root_only", "a tree without drafts", gate=True, batch=3, num_nodes=1),
    _tree_case("tree_odd", "masks of sizes off the block", gate=True, batch=3, num_nodes=7),
    _tree_case("tree_unused", "padding becomes a sibling", batch=4, num_nodes=9, unused=True),
    case_of("build_tree", _shaped, "tree_star", "sibling order", parents=_STAR),
    case_of("build_tree", _shaped, "tree_deep", "ancestor walk cut short", parents=_DEEP),
    case_of("build_tree", _shaped, "tree_malformed", "a parent outside [0, node) is followed", parents=_MALFORMED),
    _tree_case("tree_64", "the word's sign bit", gate=True, bench=True, batch=64, num_nodes=64),
    _tree_case("tree_65", "first bit of the second word", batch=2, num_nodes=65),
    _tree_case("tree_130", "words not a power of two", gate=True, batch=2, num_nodes=130),
    _tree_case("tree_256", "the largest tree", bench=True, batch=1, num_nodes=256),
    _tree_case("tree_wide_batch", "several blocks of requests", batch=300, num_nodes=6),
    _chain_case("chain_empty_batch", "launch on an empty grid", batch=0, num_nodes=4),
    _chain_case("chain_16", "positions", gate=True, bench=True, batch=64, num_nodes=16),
    _chain_case("chain_64", "shift by the word size", batch=2, num_nodes=64),
    _chain_case("chain_130", "full words before the last", gate=True, batch=2, num_nodes=130),
    _mask_case("mask_64", "the sign bit as a parent", gate=True, bench=True, batch=64, num_nodes=64),
    _mask_case("mask_130", "a parent in an earlier word", gate=True, batch=2, num_nodes=130),
    case_of("links_from_mask", _noise_mask, "mask_noise", "rows that no tree has", batch=3, num_nodes=70),
    case_of("links_from_mask", _bool_mask, "mask_bool", "a row that is not closed", gate=True, batch=3, num_nodes=21),
    _parents_case("parents_empty_batch", "launch on an empty grid", batch=0, num_nodes=3),
    _parents_case("parents_odd", "the root's own bit", batch=3, num_nodes=7),
    _parents_case("parents_130", "a parent in an earlier word", gate=True, batch=2, num_nodes=130),
    _merge_case("merge_empty_batch", "launch on an empty grid", batch=0, first=3, second=4),
    _merge_case("merge_roots", "a loop without nodes", batch=2, first=1, second=1),
    _merge_case("merge_one_sided", "a tree without drafts", batch=3, first=1, second=6),
    _merge_case("merge_alike", "a shared path drafted twice", batch=4, first=9, second=12, tokens=2),
    _merge_case("merge_apart", "a node under another parent", batch=4, first=7, second=5, tokens=1000),
    _merge_case("merge_unused", "a child of an unused node", batch=5, first=13, second=21, tokens=3, unused=True),
    _merge_case("merge_hybrid", "shipped", gate=True, bench=True, batch=8, first=16, second=32, tokens=8),
    _merge_case("merge_b32", "a step of 32 requests", bench=True, tags=_LARGE, batch=32, first=16, second=16, tokens=8),
    _merge_case("merge_256", "the largest union", gate=True, batch=1, first=128, second=129, tokens=3),
    _topk_case("topk_empty", "launch on an empty grid", rows=0, vocab=9, k=2),
    _topk_case("topk_all", "exhausted tiles", rows=2, vocab=10, k=10),
    _topk_case("topk_one_tile", "a row of one tile", gate=True, rows=3, vocab=100, k=1),
    _topk_case("topk_odd", "a last tile of one entry", rows=3, vocab=8193, k=8),
    _topk_case("topk_flat", "sum of many tiles", rows=2, vocab=5000, k=4, scale=0.01),
    case_of("draft_topk", _equal_logits, "topk_equal", "the lowest id among equals", rows=3, vocab=1100, k=64),
    case_of("draft_topk", _equal_logits, "topk_equal_tiles", "the lowest of equal tiles", rows=3, vocab=1100, k=3),
    case_of("draft_topk", _hostile_logits, "topk_hostile", "NaN and infinities", vocab=700, k=9),
    _topk_case("topk_qwen", "the shipped vocabulary", gate=True, bench=True, tags=_LARGE, rows=32, vocab=_VOCAB, k=8),
    _topk_case("topk_widest", "the widest vocabulary", tags=_LARGE, rows=4, vocab=248320, k=64),
    _sample_case("sample_empty", "launch on an empty grid", batch=0, vocab=9, replacement=False),
    *(
        _sample_case(f"sample_{name}_{kind}", catches, gate=gate, replacement=kind == "again", **sizes)
        for kind in ("again", "once")
        for name, catches, gate, sizes in (
            ("small", "lanes past the vocabulary", True, dict[str, Any](batch=9, vocab=11)),
            ("groups", "the sum of a group after a draw", False, dict[str, Any](batch=40, vocab=200)),
            ("few", "nothing left to draw", False, dict[str, Any](batch=20, vocab=70, kept=2)),
            ("troubled", "rows that are no distribution", False, dict[str, Any](batch=6, vocab=40, troubled=True)),
        )
    ),
    _sample_case("sample_qwen", "the shipped vocabulary", gate=True, bench=True, tags=_LARGE, batch=8, vocab=_VOCAB,
                replacement=False),
    _expand_case("expand_empty", "empty grid", batch=0, parents=2, children=2, width=2),
    _expand_case("expand_odd", "lanes past the end", batch=3, parents=3, children=5, width=15, first=9, slot=2),
    _expand_case("expand_last", "a frontier after the last level", batch=3, parents=3, children=5, width=0, first=4),
    _expand_case("expand_words", "the second word", gate=True, batch=2, parents=5, children=4, width=9, slot=60),
    _expand_case(
        "expand_8", "shipped shape", gate=True, bench=True, batch=8, parents=8, children=8, width=8, first=72, slot=9,
        reduced=True,
    ),
    _expand_case("expand_64", "widest", gate=True, batch=1, parents=64, children=64, width=64, first=64, slot=64),
    case_of("expand_tree", _expand_root, "expand_root", "the root's own bit", batch=3, children=5, width=4, slot=1,
            root_is_stored=True),
    case_of("expand_tree", _expand_root, "expand_root_8", "shipped shape", gate=True, batch=8, children=8, width=8,
            reduced=True),
    case_of("expand_tree", _expand_ties, "expand_ties", "ties"),
    case_of("expand_tree", _expand_hostile, "expand_hostile", "NaN and infinities in the order"),
    _rerank_case("rerank_empty", "launch on an empty grid", batch=0, candidates=4, num_nodes=3),
    _rerank_case("rerank_root_only", "nothing to keep", batch=2, candidates=1, num_nodes=1),
    _rerank_case("rerank_few", "more nodes than candidates", batch=2, candidates=5, num_nodes=9),
    _rerank_case("rerank_ties", "a tie at the threshold", batch=4, candidates=40, num_nodes=12, levels=2),
    _rerank_case("rerank_hostile", "NaN, late parents", batch=4, candidates=30, num_nodes=12, closed=False),
    _rerank_case("rerank_64", "shipped shape", gate=True, bench=True, batch=8, candidates=328, num_nodes=64),
    _rerank_case("rerank_4096", "widest", gate=True, tags=_LARGE, batch=2, candidates=4096, num_nodes=256),
    _first_case("first_empty", "empty grid", batch=0, depths=2, ranks=2, num_nodes=3),
    _first_case("first_root_only", "no loop", batch=2, depths=1, ranks=1, num_nodes=1),
    _first_case("first_few", "no offer left", batch=2, depths=2, ranks=2, num_nodes=9),
    case_of("best_first_tree", _marginals_hostile, "first_hostile", "zeros, NaN and ties"),
    _first_case("first_64", "shipped", gate=True, bench=True, tags=_LARGE, batch=8, depths=15, ranks=8, num_nodes=64),
    _first_case("first_256", "widest", gate=True, tags=_LARGE, batch=1, depths=32, ranks=64, num_nodes=256),
)  # fmt: skip


COMPARISON = Comparison(draws=("sample_children",))
