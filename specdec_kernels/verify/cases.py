"""Named inputs of the verify family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.cases import Case, Comparison, Maker, WorkModel, case_of
from specdec_kernels.sampling.cases import random_sampling, with_filters
from specdec_kernels.sampling.reference import filtered_probs
from specdec_kernels.sampling.types import SamplingTensors
from specdec_kernels.tree.reference import build_chain, build_tree
from specdec_kernels.verify.types import CHAIN_RULES, SAMPLED_RULES, TREE_RULES, WITHOUT_REPLACEMENT_RULES

_INF = float("inf")


def _accept(
    make: Maker,
    batch: int,
    num_nodes: int,
    vocab: int,
    max_depth: int,
    rule: str = "greedy",
    chain: bool = False,
    agreeing: float = 0.7,
) -> dict[str, Any]:
    """Trees whose drafts carry their parent's greedy token with probability `agreeing`, else a random one."""
    lengths = make.integers(0, 1000, batch)
    parents = make.parents(batch, num_nodes, unused=not chain)
    tree = build_chain(lengths, num_nodes) if chain else build_tree(parents, lengths)
    if chain:
        parents = torch.arange(-1, num_nodes - 1, device=make.device).expand(batch, num_nodes)
    logits = make.normal(batch, num_nodes, vocab, scale=2.0)
    wanted = logits.float().argmax(-1).gather(1, parents.long().clamp(0, num_nodes - 1))
    sampled = make.integers(0, vocab, batch, num_nodes)
    agrees = (torch.rand(batch, num_nodes, generator=make.generator) < agreeing).to(make.device)
    tokens = torch.where(agrees, wanted, sampled)
    sampling = random_sampling(make, batch) if rule == "target_only" else SamplingTensors()
    return dict(
        rule=rule, tokens=tokens, tree=tree, logits=logits, lengths=lengths, max_depth=max_depth, sampling=sampling
    )


def _duplicates(make: Maker) -> dict[str, Any]:
    """Equal siblings, the second with a deeper subtree, and unused nodes that carry the target's token."""
    parents = make.tensor([[-1, 0, 0, 2, -1, 9]], torch.int32)
    lengths = make.tensor([3], torch.int64)
    tokens = make.tensor([[5, 1, 1, 2, 1, 1]], torch.int64)
    logits = make.normal(1, 6, 4)
    logits[0, 0, 1] = 50.0
    logits[0, 2, 2] = 50.0
    tree = build_tree(parents, lengths)
    return dict(rule="greedy", tokens=tokens, tree=tree, logits=logits, lengths=lengths, max_depth=4)


def _unusable(make: Maker) -> dict[str, Any]:
    """A row of NaN inside the path, whose replacement token 0 is also drafted."""
    inputs = _accept(make, batch=3, num_nodes=4, vocab=6, max_depth=3, chain=True, agreeing=1.0)
    for request, node in ((0, 0), (1, 2)):
        inputs["logits"][request, node] = float("nan")
        inputs["tokens"][request, node + 1] = 0
    return inputs


def _from_probs(make: Maker, rule: str, **sizes: int) -> dict[str, Any]:
    """Target probabilities instead of logits; a row of zeros and entries that are no probabilities among them."""
    inputs = _accept(make, rule=rule, chain=True, **sizes)
    probs = torch.softmax(inputs.pop("logits").float(), -1) * 0.5
    probs[0, 1:2, 0] = float("nan")
    probs[1, 0, 1] = -0.25
    probs[2:3, 1] = 0.0
    return inputs | dict(logits=None, probs=probs)


def _sampled(
    make: Maker,
    rule: str,
    batch: int,
    num_nodes: int,
    vocab: int,
    max_depth: int,
    distance: float = 1.0,
    filtered: bool = False,
    probs: bool = False,
    padded: int = 0,
) -> dict[str, Any]:
    """A chain sampled from a distribution whose logits lie `distance` from the target's; at infinity the two are
    disjoint."""
    lengths = make.integers(0, 1000, batch)
    logits = make.normal(batch, num_nodes, vocab + padded, scale=2.0)[..., :vocab]
    near = logits[:, :-1].float()
    if distance == _INF:
        drafted = torch.where(near > 0, float("-inf"), -near)
    else:
        drafted = near + make.normal(batch, num_nodes - 1, vocab, scale=distance).float()
    sampling, draft_probs = random_sampling(make, batch), _draft_probs(drafted.flatten(0, 1), filtered)
    some = len(draft_probs) > 0
    sampled = torch.multinomial(draft_probs.cpu(), 1, generator=make.generator) if some else draft_probs.long()
    tokens = make.integers(0, vocab, batch, num_nodes)
    tokens[:, 1:] = sampled.view(batch, num_nodes - 1).to(make.device)
    if filtered:
        sampling = with_filters(make, sampling, batch, vocab)
    return dict(
        rule=rule, tokens=tokens, tree=build_chain(lengths, num_nodes), logits=None if probs else logits,
        lengths=lengths, max_depth=max_depth, draft_probs=draft_probs.view(batch, num_nodes - 1, vocab),
        sampling=sampling, probs=torch.softmax(logits.float(), -1) if probs else None,
    )  # fmt: skip


def _draft_probs(logits: Tensor, filtered: bool) -> Tensor:
    """[R, V] distributions of drafts; `filtered`: of the 16 most likely tokens, those with 0.8 of their probability."""
    if not filtered:
        return torch.softmax(logits, -1)
    top = logits.topk(min(16, logits.shape[-1]))
    ones = torch.ones(len(logits), device=logits.device)
    kept = filtered_probs(top.values, SamplingTensors(temperature=ones, top_p=0.8 * ones))
    return torch.zeros_like(logits).scatter_(-1, top.indices, kept)


_PARENTS = (-1, 0, 0, 0, 1, 1, 2, 2, 5, 5)
# 32 nodes down to depth 7: the first children of the first nodes have most below them.
_WIDE = (-1, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 5, 5, 6, 6, 9, 9, 15, 15, 15, 16, 18, 22, 22, 23, 27, 30)


def _sample_siblings(make: Maker, rule: str, inputs: dict[str, Any], nodes: list[int], weights: Tensor) -> None:
    again = rule not in WITHOUT_REPLACEMENT_RULES
    sampled = torch.multinomial(weights.cpu(), len(nodes), again, generator=make.generator)
    inputs["tokens"][:, nodes] = sampled.to(make.device)


def _sampled_tree(
    make: Maker, rule: str, batch: int, max_depth: int, unused: int = 2, shape: Sequence[int] = _PARENTS, **sizes: Any
) -> dict[str, Any]:
    """Siblings sampled together, from rows that depend on the parent's place; independent samples may be equal. The
    last `unused` nodes are in the tensor and not in the tree."""
    num_nodes = len(shape) + unused
    inputs = _sampled(make, rule, batch, num_nodes, max_depth=max_depth, **sizes)
    parents = make.tensor([[*shape] + [-2] * unused] * batch, torch.int32)
    for parent in sorted(set(shape[1:])):
        children = [node for node, above in enumerate(shape) if above == parent]
        _sample_siblings(make, rule, inputs, children, inputs["draft_probs"][:, parent])
    return inputs | dict(tree=build_tree(parents, inputs["lengths"]))


def _coarse(make: Maker, rule: str, batch: int, vocab: int = 5) -> dict[str, Any]:
    """Probabilities and judging uniforms of few bits: uniforms equal ratios, and p, q and residuals are often 0."""
    if rule in CHAIN_RULES:
        inputs = _sampled(make, rule, batch, 5, vocab, max_depth=3, probs=True)
    else:
        inputs = _sampled_tree(make, rule, batch, max_depth=3, vocab=vocab, probs=True)
    share = make.tensor([0.5, 0.25, 0.125, 0.125] + [0.0] * (vocab - 4), torch.float32)
    for name in ("probs", "draft_probs"):
        order = torch.rand(inputs[name].shape, generator=make.generator).argsort(-1)
        inputs[name] = share[order.to(make.device)]
    inputs["draft_probs"][2::4] = inputs["probs"][2::4, :-1]
    batch, num_nodes = inputs["tokens"].shape
    inputs["tokens"] = make.integers(0, vocab + 1, batch, num_nodes)  # `vocab` is no token
    uniforms = make.integers(0, 8, batch, num_nodes + 1).double() / 8
    uniforms[:, -2:] = torch.rand(batch, 2, dtype=torch.float64, generator=make.generator).to(make.device)
    return inputs | dict(uniforms=uniforms)


def _shared_rows(make: Maker, rule: str, batch: int = 20) -> dict[str, Any]:
    """A tree of two levels, each sampled from one row; nodes without sampled children name no row, in several ways."""
    inputs = _sampled(make, rule, batch, 8, vocab=30, max_depth=3, distance=1.5)
    parents = make.tensor([[-1, 0, 0, 1, 1, 2, 2, 5]] * batch, torch.int32)
    draft_probs = inputs["draft_probs"][:, :2].contiguous()
    for children, row in (([1, 2], 0), ([3, 4], 1), ([5, 6], 1)):
        _sample_siblings(make, rule, inputs, children, draft_probs[:, row])
    draft_rows = make.tensor([[0, 1, 1, -1, 2, -1, 1 << 30, -7]] * batch, torch.int32)
    draft_rows[::2, 5] = 2  # one past the last
    tree = build_tree(parents, inputs["lengths"])
    return inputs | dict(draft_probs=draft_probs, draft_rows=draft_rows, tree=tree)


def _troubled_tree(make: Maker, rule: str) -> dict[str, Any]:
    """Rows of NaN, drafts outside the vocabulary, of probability 0, sampled twice, a greedy row, links that lead back,
    a draft whose rows do not sum to 1."""
    inputs = _sampled_tree(make, rule, batch=10, vocab=12, max_depth=3, distance=3.0)
    inputs["sampling"] = inputs["sampling"]._replace(temperature=make.tensor([0.9] * 9 + [0.0], torch.float32))
    inputs["logits"][0, 0] = float("nan")
    inputs["logits"][1, 1:4] = float("nan")
    inputs["tokens"][2, 1], inputs["tokens"][2, 2] = 12, -1
    inputs["draft_probs"][3, 0] = float("nan")
    inputs["draft_probs"][4] = 0.0
    inputs["tokens"][5, 1:4] = inputs["tokens"][5, 1:2].clone()
    inputs["logits"][5, 0, inputs["tokens"][5, 1]] = float("-inf")
    inputs["tree"].next_sibling[6, 2] = 1
    inputs["draft_probs"][7] *= 3.0
    inputs["draft_probs"][8, 0, inputs["tokens"][8, 2]] = 0.0
    inputs["tokens"][9, 3] = inputs["logits"][9, 0].float().argmax()
    return inputs


def _wild_tree(make: Maker, rule: str) -> dict[str, Any]:
    """Links that lead to the node itself or just past the last node, which are none, and a sibling of the root."""
    inputs = _sampled_tree(make, rule, batch=24, vocab=20, max_depth=3, distance=2.0)
    tree, num_nodes = inputs["tree"], inputs["tokens"].shape[1]
    tree.next_sibling[:6, 3] = 3
    tree.first_child[6:12, 6] = 6
    tree.next_sibling[12:18, 7] = num_nodes
    tree.first_child[18:, 6] = num_nodes
    tree.next_sibling[1::2, 0] = 1
    return inputs


def _troubled(make: Maker, rule: str) -> dict[str, Any]:
    """Rows of NaN, a cut chain, drafts outside the vocabulary and of probability 0 or NaN, uniforms of exactly 0."""
    inputs = _sampled(make, rule, batch=9, num_nodes=5, vocab=12, max_depth=3)
    inputs["sampling"] = inputs["sampling"]._replace(temperature=make.tensor([0.9] * 8 + [0.0], torch.float32))
    inputs["logits"][0, 0] = float("nan")
    inputs["logits"][1, 2] = float("nan")
    inputs["tree"].first_child[2, 1] = -1
    inputs["tokens"][3, 1], inputs["tokens"][3, 2] = 12, -1
    inputs["draft_probs"][4, 0] = float("nan")
    inputs["draft_probs"][5, :, :] = 0.0
    inputs["logits"][6, 1, inputs["tokens"][6, 2]] = float("-inf")
    inputs["draft_probs"][7] = torch.softmax(inputs["logits"][7, :-1].float() / 0.9, -1)
    uniforms = torch.rand(9, 6, dtype=torch.float64, generator=make.generator)
    uniforms[5:8, :4] = 0.0
    return inputs | dict(uniforms=uniforms.to(make.device))


def _targets(make: Maker, batch: int, num_nodes: int, max_depth: int, chain: bool = False) -> dict[str, Any]:
    """Known target tokens, some of them missing."""
    inputs = _accept(make, batch, num_nodes, 5, max_depth, chain=chain, agreeing=0.9)
    targets = inputs["logits"].float().argmax(-1)
    targets[::3, num_nodes // 2] = -1
    return {name: inputs[name] for name in ("tokens", "tree", "lengths", "max_depth")} | dict(targets=targets)


def _wild_targets(make: Maker, num_nodes: int) -> dict[str, Any]:
    """Links just past the last node, which are none, and links to the node itself or to the root, which are
    followed: N - 1 nodes are looked at. `num_nodes` 32 fills the lanes, so that none past the last is empty."""
    tree = build_chain(make.tensor([2, 3, 4, 5, 6, 7], torch.int64), num_nodes)
    tree.first_child[0, 1], tree.next_sibling[1, 1] = num_nodes, num_nodes
    tree.first_child[2, 1], tree.next_sibling[3, 1] = 1, 1
    tree.first_child[4, 1], tree.next_sibling[5, 1] = 0, 0
    targets = make.tensor([[0], [0], [2], [2], [2], [2]], torch.int64).repeat(1, num_nodes)
    tokens = targets.clone()
    tokens[1::2, 1] = 3
    lengths = tree.positions[:, 0].contiguous()
    return dict(tokens=tokens, tree=tree, targets=targets, lengths=lengths, max_depth=6)


def _filtered(make: Maker, **sizes: Any) -> dict[str, Any]:
    inputs = _accept(make, rule="target_only", **sizes)
    return inputs | dict(sampling=with_filters(make, inputs["sampling"], sizes["batch"], sizes["vocab"]))


def _without_logprobs(make: Maker, filtered: bool = False, **sizes: Any) -> dict[str, Any]:
    """The engine's call where no request wants log-probabilities."""
    return (_filtered if filtered else _accept)(make, **sizes) | dict(return_logprobs=False)


def _each(
    rules: Sequence[str], build: Callable[..., dict[str, Any]], *rows: tuple[Any, ...], **options: Any
) -> list[Case]:
    """Cases `RULE_NAME` of rows (name, bug, gate, sizes) for every rule."""
    return [
        case_of("accept", build, f"{rule}_{name}", bug, gate=gate, rule=rule, **sizes, **options)
        for rule in rules
        for name, bug, gate, sizes in rows
    ]


_greedy = partial(case_of, "accept", _accept)
_target_only = partial(case_of, "accept", _accept, rule="target_only")
_plain = partial(case_of, "accept", _without_logprobs)
_known = partial(case_of, "accept_targets", _targets)
_SHIPPED: dict[str, Any] = dict(bench=True, tags=("large",), vocab=151936)
_CHAIN16 = _SHIPPED | dict(catches="the shipped vocabulary", num_nodes=16, max_depth=15, chain=True)
_TREE32 = _SHIPPED | dict(catches="the shipped tree", batch=8, num_nodes=32, max_depth=7)

CASES = (
    _greedy("accept_empty", catches="empty grid", batch=0, num_nodes=4, vocab=9, max_depth=3),
    _target_only("accept_root_only", catches="no drafts", gate=True, batch=3, num_nodes=1, vocab=9, max_depth=0),
    _greedy("accept_depth_0", catches="limit ignored", batch=2, num_nodes=5, vocab=9, max_depth=0),
    _greedy("accept_cut", catches="limit", batch=4, num_nodes=9, vocab=5, max_depth=2, chain=True),
    _greedy("accept_saturated", catches="bonus row of a fully accepted chain", gate=True, batch=3, num_nodes=16,
            vocab=33, max_depth=15, chain=True, agreeing=1.0),
    _greedy("accept_tree", catches="siblings", gate=True, batch=5, num_nodes=13, vocab=7, max_depth=6),
    _target_only("accept_tree_65", catches="long paths", batch=2, num_nodes=65, vocab=11, max_depth=9),
    _target_only("accept_sampled", catches="keys", gate=True, batch=7, num_nodes=6, vocab=100, max_depth=5),
    _target_only("accept_tiles", catches="split vocabulary", batch=2, num_nodes=5, vocab=2049, max_depth=4),
    case_of("accept", _duplicates, "accept_duplicates", "equal siblings, padding counted as sibling"),
    case_of("accept", _unusable, "accept_unusable", "a NaN row continues the path"),
    case_of("accept", _filtered, "accept_filtered", "filters", gate=True, batch=6, num_nodes=5, vocab=100, max_depth=4),
    _plain("accept_no_logprobs", catches="logprobs written without being asked for", rule="target_only", batch=3,
           num_nodes=4, vocab=50, max_depth=3),
    case_of("accept", _from_probs, "accept_probs", "probabilities taken for logits", gate=True, rule="target_only",
            batch=5, num_nodes=4, vocab=30, max_depth=3),
    case_of("accept", _from_probs, "accept_probs_greedy", "argmax of probabilities", rule="greedy", batch=5,
            num_nodes=4, vocab=30, max_depth=3),
    *_each(
        CHAIN_RULES, _sampled,
        ("empty", "an empty grid", False, dict(batch=0, num_nodes=3, vocab=9, max_depth=2)),
        ("root_only", "no drafts", True, dict(batch=3, num_nodes=1, vocab=9, max_depth=0)),
        ("near", "bonus row", True, dict(batch=9, num_nodes=5, vocab=40, max_depth=4, distance=0.2)),
        ("far", "residual row", False, dict(batch=9, num_nodes=5, vocab=40, max_depth=4, distance=3.0)),
        ("same", "an empty residual", False, dict(batch=7, num_nodes=4, vocab=40, max_depth=3, distance=0.0)),
        ("disjoint", "no common token", False, dict(batch=7, num_nodes=4, vocab=40, max_depth=3, distance=_INF)),
        ("cut", "draft past the limit", False, dict(batch=7, num_nodes=6, vocab=9, max_depth=2, distance=0.2)),
        ("filtered", "p unfiltered", True, dict(batch=7, num_nodes=4, vocab=100, max_depth=3, filtered=True)),
        ("probs", "p from logits", True, dict(batch=7, num_nodes=4, vocab=100, max_depth=3, probs=True)),
        ("tiles", "groups", False, dict(batch=3, num_nodes=3, vocab=700, max_depth=2, padded=9, filtered=True)),
    ),
    *_each(
        TREE_RULES, _sampled,
        ("empty", "an empty grid", False, dict(batch=0, num_nodes=3, vocab=9, max_depth=2)),
        ("root_only", "no drafts", True, dict(batch=3, num_nodes=1, vocab=9, max_depth=0)),
        ("chain", "a chain judged as a tree", False, dict(batch=9, num_nodes=5, vocab=40, max_depth=4)),
    ),
    *_each(
        TREE_RULES, _sampled_tree,
        ("near", "bonus row", True, dict(batch=9, vocab=40, max_depth=3, distance=0.2)),
        ("far", "residuals after several rejections", False, dict(batch=40, vocab=20, max_depth=3, distance=2.0)),
        ("disjoint", "no common token", False, dict(batch=7, vocab=40, max_depth=3, distance=_INF)),
        ("cut", "children below the limit", False, dict(batch=9, vocab=9, max_depth=1, distance=1.0)),
        ("filtered", "samples of few tokens", True, dict(batch=9, vocab=100, max_depth=3, filtered=True)),
        ("probs", "p from logits", True, dict(batch=9, vocab=60, max_depth=3, probs=True)),
        ("tiles", "passes", False, dict(batch=2, vocab=4500, max_depth=2, padded=9, distance=2.0)),
    ),
    *_each(SAMPLED_RULES, _coarse, ("coarse", "ties and zeros", False, dict(batch=72))),
    *_each(CHAIN_RULES, _troubled, ("troubled", "unusable rows", False, {})),
    *_each(TREE_RULES, _troubled_tree, ("troubled", "no sampled child", False, {})),
    *_each(TREE_RULES, _wild_tree, ("wild", "a link that leads nowhere", False, {})),
    *_each(TREE_RULES, _shared_rows, ("shared_rows", "the row of another node", True, {})),
    _known("targets_tree", catches="missing targets", batch=5, num_nodes=13, max_depth=6),
    case_of("accept_targets", _wild_targets, "targets_wild", "links that lead round", num_nodes=4),
    case_of("accept_targets", _wild_targets, "targets_wild_lanes", "links outside", num_nodes=32),
    _known("targets_root", catches="no drafts", gate=True, batch=4, num_nodes=1, max_depth=0),
    *(
        _known(name, catches="the shipped sizes", gate=True, bench=True, tags=("large",), batch=64, **sizes)
        for name, sizes in (
            ("targets_b64_chain16", dict(num_nodes=16, max_depth=15, chain=True)),
            ("targets_b64_tree64", dict(num_nodes=64, max_depth=8)),
        )
    ),
    _target_only("accept_qwen", gate=True, batch=1, **_CHAIN16),
    _greedy("accept_greedy_b8", batch=8, **_CHAIN16),
    _target_only("accept_sampled_b8", batch=8, **_CHAIN16),
    _plain("accept_greedy_plain_b8", gate=True, batch=8, **_CHAIN16),
    _plain("accept_sampled_plain_b8", rule="target_only", batch=8, **_CHAIN16),
    _plain("accept_filtered_plain_b8", filtered=True, batch=8, **_CHAIN16),
    case_of("accept", _filtered, "accept_filtered_b8", gate=True, batch=8, **_CHAIN16),
    _plain("accept_greedy_b8_tree32", **_TREE32),
    _plain("accept_sampled_b8_tree32", rule="target_only", **_TREE32),
    *_each(
        CHAIN_RULES, _sampled, ("b8", "the shipped vocabulary", True, dict(num_nodes=8, max_depth=7)), batch=8,
        filtered=True, **_SHIPPED,
    ),
    *_each(
        ("rejection",), _sampled, ("b8_chain32", "a long chain", False, dict(num_nodes=32, max_depth=31)), batch=8,
        filtered=True, **_SHIPPED,
    ),
    *_each(
        TREE_RULES, _sampled_tree,
        ("b8", "the shipped vocabulary", True, dict(batch=8, max_depth=4)),
        *(
            (f"b{batch}_tree32", "the shipped tree", False, dict(batch=batch, max_depth=7, unused=0, shape=_WIDE))
            for batch in (1, 8)
        ),
        filtered=True, **_SHIPPED,
    ),
)  # fmt: skip


COMPARISON = Comparison(draws=("accept",))
WORK: dict[str, WorkModel] = {"accept_targets": lambda i: (24 * i["tokens"].numel(), i["tokens"].numel())}
