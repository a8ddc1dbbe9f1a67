"""Expected number of accepted drafts over a vocabulary of four tokens, exactly: every sample of a tree is enumerated.

Target and drafter are tables of the next token by the token before. At one node, for any way of sampling, no rule
accepts with a probability above 1 - max_H (Q(H) - p(H)) over sets H of tokens, where Q(H) is the probability that all
drafts are in H: the value of the optimal transport (SpecTr, arXiv 2310.15141; arXiv 2410.18234).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from algorithms.drafting.draft_sampling import DraftSampling
from specdec_kernels import SamplingTensors, build_tree
from specdec_kernels.verify import draft_by_node, expected_accepted

VOCAB = 4
BOUND = "any rule (bound)"
SHAPES = {
    "chain of 3": (-1, 0, 1, 2),
    "3 siblings": (-1, 0, 0, 0),
    "tree of 2 x 2": (-1, 0, 0, 1, 1, 2, 2),
}
DISTANCES = {"near": 0.5, "far": 2.0}
"""Scale of the normal noise between the logits of target and drafter, whose own scale is 1.5."""
ON_CHAINS = {"without_replacement": "rejection", "traversal": "block"}
"""Names of tree rules on a chain."""


def models(distance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the target and distributions of the drafter by the token before, both [V, V] float64."""
    generator = torch.Generator().manual_seed(11)
    target = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64) * 1.5
    noise = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    return target, torch.softmax(target + distance * noise, -1)


def samples(parents: tuple[int, ...], draft: torch.Tensor, replacement: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Every tree [C, N] that may be sampled after token 0, and its probability [C] float64."""
    q, found = draft.tolist(), []
    for drafts in product(range(VOCAB), repeat=len(parents) - 1):
        tokens, weight = (0, *drafts), 1.0
        for node in range(1, len(parents)):
            left = list(q[tokens[parents[node]]])
            if not replacement:
                for sibling in range(1, node):
                    if parents[sibling] == parents[node]:
                        left[tokens[sibling]] = 0.0
            weight *= left[tokens[node]] / sum(left)
        if weight > 0:
            found.append((tokens, weight))
    return torch.tensor([tokens for tokens, _ in found]), torch.tensor([w for _, w in found], dtype=torch.float64)


def mean_accepted(rule: str, parents: tuple[int, ...], distance: float, replacement: bool) -> float:
    """The mean over all samples and uniforms."""
    target, draft = models(distance)
    tokens, weights = samples(parents, draft, replacement)
    links = build_tree(
        torch.tensor(parents, dtype=torch.int32).repeat(len(tokens), 1), torch.zeros(len(tokens), dtype=torch.int64),
        impl="reference",
    )  # fmt: skip
    by_node = draft_by_node(draft[tokens[:, :-1]], None, len(parents))
    sampling = SamplingTensors(torch.ones(len(tokens)))
    mean = expected_accepted(rule, tokens, links, target[tokens], len(parents), sampling, by_node)
    return float((weights * mean).sum())


def most_at_one_node(num_drafts: int, distance: float, replacement: bool) -> float:
    """The probability with which the best rule accepts one of `num_drafts` siblings."""
    target, draft = models(distance)
    tokens, weights = samples((-1, *[0] * num_drafts), draft, replacement)
    inside = torch.tensor(list(product([False, True], repeat=VOCAB)))
    all_inside = inside[:, tokens[:, 1:]].all(-1).double() @ weights
    return float(1 - (all_inside - inside.double() @ torch.softmax(target[0], -1)).max())


def results() -> Iterator[dict[str, Any]]:
    """One result for each distance, shape, way of sampling, and rule that is exact for it."""
    for (name, distance), (shape, parents) in product(DISTANCES.items(), SHAPES.items()):
        is_chain = shape.startswith("chain")
        for kind in ("sample",) if is_chain else ("sample", "without_replacement"):
            replacement, found = kind == "sample", {}
            if set(parents[1:]) == {0}:
                found[BOUND] = most_at_one_node(len(parents) - 1, distance, replacement)
            for rule in DraftSampling(kind, "").exact_rules:
                if not is_chain or rule in ON_CHAINS:
                    label = ON_CHAINS[rule] if is_chain else rule
                    found[label] = mean_accepted(rule, parents, distance, replacement)
            for rule, mean in found.items():
                yield {
                    "data": f"analytic, {name}",
                    "method": shape,
                    "draft_sampling": kind,
                    "rule": rule,
                    "expected_accepted": mean,
                }
