"""Verification: which drafted tokens are kept, and which token the target adds.

`greedy` keeps the path whose every token is the target's argmax (SpecInfer, arXiv 2305.09781). `target_only` samples
the target's own token at every node, with the random key that autoregressive sampling would use there, and keeps the
path that carries these tokens: with drafts that are a deterministic function of the context, the output equals
autoregressive sampling with equal seeds, token by token.

A drafter that samples its tokens needs a rule that knows the distribution it sampled from. All rules are exact for the
target's distribution; `reference` and `reference_tree` state the formulas.

    rejection            a chain                                arXiv 2211.17192
    block                a chain; accepts most of all rules     arXiv 2403.10444
    multi_round          siblings sampled independently         arXiv 2305.09781
    k_seq                siblings sampled independently         arXiv 2310.15141
    greedy_paths         siblings sampled independently         arXiv 2602.16961
    without_replacement  siblings sampled without replacement   arXiv 2402.14160
    traversal            siblings sampled without replacement   arXiv 2505.12398

`without_replacement` and `traversal` are also exact for independent samples, because they pass over equal siblings;
the other rules for trees are not exact for samples without replacement.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.checks import expect_at_least, expect_choice, expect_fields, expect_tensors
from specdec_kernels.launch import dispatch
from specdec_kernels.sampling.api import LOGITS, expect_randomness, expect_rows
from specdec_kernels.sampling.types import SamplingTensors
from specdec_kernels.tree import TreeLinks
from specdec_kernels.verify.types import CHAIN_RULES, RULES, SAMPLED_RULES, TREE_RULES, Accepted, Verification

_GREEDY = SamplingTensors()


def accept(
    rule: str,
    tokens: Tensor,
    tree: TreeLinks,
    logits: Tensor | None,
    lengths: Tensor,
    max_depth: int,
    sampling: SamplingTensors = _GREEDY,
    *,
    uniforms: Tensor | None = None,
    probs: Tensor | None = None,
    draft_probs: Tensor | None = None,
    draft_rows: Tensor | None = None,
    return_logprobs: bool = True,
    impl: str = "auto",
) -> Accepted:
    """Keep the drafts that the target accepts, and add one token of its own.

    `rejection` and `block` judge nodes 1, 2, ... while first_child[n - 1] = n; the other rules judge children in the
    order of their links. A child without draft probability is passed over. The path ends at a row without a usable
    logit. Rows at temperature 0 are greedy under every rule.

    Args:
        rule: one of `RULES`. The shape of a sampled tree may not depend on the sampled tokens.
        tokens: [B, N] int64; node 0 is the last committed token. All tensors but `logits` are contiguous.
        tree: links of the same B and N; its positions key the uniforms.
        logits: [B, N, V] float32, float16 or bfloat16, rows as of `expect_rows`; None with `probs`.
        lengths: [B] int64, committed tokens.
        max_depth: the most drafts to accept.
        sampling: B entries; no temperature under `greedy`, no filters with `probs`.
        uniforms: float64 in [0, 1), replaces the generator: [B, N] under `target_only`, one per node; else [B, N + 1]:
            of the nodes 1..N-1, of the token that replaces a draft, of the bonus.
        probs: [B, N, V] float32 target probabilities instead of logits; NaN and negative entries count as 0.
        draft_probs: [B, R, V] float32, what the drafts were sampled from; a row sums to at most 8.
        draft_rows: [B, N] int32, for trees: the row of `draft_probs` that each node's children were sampled from,
            outside 0 to R - 1 for none. Without it row n belongs to node n, and R = N - 1.
        return_logprobs: fill `logprobs`: log softmax(logits) at temperature 1, unfiltered.
    """
    values = logits if probs is None else probs
    if values is None or (logits is not None and probs is not None):
        raise ValueError(f"expected either logits or probs, got {'neither' if values is None else 'both'}")
    call = Verification(
        rule, tokens, tree, values, lengths, max_depth, sampling, uniforms, draft_probs, draft_rows, probs is not None,
        return_logprobs,
    )  # fmt: skip
    _check_links(tokens, tree, lengths, max_depth)
    _check_rule(call)
    if probs is not None and sampling.temperature is None and rule != "greedy":
        call = call._replace(sampling=sampling._replace(temperature=torch.ones(len(tokens), device=tokens.device)))
    _check_tensors(call)
    return dispatch("accept", __package__, impl, values)(call)


def accept_targets(
    tokens: Tensor, tree: TreeLinks, targets: Tensor, lengths: Tensor, max_depth: int, *, impl: str = "auto"
) -> Accepted:
    """`accept` under `greedy` or `target_only` where the target's tokens are known; without log-probabilities.

    Arguments are those of `accept`; `targets` [B, N] int64 are the target's tokens after each node, below 2^31. Where
    one is below 0 the path ends with bonus 0 and `valid` False.
    """
    _check_links(tokens, tree, lengths, max_depth)
    expect_tensors(
        {**tree._asdict(), "tokens": tokens, "lengths": lengths}, targets=(targets, tokens.shape, torch.int64)
    )
    return dispatch("accept_targets", __package__, impl, tokens)(tokens, tree, targets, lengths, max_depth)


def _check_links(tokens: Tensor, tree: TreeLinks, lengths: Tensor, max_depth: int) -> None:
    expect_at_least("max_depth", max_depth, 0)
    expect_tensors(tokens=(tokens, (None, None), torch.int64))
    batch, num_nodes = tokens.shape
    expect_at_least("N of tokens", num_nodes, 1)
    expect_tensors(
        {"tokens": tokens},
        lengths=(lengths, (batch,), torch.int64),
        **{
            f"tree.{name}": (getattr(tree, name), (batch, num_nodes), torch.int32)
            for name in ("first_child", "next_sibling")
        },
    )


def _check_rule(call: Verification) -> None:
    """Raise ValueError unless the rule takes these arguments."""
    rule, sampling = call.rule, call.sampling
    expect_choice("rule", rule, RULES)
    if rule == "greedy" and (sampling.temperature is not None or call.uniforms is not None):
        raise ValueError("rule 'greedy' samples nothing: expected no temperature and no uniforms, use 'target_only'")
    if rule in SAMPLED_RULES and call.draft_probs is None:
        raise ValueError(
            f"rule {rule!r}: expected draft_probs, got None; 'target_only' is for drafts that are not sampled"
        )
    if rule not in SAMPLED_RULES and call.draft_probs is not None:
        raise ValueError(
            f"rule {rule!r} ignores the draft's distribution: expected no draft_probs, use one of "
            f"{', '.join(CHAIN_RULES)} for a chain and of {', '.join(TREE_RULES)} for a tree"
        )
    if call.draft_rows is not None and rule not in TREE_RULES:
        raise ValueError(f"rule {rule!r}: expected no draft_rows, which are for {', '.join(TREE_RULES)}")
    if call.probabilities and sampling.filtered:
        raise ValueError("probs are taken as they are: expected no top_k, top_p or min_p with them")


def _check_tensors(call: Verification) -> None:
    """Raise ValueError unless the tensors have their shapes and rows can be sampled."""
    (batch, num_nodes), values, tree = call.tokens.shape, call.values, call.tree
    name, dtypes = ("probs", (torch.float32,)) if call.probabilities else ("logits", LOGITS)
    expect_rows(name, values, (batch, num_nodes, None), *dtypes)
    others, rows = {**tree._asdict(), name: values}, {} if call.draft_rows is not None else dict(R=num_nodes - 1)
    expect_fields(call.sampling, others=others, B=batch)
    expect_fields(call, (), others, U=num_nodes + (call.rule in SAMPLED_RULES), V=values.shape[-1], **rows)
    if call.sampling.temperature is not None:
        expect_randomness(call.sampling.seeds, tree.positions, call.uniforms)
