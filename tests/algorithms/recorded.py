"""What drafters of published folders draft through the engine, against the equations of their writers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from algorithms.algorithm import Algorithm, Batch, DraftTree
from algorithms.models.loading import Target
from tests.algorithms.toy import Setup, answers, changed, requests, run, tokens_along


class Original(Protocol):
    """A drafter after a text, spelled out: one request, no cache, no batch."""

    def logits(self, text: list[int], drafts: list[int]) -> Tensor:
        """[D, V]: of each draft, given the `drafts` before it."""


class Draft(NamedTuple):
    text: list[int]
    """What it was made for; rows of padding have a token at most."""
    tokens: list[int]
    parents: list[int]
    draft_probs: Tensor | None
    path_probs: Tensor | None


class Recorded:
    """Every draft of an algorithm."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.drafts: list[Draft] = []
        propose = algorithm.propose

        def recorded(batch: Batch) -> DraftTree:
            tree = propose(batch)
            for row, length in enumerate(batch.lengths.tolist()):
                parts = (None if part is None else part[row] for part in (tree.draft_probs, tree.path_probs))
                text = batch.history[row, : length + 1].tolist()
                self.drafts.append(Draft(text, tree.tokens[row].tolist(), _parents_of(tree, row), *parts))
            return tree

        algorithm.propose = recorded  # type: ignore[method-assign]


def _parents_of(tree: DraftTree, row: int) -> list[int]:
    parents = [-2] * tree.tokens.shape[1]
    parents[0] = -1
    for node, child in enumerate(tree.links.first_child[row].tolist()):
        while child >= 0:
            parents[child], child = node, int(tree.links.next_sibling[row, child])
    return parents


def drafted(
    algorithm: Algorithm, target: Target, setup: Setup, temperature: float = 0.0, tokens: int = 5, every: int = 3
) -> list[Draft]:
    """Serve requests of unequal prompts; greedy outputs are the target's own. Some of the drafts."""
    recorded = Recorded(algorithm)
    asked = [changed(request, temperature=temperature) for request in requests(3, max_new_tokens=tokens)]
    completions = run(algorithm, asked, setup, target).completions
    if temperature == 0:
        alone = answers(asked, Setup(backend="torch", max_batch=1), target)
        assert [c.token_ids for c in completions] == alone
    found = [draft for draft in recorded.drafts if len(draft.text) > 1]
    assert len(found) > 5
    return found[::every]


def check_chains(drafts: Sequence[Draft], original: Original) -> None:
    """Every draft is the most likely one of the equations, or within rounding of it."""
    for text, tokens, *_ in drafts:
        logits = original.logits(text, tokens[1:])
        chosen = logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert (logits.max(1).values - chosen).max() < 1e-4 and logits[logits.isfinite()].std() > 0.3


def check_distributions(drafts: Sequence[Draft], original: Original, temperature: float) -> None:
    """What each draft was sampled from is the original's distribution after the drafts before it."""
    for text, tokens, _, probs, _ in drafts:
        assert probs is not None and len(probs) == len(tokens) - 1
        expected = (original.logits(text, tokens[1:]) / temperature).softmax(-1)
        torch.testing.assert_close(probs.double(), expected.double(), atol=2e-5, rtol=1e-3)


def check_trees(
    drafts: Sequence[Draft], original: Original, sure: Callable[[list[int], list[int]], Tensor] | None = None
) -> None:
    """The probability of each path is the product of the original's along it, and of what `sure` says of each draft."""
    for text, tokens, parents, _, probs in drafts:
        assert probs is not None
        for leaf in {*range(1, len(tokens))}.difference(parents):
            path = tokens_along(range(len(tokens)), parents, leaf)
            along = [tokens[node] for node in path]
            shares = original.logits(text, along).softmax(-1)[torch.arange(len(along)), along]
            shares = shares if sure is None else shares * sure(text, along)
            torch.testing.assert_close(probs[path].double(), shares.cumprod(0).double(), rtol=1e-3, atol=0)


def check_kernels(make: Callable[[], Algorithm], target: Target, **kernels: Any) -> None:
    """Through the Triton kernels (interpreted where there is no GPU) the drafts are the same."""
    drafts = []
    for setup in (Setup(impl="triton", max_batch=2, **kernels), Setup(max_batch=2)):
        algorithm = make()
        recorded = Recorded(algorithm)
        run(algorithm, requests(2, max_new_tokens=2), setup, target)
        drafts.append([(draft.text, draft.tokens) for draft in recorded.drafts])
    assert drafts[0] == drafts[1]
