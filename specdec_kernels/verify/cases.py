"""Named inputs of the verify family."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Case, Maker
from specdec_kernels.sampling.cases import sampling_keys
from specdec_kernels.tree.cases import random_parents
from specdec_kernels.tree.reference import build_chain, build_tree


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
    """Trees whose drafts carry their parent's greedy token with probability `agreeing`, else a drawn one."""
    lengths = make.integers(0, 1000, batch)
    parents = random_parents(make, batch, num_nodes, unused=not chain)
    tree = build_chain(lengths, num_nodes) if chain else build_tree(parents, lengths)
    if chain:
        parents = torch.arange(-1, num_nodes - 1, device=make.device).expand(batch, num_nodes)
    logits = make.normal(batch, num_nodes, vocab, scale=2.0)
    wanted = logits.float().argmax(-1).gather(1, parents.long().clamp(0, num_nodes - 1))
    drawn = make.integers(0, vocab, batch, num_nodes)
    agrees = (torch.rand(batch, num_nodes, generator=make.generator) < agreeing).to(make.device)
    tokens = torch.where(agrees, wanted, drawn)
    keys = sampling_keys(make, batch) if rule == "target_only" else {}
    return dict(rule=rule, tokens=tokens, tree=tree, logits=logits, lengths=lengths, max_depth=max_depth, **keys)


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


_SAMPLED = partial(_accept, rule="target_only")

CASES = (
    Case("accept_empty", "accept", partial(_accept, batch=0, num_nodes=4, vocab=9, max_depth=3), "empty grid"),
    Case(
        "accept_root_only",
        "accept",
        partial(_SAMPLED, batch=3, num_nodes=1, vocab=9, max_depth=0),
        "no drafts",
        gate=True,
    ),
    Case(
        "accept_depth_0",
        "accept",
        partial(_accept, batch=2, num_nodes=5, vocab=9, max_depth=0),
        "limit ignored",
    ),
    Case(
        "accept_cut",
        "accept",
        partial(_accept, batch=4, num_nodes=9, vocab=5, max_depth=2, chain=True),
        "limit",
    ),
    Case(
        "accept_saturated",
        "accept",
        partial(_accept, batch=3, num_nodes=16, vocab=33, max_depth=15, chain=True, agreeing=1.0),
        "bonus row of a fully accepted chain",
        gate=True,
    ),
    Case(
        "accept_tree",
        "accept",
        partial(_accept, batch=5, num_nodes=13, vocab=7, max_depth=6),
        "siblings",
        gate=True,
    ),
    Case(
        "accept_tree_65",
        "accept",
        partial(_SAMPLED, batch=2, num_nodes=65, vocab=11, max_depth=9),
        "long walks",
    ),
    Case(
        "accept_sampled",
        "accept",
        partial(_SAMPLED, batch=7, num_nodes=6, vocab=100, max_depth=5),
        "keys",
        gate=True,
    ),
    Case(
        "accept_tiles",
        "accept",
        partial(_SAMPLED, batch=2, num_nodes=5, vocab=2049, max_depth=4),
        "split vocabulary",
    ),
    Case("accept_duplicates", "accept", _duplicates, "equal siblings, padding counted as sibling"),
    Case("accept_unusable", "accept", _unusable, "a NaN row continues the path"),
    Case(
        "accept_qwen",
        "accept",
        partial(_SAMPLED, batch=1, num_nodes=16, vocab=151936, max_depth=15, chain=True),
        "the shipped vocabulary",
        gate=True,
        bench=True,
        tags=("large",),
    ),
)
