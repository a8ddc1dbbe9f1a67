"""An algorithm that learns from rejected nodes: Token Recycling (arXiv 2408.08696) on a toy scale."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import specdec_kernels as kernels
from algorithms.algorithm import Algorithm, Batch, DraftTree, Observation, Resources
from tests.algorithms.toy import Setup, answers, engine_of, random_target, requests

TARGET = random_target()
TOPK = 2
PARENTS = torch.tensor([-1, 0, 0, 1, 1, 2], dtype=torch.int32)
RANKS = (None, 0, 1, 0, 1, 0)
"""Of each node, which successor of its parent's token it is."""


class TokenRecycling(Algorithm):
    """Drafts the most likely successors of each token, as the target saw them the last time."""

    name = "token_recycling"
    observes_verified = True
    chain, num_nodes, max_depth = False, len(RANKS), 2

    @dataclass
    class Config:
        name: str = "token_recycling"

    def __init__(self) -> None:
        self.verified: list[Any] = []

    def bind(self, resources: Resources) -> None:
        self._model, self._impl = resources.target.model, resources.impl
        self.successors = torch.zeros((resources.target.config.vocab_size, TOPK), dtype=torch.int64)

    def propose(self, batch: Batch) -> DraftTree:
        tokens = [batch.last_tokens]
        for parent, rank in zip(PARENTS.tolist()[1:], RANKS[1:], strict=True):
            tokens.append(self.successors[tokens[parent], rank])
        parents = PARENTS.repeat(len(batch.lengths), 1)
        return DraftTree(torch.stack(tokens, 1), kernels.build_tree(parents, batch.lengths, impl=self._impl))

    def observe(self, seen: Observation) -> None:
        assert seen.is_prefill == (seen.verified is None)
        tokens, hidden = (seen.tokens, seen.hidden) if seen.verified is None else seen.verified[::2]
        if seen.verified is not None:
            self.verified.append((tokens.clone(), seen.verified.links.depth.clone()))
        live = (seen.counts > 0)[:, None].expand_as(tokens)
        self.successors[tokens[live]] = self._model.logits(hidden).topk(TOPK).indices[live]


@pytest.mark.parametrize("graph", ["none", "step"])
def test_rejected_nodes_are_observed(graph: str) -> None:
    """The output stays that of the target, and tokens that were drafted and rejected have successors."""
    asked, algorithm = requests(3, 16), TokenRecycling()
    setup = Setup(max_batch=2, page_size=4, graph=graph)
    done = engine_of(algorithm, setup, TARGET).generate(asked).completions
    assert [c.token_ids for c in done] == answers(asked, Setup(max_batch=1), TARGET)
    assert algorithm.verified and all(tokens.shape[1] == 6 for tokens, _ in algorithm.verified)
    assert {tuple(depth[0].tolist()) for _, depth in algorithm.verified} == {(0, 1, 1, 2, 2, 2)}
    written = {token for request, c in zip(asked, done, strict=True) for token in (*request.prompt_ids, *c.token_ids)}
    learnt = set(algorithm.successors.any(1).nonzero().flatten().tolist())
    assert learnt - written, "a token that no output has was verified, and its successors are known"
