"""Named inputs of the tree family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Case, Maker
from specdec_kernels.tree.links import build_tree

_VOCAB = 151936


def random_parents(make: Maker, batch: int, num_nodes: int, unused: bool = False) -> torch.Tensor:
    """[batch, num_nodes] int32: each node under a uniformly drawn earlier one, or unused now and then."""
    node = torch.arange(num_nodes)
    draws = torch.rand(batch, num_nodes, generator=make.generator)
    parents = (draws * node).long()
    parents[:, 0] = -1
    if unused:
        orphan = torch.rand(batch, num_nodes, generator=make.generator) < 0.3
        bad = torch.where(draws < 0.5, -1, num_nodes + 7)
        parents = torch.where(orphan, bad, parents)
    return parents.to(make.device, torch.int32)


def random_probs(make: Maker, *shape: int, sharpness: float = 3.0) -> torch.Tensor:
    """float32 rows of the last dimension: the head of a distribution, in falling order."""
    law = (torch.randn(*shape, generator=make.generator) * sharpness).softmax(-1)
    return law.sort(-1, descending=True).values.to(make.device)


def _tree(make: Maker, batch: int, num_nodes: int, unused: bool = False, **options: Any) -> dict[str, Any]:
    parents = random_parents(make, batch, num_nodes, unused)
    return dict(parents=parents, lengths=make.integers(0, 1 << 40, batch), **options)


def _shaped(make: Maker, parents: list[int]) -> dict[str, Any]:
    return dict(parents=make.tensor([parents], torch.int32), lengths=make.integers(0, 100, 1))


def _chain(make: Maker, batch: int, num_nodes: int) -> dict[str, Any]:
    return dict(lengths=make.integers(0, 1 << 40, batch), num_nodes=num_nodes)


def _mask(make: Maker, batch: int, num_nodes: int, longest: int = 40, **options: Any) -> dict[str, Any]:
    """Words of random trees over requests of up to `longest` committed tokens."""
    lengths = make.integers(0, longest + 1, batch)
    mask = build_tree(random_parents(make, batch, num_nodes), lengths, impl="reference").mask
    return dict(mask=mask, lengths=lengths, **options)


def _bool_mask(make: Maker, batch: int, num_nodes: int) -> dict[str, Any]:
    """Any bits at all, so most rows are not closed under ancestors."""
    draws = torch.rand(batch, num_nodes, num_nodes, generator=make.generator)
    return dict(mask=(draws < 0.1).to(make.device), lengths=make.integers(0, 40, batch))


def _noise_mask(make: Maker, batch: int, num_nodes: int, **options: Any) -> dict[str, Any]:
    words = make.integers(-(1 << 62), 1 << 62, batch, num_nodes, -(-num_nodes // 64))
    return dict(mask=words & (words >> 1), lengths=make.integers(0, 40, batch), **options)


def _logits(make: Maker, rows: int, vocab: int, k: int, warm: bool = False, scale: float = 4.0) -> dict[str, Any]:
    logits = make.normal(rows, vocab, scale=scale)
    temperature = make.tensor([[0.0, 0.5, 1.0, 3.0][r % 4] for r in range(rows)], torch.float32) if warm else None
    return dict(logits=logits, k=k, temperature=temperature)


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


def _expand(make: Maker, batch: int, parents: int, children: int, width: int) -> dict[str, Any]:
    return dict(
        scores=random_probs(make, batch, parents),
        probs=random_probs(make, batch, parents, children),
        width=width,
    )


def _expand_ties(make: Maker) -> dict[str, Any]:
    """Laws of few values, so that most products are equal, in a view of wider rows."""
    law = make.tensor([0.5, 0.25, 0.25, 0.0, 9.0, 9.0], torch.float32).repeat(3, 5, 1)
    scores = make.tensor([[1.0, 0.5, 0.5, 0.0]] * 3, torch.float32)
    return dict(scores=scores, probs=law[:, :4, :4], width=7)


def _expand_hostile(make: Maker) -> dict[str, Any]:
    nan, inf = float("nan"), float("inf")
    scores = make.tensor([[nan, 0.5, -inf], [0.0, inf, -1.0]], torch.float32)
    probs = make.tensor([[[0.5, nan], [0.9, nan], [0.0, 1.0]], [[-1.0, 0.1], [0.0, 0.2], [nan, 0.5]]], torch.float32)
    return dict(scores=scores, probs=probs, width=6)


def _rerank(
    make: Maker, batch: int, candidates: int, num_nodes: int, levels: int = 1 << 20, closed: bool = True
) -> dict[str, Any]:
    """Random candidate trees whose scores fall along each path; `levels` different factors make ties."""
    parents = random_parents(make, batch, candidates + 1)[:, 1:].cpu() - 1
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
    ]
    return dict(
        probs=make.tensor(probs, torch.float32),
        tokens=make.integers(0, 100, 5, 2, 3),
        last_tokens=make.integers(0, 100, 5),
        num_nodes=14,
    )


def _bytes_of(*names: str) -> Callable[[dict[str, Any]], int]:
    return lambda inputs: sum(inputs[name].numel() * inputs[name].element_size() for name in names)


def _links_bytes(batch: int, nodes: int) -> int:
    return batch * nodes * (3 * 4 + 8 + 8 * -(-nodes // 64))


# Bytes that must move and arithmetic operations, of which trees have next to none.
WORK: dict[str, Callable[[dict[str, Any]], tuple[int, int]]] = {
    "build_tree": lambda i: (_bytes_of("parents", "lengths")(i) + _links_bytes(*i["parents"].shape), 0),
    "build_chain": lambda i: (_bytes_of("lengths")(i) + _links_bytes(len(i["lengths"]), i["num_nodes"]), 0),
    "links_from_mask": lambda i: (_bytes_of("mask", "lengths")(i) + _links_bytes(*i["mask"].shape[:2]), 0),
    "draft_topk": lambda i: (_bytes_of("logits")(i) + len(i["logits"]) * i["k"] * 12, 3 * i["logits"].numel()),
    "expand_tree": lambda i: (2 * _bytes_of("scores", "probs")(i), i["probs"].numel()),
    "rerank_tree": lambda i: (_bytes_of("path_scores", "parents")(i) + len(i["last_tokens"]) * i["num_nodes"] * 24, 0),
    "best_first_tree": lambda i: (_bytes_of("probs")(i) + len(i["last_tokens"]) * i["num_nodes"] * 24, 0),
}

_STAR = [-1] + [0] * 16
_DEEP = [-1] + list(range(69))
_MALFORMED = [5, 1, -2, 0, 3, 3, 9, -(1 << 31), (1 << 31) - 1, 4]


def _case(
    name: str,
    function: str,
    build: Callable[..., dict[str, Any]],
    catches: str,
    use: str = "",
    **shape: Any,
) -> Case:
    """`use`: any of the words gate, bench and large."""
    uses = use.split()
    tags = tuple(word for word in uses if word == "large")
    return Case(name, function, partial(build, **shape), catches, "gate" in uses, "bench" in uses, tags)


_tree_case = partial(_case, function="build_tree", build=_tree)
_chain_case = partial(_case, function="build_chain", build=_chain)

CASES = (
    _tree_case("tree_empty_batch", catches="launch on an empty grid", batch=0, num_nodes=5),
    _tree_case("tree_root_only", catches="a tree without drafts", use="gate", batch=3, num_nodes=1),
    _tree_case("tree_odd", catches="masks of sizes off the block", use="gate", batch=3, num_nodes=7),
    _tree_case("tree_unused", catches="padding becomes a sibling", batch=4, num_nodes=9, unused=True),
    _tree_case(
        "tree_orphans_see_root",
        catches="an orphan without position",
        use="gate",
        batch=4,
        num_nodes=9,
        unused=True,
        orphans_see_root=True,
    ),
    _case("tree_star", "build_tree", _shaped, "sibling order", parents=_STAR),
    _case("tree_deep", "build_tree", _shaped, "ancestor walk cut short", parents=_DEEP),
    _case("tree_malformed", "build_tree", _shaped, "a parent outside [0, node) is followed", parents=_MALFORMED),
    _tree_case("tree_64", catches="the word's sign bit", use="gate bench", batch=64, num_nodes=64),
    _tree_case("tree_65", catches="first bit of the second word", batch=2, num_nodes=65),
    _tree_case("tree_130", catches="words not a power of two", use="gate", batch=2, num_nodes=130),
    _tree_case("tree_256", catches="the largest tree", use="bench", batch=1, num_nodes=256),
    _tree_case("tree_wide_batch", catches="several blocks of requests", batch=300, num_nodes=6),
    _chain_case("chain_empty_batch", catches="launch on an empty grid", batch=0, num_nodes=4),
    _chain_case("chain_root_only", catches="last node's child", batch=2, num_nodes=1),
    _chain_case("chain_16", catches="positions", use="gate bench", batch=64, num_nodes=16),
    _chain_case("chain_64", catches="shift by the word size", batch=2, num_nodes=64),
    _chain_case("chain_130", catches="full words before the last", use="gate", batch=2, num_nodes=130),
    _case("mask_empty_batch", "links_from_mask", _mask, "launch on an empty grid", batch=0, num_nodes=3),
    _case("mask_64", "links_from_mask", _mask, "the sign bit as a parent", "gate bench", batch=64, num_nodes=64),
    _case("mask_130", "links_from_mask", _mask, "a parent in an earlier word", "gate", batch=2, num_nodes=130),
    _case("mask_noise", "links_from_mask", _noise_mask, "rows that no tree has", batch=3, num_nodes=70),
    _case("mask_bool", "links_from_mask", _bool_mask, "a row that is not closed", "gate", batch=3, num_nodes=21),
    _case("mask_bool_one", "links_from_mask", _bool_mask, "a block wider than the row", batch=2, num_nodes=1),
    _case("topk_empty", "draft_topk", _logits, "launch on an empty grid", rows=0, vocab=9, k=2),
    _case("topk_all", "draft_topk", _logits, "exhausted tiles", rows=2, vocab=10, k=10),
    _case("topk_one_tile", "draft_topk", _logits, "a row of one tile", "gate", rows=3, vocab=100, k=1),
    _case("topk_odd", "draft_topk", _logits, "a last tile of one entry", rows=3, vocab=8193, k=8, warm=True),
    _case("topk_warm", "draft_topk", _logits, "a temperature of zero", rows=4, vocab=1500, k=5, warm=True),
    _case("topk_flat", "draft_topk", _logits, "sum of many tiles", rows=2, vocab=5000, k=4, scale=0.01),
    _case("topk_equal", "draft_topk", _equal_logits, "the lowest id among equals", rows=3, vocab=1100, k=64),
    _case("topk_hostile", "draft_topk", _hostile_logits, "NaN and infinities", vocab=700, k=9),
    _case("topk_qwen", "draft_topk", _logits, "the shipped vocabulary", "gate bench large", rows=32, vocab=_VOCAB, k=8),
    _case("topk_widest", "draft_topk", _logits, "the widest vocabulary", "large", rows=4, vocab=248320, k=64),
    _case("expand_empty", "expand_tree", _expand, "empty grid", batch=0, parents=2, children=2, width=2),
    _case("expand_one", "expand_tree", _expand, "one candidate", batch=2, parents=1, children=1, width=1),
    _case("expand_odd", "expand_tree", _expand, "lanes past the end", batch=3, parents=3, children=5, width=15),
    _case("expand_8", "expand_tree", _expand, "shipped shape", "gate bench", batch=8, parents=8, children=8, width=8),
    _case("expand_64", "expand_tree", _expand, "widest", "gate", batch=1, parents=64, children=64, width=64),
    _case("expand_ties", "expand_tree", _expand_ties, "ties, and rows of a wider tensor"),
    _case("expand_hostile", "expand_tree", _expand_hostile, "NaN and infinities in the order"),
    _case("rerank_empty", "rerank_tree", _rerank, "launch on an empty grid", batch=0, candidates=4, num_nodes=3),
    _case("rerank_root_only", "rerank_tree", _rerank, "nothing to keep", batch=2, candidates=1, num_nodes=1),
    _case("rerank_few", "rerank_tree", _rerank, "more nodes than candidates", batch=2, candidates=5, num_nodes=9),
    _case(
        "rerank_ties", "rerank_tree", _rerank, "a tie at the threshold", batch=4, candidates=40, num_nodes=12, levels=2
    ),
    _case(
        "rerank_hostile",
        "rerank_tree",
        _rerank,
        "NaN, late parents",
        batch=4,
        candidates=30,
        num_nodes=12,
        closed=False,
    ),
    _case("rerank_64", "rerank_tree", _rerank, "shipped shape", "gate bench", batch=8, candidates=328, num_nodes=64),
    _case("rerank_4096", "rerank_tree", _rerank, "widest", "gate large", batch=2, candidates=4096, num_nodes=256),
    _case("first_empty", "best_first_tree", _marginals, "empty grid", batch=0, depths=2, ranks=2, num_nodes=3),
    _case("first_root_only", "best_first_tree", _marginals, "no loop", batch=2, depths=1, ranks=1, num_nodes=1),
    _case("first_few", "best_first_tree", _marginals, "no offer left", batch=2, depths=2, ranks=2, num_nodes=9),
    _case("first_hostile", "best_first_tree", _marginals_hostile, "zeros, NaN and ties"),
    _case(
        "first_64", "best_first_tree", _marginals, "shipped", "gate bench", batch=8, depths=15, ranks=8, num_nodes=64
    ),
    _case(
        "first_256", "best_first_tree", _marginals, "widest", "gate large", batch=1, depths=32, ranks=64, num_nodes=256
    ),
)
