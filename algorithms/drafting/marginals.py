"""Drafts from one distribution per position, which do not depend on the drafts before."""

from torch import Tensor

import specdec_kernels as kernels
from algorithms.algorithm import Batch, DraftTree


def draft_chain(
    batch: Batch,
    logits: Tensor,
    impl: str,
    vocabulary: Tensor | None = None,
    scored: bool = False,
    confidence: Tensor | None = None,
) -> DraftTree:
    """The most likely token of each position of `logits [B, D, V]`. `vocabulary [V]` int64 is added to an id to give
    the target's; `scored` adds path probabilities, of the drafts' own probabilities or of `confidence [B, D]`."""
    rows, depth, _ = logits.shape
    picked = kernels.pick_tokens(logits.flatten(0, 1), return_logprobs=scored, impl=impl)
    tokens = batch.last_tokens.new_empty(rows, depth + 1)
    tokens[:, 0] = batch.last_tokens
    tokens[:, 1:] = in_target(picked.tokens, vocabulary).view(rows, depth)
    path_probs = None
    if picked.logprobs is not None:
        path_probs = picked.logprobs.new_ones(rows, depth + 1)
        probs = picked.logprobs.view(rows, depth).exp() if confidence is None else confidence
        path_probs[:, 1:] = probs.cumprod(1)
    return DraftTree(tokens, kernels.build_chain(batch.lengths, depth + 1, impl=impl), path_probs=path_probs)


def draft_tree(
    batch: Batch,
    logits: Tensor,
    topk: int,
    num_nodes: int,
    impl: str,
    vocabulary: Tensor | None = None,
    confidence: Tensor | None = None,
) -> DraftTree:
    """The `num_nodes` most likely paths over the `topk` most likely tokens of each position. `confidence [B, D]` is a
    factor of the probabilities of each position."""
    rows, depth, _ = logits.shape
    probs, ids = kernels.draft_topk(logits.flatten(0, 1), topk, impl=impl)
    probs, ids = (x.view(rows, depth, topk) for x in (probs, in_target(ids, vocabulary)))
    if confidence is not None:
        probs = probs * confidence[..., None]
    chosen = kernels.best_first_tree(probs, ids, last_tokens=batch.last_tokens, num_nodes=num_nodes, impl=impl)
    links = kernels.build_tree(chosen.parents, batch.lengths, impl=impl)
    return DraftTree(chosen.tokens, links, path_probs=chosen.scores)


def in_target(ids: Tensor, vocabulary: Tensor | None) -> Tensor:
    """Ids of a drafter, of any shape, as ids of the target."""
    return ids if vocabulary is None else ids + vocabulary.take(ids)
