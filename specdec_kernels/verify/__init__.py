"""Which drafted tokens stay, and which token the target adds: one call for chains and trees.

`greedy` keeps the path whose every token is the target's argmax (speculative decoding at temperature 0; for trees,
SpecInfer, arXiv 2305.09781). `target_only` first lets the target draw its own token at every node, with the same random
key that autoregressive sampling would use there, and then keeps the path that carries these tokens. At a node with
children of tokens S, the draw x falls in S with probability sum_{s in S} p(s) and then x continues the path; otherwise
x is the bonus token and its law given the miss is p outside S, renormalised. The emitted sequence therefore has exactly
the target's law whenever the tree is a deterministic function of the context, and is token-identical to autoregressive
sampling with equal seeds.

A drafter that draws its tokens needs a rule that knows the law it drew from: `rejection` (arXiv 2211.17192) judges one
token after the other, `block` (arXiv 2403.10444) the chain as a whole, which accepts no fewer tokens in expectation.
Both are for chains; their formulas stand in `rejection_reference`. All rules are exact for the target's law under the
same temperature and filters as `pick_tokens`.
"""

from __future__ import annotations

from typing import Any

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import use_triton
from specdec_kernels.sampling.checks import check_filters, check_sources, expect_row_layout
from specdec_kernels.sampling.types import Filters
from specdec_kernels.tree import TreeLinks
from specdec_kernels.verify import reference
from specdec_kernels.verify.types import CHAIN_RULES, RULES, Accepted

__all__ = ["RULES", "Accepted", "accept", "accept_targets"]


def accept(
    rule: str,
    tokens: torch.Tensor,
    tree: TreeLinks,
    logits: torch.Tensor | None,
    lengths: torch.Tensor,
    max_depth: int,
    *,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    probs: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    return_logprobs: bool = True,
    impl: str = "auto",
) -> Accepted:
    """Keep what the target would have said of each draft, and add one token of its own.

    From a node the walk of `greedy` and `target_only` goes to the first child that carries the node's target token;
    where there is none, after `max_depth` drafts, or at a row without a usable logit, it stops and the node's target
    token is the bonus. Unlinked nodes and duplicates behind the first are never reached. `rejection` and `block` judge
    the nodes 1, 2, ... as long as first_child[n - 1] = n; the chain ends at the first that is not, at `max_depth`, and
    behind a row without a usable logit. Rows at temperature 0 are greedy under every rule.

    Args:
        rule: `greedy` (target token = argmax), `target_only` (target token = exact draw at the request's temperature),
            `rejection` or `block` (the drafts were drawn from `draft_probs`).
        tokens: [B, N] int64, contiguous; node 0 is the last committed token.
        tree: TreeLinks of the same B and N. Its positions key the draws: those of `target_only` at the node's position,
            those of the other rules at the root's, with one slot a node for the coins.
        logits: [B, N, V] float32, float16 or bfloat16, row n predicts the token after node n. Vocabulary of stride 1,
            [B, N] mergeable into one strided dimension, so a padded vocabulary may be sliced. None with `probs`.
        lengths: [B] int64, committed tokens.
        max_depth: D >= 0, the greatest number of drafts to accept.
        temperature: [B] float32 or None; rows at 0, and all rows for None, take the argmax. Not with `greedy`. With
            `probs` it only tells which rows are greedy, and None is none of them.
        seeds: [B] int64; needed to draw unless `uniforms` is given.
        uniforms: replaces the generator (tests of the exact law), float32 in [0, 1). `target_only`: [B, N], one a node.
            `rejection` and `block`: [B, N + 1], the coins of the nodes 1..N-1, then the uniform of the token in place
            of a rejected draft, then that of the bonus behind a wholly accepted chain.
        top_k: [B] int32 or None, as in `pick_tokens`; not with `probs`.
        top_p: [B] float32 or None, as in `pick_tokens`; not with `probs`.
        min_p: [B] float32 or None, as in `pick_tokens`; not with `probs`.
        probs: [B, N, V] float32 target laws instead of logits, laid out as these; rows need not sum to 1, NaN and
            negative entries count as 0.
        draft_probs: [B, N - 1, V] float32, contiguous: row n is the law that node n + 1 was drawn from. NaN and
            negative entries count as 0. Needed by `rejection` and `block`, refused otherwise. A drafter must not draw
            twice with one key: under `block` drafts behind the accepted ones influence the outcome, so a key used again
            in the next step would couple them. Drawing with position L * (D + 1) + depth in DRAFT_STREAM is safe.
        return_logprobs: fill `logprobs` (a second sum of exponentials where the temperature is neither 0 nor 1).
        impl: `auto`, `triton` or `reference`.

    Returns:
        Accepted: tokens [B, D+1] int64, num_accepted [B] int32, nodes [B, D+1] int32, bonus [B] int64, new_lengths [B]
        int64, valid [B] bool, logprobs [B, D+1] float32 (log softmax(logits) at temperature 1, unfiltered, of `tokens`;
        -inf for the token 0 of a row without a usable logit) or None.

    Raises:
        ValueError: unknown rule, arguments that the rule does not take or misses, wrong shape, dtype, strides or
            devices.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    values = _target_values(logits, probs)
    filters = Filters(top_k, top_p, min_p)
    _check_links(tokens, tree, lengths, max_depth)
    _check_rule(rule, temperature, uniforms, filters, logits is None, draft_probs)
    batch, num_nodes = tokens.shape
    _check_values("logits" if probs is None else "probs", values, batch, num_nodes)
    if probs is not None and temperature is None and rule != "greedy":
        temperature = torch.ones(batch, device=tokens.device)
    uniforms_shape = (batch, num_nodes + 1) if rule in CHAIN_RULES else (batch, num_nodes)
    check_sources(batch, (batch, num_nodes), temperature, seeds, tree.positions, uniforms, uniforms_shape)
    check_filters(batch, filters)
    if draft_probs is not None:
        expect_shape("draft_probs", draft_probs, (batch, num_nodes - 1, values.shape[-1]))
        expect_dtype("draft_probs", draft_probs, torch.float32)
        expect_contiguous(draft_probs=draft_probs)
    expect_same_device(
        tokens=tokens, logits=logits, probs=probs, draft_probs=draft_probs, lengths=lengths, temperature=temperature,
        seeds=seeds, uniforms=uniforms, **filters._asdict(), **tree._asdict(),
    )  # fmt: skip
    arguments: dict[str, Any] = dict(
        temperature=temperature, seeds=seeds, uniforms=uniforms, filters=filters, draft_probs=draft_probs,
        probabilities=probs is not None, return_logprobs=return_logprobs,
    )  # fmt: skip
    if use_triton(impl, values):
        import specdec_kernels.verify.kernel as kernel

        return kernel.accept(rule, tokens, tree, values, lengths, max_depth, **arguments)
    return reference.accept(rule, tokens, tree, values, lengths, max_depth, **arguments)


def accept_targets(
    tokens: torch.Tensor,
    tree: TreeLinks,
    targets: torch.Tensor,
    lengths: torch.Tensor,
    max_depth: int,
    *,
    impl: str = "auto",
) -> Accepted:
    """The walk of `greedy` and `target_only` along target tokens that are already known.

    Args:
        tokens: [B, N] int64, contiguous; node 0 is the last committed token.
        tree: TreeLinks of the same B and N.
        targets: [B, N] int64, contiguous: the target's token after each node; below 0 there is none, the walk stops
            there with bonus 0 and `valid` False.
        lengths: [B] int64, committed tokens.
        max_depth: D >= 0, the greatest number of drafts to accept.
        impl: `auto`, `triton` or `reference`.

    Returns:
        Accepted without log-probabilities.

    Raises:
        ValueError: wrong shape, dtype, strides or devices.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    _check_links(tokens, tree, lengths, max_depth)
    expect_shape("targets", targets, tuple(tokens.shape))
    expect_dtype("targets", targets, torch.int64)
    expect_contiguous(targets=targets)
    expect_same_device(tokens=tokens, targets=targets, lengths=lengths, **tree._asdict())
    if use_triton(impl, tokens):
        import specdec_kernels.verify.kernel as kernel

        return kernel.accept_targets(tokens, tree, targets, lengths, max_depth)
    return reference.accept_targets(tokens, tree, targets, lengths, max_depth)


def _target_values(logits: torch.Tensor | None, probs: torch.Tensor | None) -> torch.Tensor:
    """The one of both that is given."""
    if logits is None and probs is not None:
        return probs
    if logits is not None and probs is None:
        return logits
    raise ValueError(f"expected either logits or probs, got {'neither' if logits is None else 'both'}")


def _check_rule(
    rule: str,
    temperature: torch.Tensor | None,
    uniforms: torch.Tensor | None,
    filters: Filters,
    from_probs: bool,
    draft_probs: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the rule takes these arguments."""
    if rule not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
    if rule == "greedy" and (temperature is not None or uniforms is not None):
        raise ValueError("rule 'greedy' draws nothing: expected no temperature and no uniforms, use 'target_only'")
    if rule in CHAIN_RULES and draft_probs is None:
        raise ValueError(
            f"rule {rule!r}: expected draft_probs, got None; 'target_only' is for drafts that are not drawn"
        )
    if rule not in CHAIN_RULES and draft_probs is not None:
        raise ValueError(f"rule {rule!r} ignores the draft's law: expected no draft_probs, use 'rejection' or 'block'")
    if from_probs and not filters.off:
        raise ValueError("probs are taken as they are: expected no top_k, top_p or min_p with them")


def _check_values(name: str, values: torch.Tensor, batch: int, num_nodes: int) -> None:
    expect_shape(name, values, (batch, num_nodes, None))
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if name == "logits" else (torch.float32,)
    expect_dtype(name, values, *dtypes)
    expect_row_layout(name, values)
    if batch > 1 and num_nodes > 1 and values.stride(0) != num_nodes * values.stride(1):
        raise ValueError(f"{name}: expected [B, N] to merge into one dimension, got strides {values.stride()}")


def _check_links(tokens: torch.Tensor, tree: TreeLinks, lengths: torch.Tensor, max_depth: int) -> None:
    if max_depth < 0:
        raise ValueError(f"max_depth: expected at least 0, got {max_depth}")
    expect_shape("tokens", tokens, (None, None))
    batch, num_nodes = tokens.shape
    if num_nodes < 1:
        raise ValueError(f"tokens: expected at least one node (the root), got {list(tokens.shape)}")
    expect_shape("lengths", lengths, (batch,))
    expect_dtype("tokens", tokens, torch.int64)
    expect_dtype("lengths", lengths, torch.int64)
    for name in ("first_child", "next_sibling"):
        links = getattr(tree, name)
        expect_shape(f"tree.{name}", links, (batch, num_nodes))
        expect_dtype(f"tree.{name}", links, torch.int32)
        expect_contiguous(**{f"tree.{name}": links})
    expect_contiguous(tokens=tokens, lengths=lengths)
