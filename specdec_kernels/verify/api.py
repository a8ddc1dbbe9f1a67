"""Acceptance: which drafted tokens are kept, and which token the target adds.

`greedy` keeps the path whose every token is the target's argmax (speculative decoding at temperature 0; for trees,
SpecInfer, arXiv 2305.09781). `target_only` first lets the target draw its own token at every node, with the same random
key that autoregressive sampling would use there, and then keeps the path that carries these tokens. At a node with
children of tokens S, the draw x falls in S with probability sum_{s in S} p(s) and then x continues the path; otherwise
x is the bonus token, and its distribution given the miss is p outside S, renormalised. The emitted sequence therefore
has exactly the target's distribution whenever the tree is a deterministic function of the context, and is
token-identical to autoregressive sampling with equal seeds.

A drafter that draws its tokens needs a rule that knows the distribution it drew from. All rules are exact for the
target's distribution under the same temperature and filters as `pick_tokens`; `reference` and `reference_tree` state
the formulas.

    rule                 drafts                     source            what it promises
    rejection            a chain                    arXiv 2211.17192  most accepted where tokens are judged one by one
    block                a chain                    arXiv 2403.10444  most accepted tokens of all rules for one chain
    multi_round          siblings drawn             arXiv 2305.09781  no fewer accepted than by one draft
                         independently
    k_seq                siblings drawn             arXiv 2310.15141  at a node, at least (1 - 1/e) of what any rule can
                         independently                                accept
    greedy_paths         siblings drawn             arXiv 2602.16961  block verification of one path, by the children
                         independently                                that the target prefers
    without_replacement  siblings drawn without     arXiv 2402.14160  no sibling is judged twice
                         replacement
    traversal            siblings drawn without     arXiv 2505.12398  block verification of every chain; a node may
                         replacement                                  still be accepted when all below it are rejected

`without_replacement` and `traversal` stay exact for independent draws, because they pass over equal siblings;
the other rules for trees are not exact for draws without replacement.
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_tensors
from specdec_kernels.launch import dispatch
from specdec_kernels.sampling.api import LOGITS, expect_randomness, expect_rows
from specdec_kernels.sampling.types import SamplingTensors
from specdec_kernels.tree import TreeLinks
from specdec_kernels.verify.types import CHAIN_RULES, DRAWN_RULES, RULES, TREE_RULES, Accepted

_GREEDY = SamplingTensors()


def accept(
    rule: str,
    tokens: torch.Tensor,
    tree: TreeLinks,
    logits: torch.Tensor | None,
    lengths: torch.Tensor,
    max_depth: int,
    sampling: SamplingTensors = _GREEDY,
    *,
    uniforms: torch.Tensor | None = None,
    probs: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    draft_rows: torch.Tensor | None = None,
    return_logprobs: bool = True,
    impl: str = "auto",
) -> Accepted:
    """Keep the drafts that the target accepts, and add one token of its own.

    From a node the walk of `greedy` and `target_only` goes to the first child that carries the node's target token;
    where there is none, after `max_depth` drafts, or at a row without a usable logit, it stops and the node's target
    token is the bonus. Unlinked nodes and duplicates behind the first are never reached. `rejection` and `block` judge
    the nodes 1, 2, ... as long as first_child[n - 1] = n; the chain ends at the first that is not, at `max_depth`, and
    behind a row without a usable logit. The rules for trees judge the children of a node in the order of their links
    and go on from the first that is accepted; `traversal` and `greedy_paths` judge a node behind all that hang on it. A
    child whose token
    had no draft probability (left) is no draw: it is passed over, and so is a token that a rejected sibling carries
    under `without_replacement` and `traversal`. The links of drawn trees must lead to later nodes, as those of
    `build_tree` do; one that does not ends the walk. Rows at temperature 0 are greedy under every rule.

    Args:
        rule: `greedy` (target token = argmax), `target_only` (target token = exact draw at the request's temperature),
            `rejection` or `block` (a chain that was drawn from `draft_probs`), `multi_round`, `k_seq`,
            `greedy_paths`, `without_replacement` or `traversal` (a tree that was drawn from `draft_probs`). The shape
            of a drawn tree may depend on the committed text, not on the tokens drawn: a tree that is pruned by what was
            drawn no longer follows `draft_probs`.
        tokens: [B, N] int64, contiguous; node 0 is the last committed token.
        tree: TreeLinks of the same B and N. Its positions key the draws: those of `target_only` at the node's position,
            those of the other rules at the root's, with one slot per node for the uniforms that judge the drafts.
        logits: [B, N, V] float32, float16 or bfloat16, row n predicts the token after node n. Vocabulary of stride 1,
            [B, N] mergeable into one strided dimension, so a padded vocabulary may be sliced. None with `probs`.
        lengths: [B] int64, committed tokens.
        max_depth: D >= 0, the greatest number of drafts to accept.
        sampling: B entries. Rows at temperature 0 take the argmax; `greedy` takes no temperature. With `probs` there
            are no filters, the temperature only tells which rows are greedy, and None means that none is.
        uniforms: replaces the generator (tests of the exact distribution), float64 in [0, 1). `target_only`: [B, N],
            one per node. The rules for drawn drafts: [B, N + 1], those that judge the nodes 1..N-1, then the one of
            the token in place of rejected drafts, then that of the bonus where no draft was rejected.
        probs: [B, N, V] float32 target probabilities instead of logits, laid out as these; rows need not sum to 1, NaN
            and negative entries count as 0.
        draft_probs: [B, R, V] float32, contiguous: row n is the distribution that the children of node n were drawn
            from (of a chain: node n + 1), R = N - 1; or as `draft_rows` says. NaN and negative entries count as 0; the
            rules for trees normalise the rows, which are those before any removal and sum to at most 8. Needed by the
            rules for drawn drafts, refused otherwise. A drafter must not draw twice with one key: under `block` and
            `traversal` drafts behind the accepted ones influence the outcome, so a key used again in the next step
            would couple the two steps. Drawing with position L * (D + 1) + depth in DRAFT_STREAM is safe, and so is
            position L with one slot per node, as `draw_drafts` does.
        draft_rows: [B, N] int32, contiguous, for the rules for trees: the row of `draft_probs` that the children of
            each node were drawn from, outside 0 to R - 1 for a node without draws. One row may serve many nodes.
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
    _check_links(tokens, tree, lengths, max_depth)
    _check_rule(rule, sampling, uniforms, logits is None, draft_probs)
    if draft_rows is not None and rule not in TREE_RULES:
        raise ValueError(f"rule {rule!r}: expected no draft_rows, which are for {', '.join(TREE_RULES)}")
    batch, num_nodes = tokens.shape
    if probs is None:
        expect_rows("logits", values, (batch, num_nodes, None), *LOGITS)
    else:
        expect_rows("probs", values, (batch, num_nodes, None), torch.float32)
        if sampling.temperature is None and rule != "greedy":
            sampling = sampling._replace(temperature=torch.ones(batch, device=tokens.device))
    expect_tensors(
        {**tree._asdict(), "tokens": tokens, "lengths": lengths, "logits": logits, "probs": probs},
        **sampling.expected(batch),
        uniforms=(uniforms, (batch, num_nodes + 1 if rule in DRAWN_RULES else num_nodes), torch.float64),
        draft_probs=(
            draft_probs,
            (batch, num_nodes - 1 if draft_rows is None else None, values.shape[-1]),
            torch.float32,
        ),
        draft_rows=(draft_rows, (batch, num_nodes), torch.int32),
    )
    expect_randomness(sampling, tree.positions, uniforms)
    return dispatch("accept", __package__, impl, values)(
        rule, tokens, tree, values, lengths, max_depth, sampling, uniforms=uniforms, draft_probs=draft_probs,
        draft_rows=draft_rows, probabilities=probs is not None, return_logprobs=return_logprobs,
    )  # fmt: skip


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
        targets: [B, N] int64, contiguous: the target's token after each node, below 2^31; below 0 there is none, the
            walk stops there with bonus 0 and `valid` False.
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
    expect_tensors(
        {**tree._asdict(), "tokens": tokens, "lengths": lengths}, targets=(targets, tokens.shape, torch.int64)
    )
    walk = dispatch("accept_targets", __package__, impl, tokens)
    return walk(tokens, tree, targets, lengths, max_depth)


def _target_values(logits: torch.Tensor | None, probs: torch.Tensor | None) -> torch.Tensor:
    """The one of both that is given."""
    if logits is None and probs is not None:
        return probs
    if logits is not None and probs is None:
        return logits
    raise ValueError(f"expected either logits or probs, got {'neither' if logits is None else 'both'}")


def _check_rule(
    rule: str,
    sampling: SamplingTensors,
    uniforms: torch.Tensor | None,
    from_probs: bool,
    draft_probs: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the rule takes these arguments."""
    if rule not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
    if rule == "greedy" and (sampling.temperature is not None or uniforms is not None):
        raise ValueError("rule 'greedy' draws nothing: expected no temperature and no uniforms, use 'target_only'")
    if rule in DRAWN_RULES and draft_probs is None:
        raise ValueError(
            f"rule {rule!r}: expected draft_probs, got None; 'target_only' is for drafts that are not drawn"
        )
    if rule not in DRAWN_RULES and draft_probs is not None:
        raise ValueError(
            f"rule {rule!r} ignores the draft's distribution: expected no draft_probs, use one of "
            f"{', '.join(CHAIN_RULES)} for a chain and of {', '.join(TREE_RULES)} for a tree"
        )
    if from_probs and sampling.filtered:
        raise ValueError("probs are taken as they are: expected no top_k, top_p or min_p with them")


def _check_links(tokens: torch.Tensor, tree: TreeLinks, lengths: torch.Tensor, max_depth: int) -> None:
    if max_depth < 0:
        raise ValueError(f"max_depth: expected at least 0, got {max_depth}")
    expect_tensors(tokens=(tokens, (None, None), torch.int64))
    batch, num_nodes = tokens.shape
    if num_nodes < 1:
        raise ValueError(f"tokens: expected at least one node (the root), got {list(tokens.shape)}")
    links = {name: getattr(tree, name) for name in ("first_child", "next_sibling")}
    expect_tensors(
        {"tokens": tokens},
        lengths=(lengths, (batch,), torch.int64),
        **{f"tree.{name}": (link, (batch, num_nodes), torch.int32) for name, link in links.items()},
    )
