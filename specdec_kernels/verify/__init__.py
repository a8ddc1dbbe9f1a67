"""Which drafted tokens stay, and which token the target adds: one call for chains and trees.

`greedy` keeps the path whose every token is the target's argmax (speculative decoding at temperature 0; for
trees, SpecInfer, arXiv 2305.09781). `target_only` first lets the target draw its own token at every node,
with the same random key that autoregressive sampling would use there, and then keeps the path that carries
these tokens. At a node with children of tokens S, the draw x falls in S with probability sum_{s in S} p(s)
and then x continues the path; otherwise x is the bonus token and its law given the miss is p outside S,
renormalised. The emitted sequence therefore has exactly the target's law whenever the tree is a deterministic
function of the context, and is token-identical to autoregressive sampling with equal seeds. A drafter that
samples its tokens needs the rejection rule of arXiv 2211.17192 instead.
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import use_triton
from specdec_kernels.sampling import check_sources, expect_row_layout
from specdec_kernels.tree import TreeLinks
from specdec_kernels.verify import reference
from specdec_kernels.verify.types import RULES, Accepted

__all__ = ["RULES", "Accepted", "accept"]


def accept(
    rule: str,
    tokens: torch.Tensor,
    tree: TreeLinks,
    logits: torch.Tensor,
    lengths: torch.Tensor,
    max_depth: int,
    *,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    impl: str = "auto",
) -> Accepted:
    """Walk each tree from its root along the target's tokens.

    From a node the walk goes to the first child that carries the node's target token; where there is none,
    after `max_depth` drafts, or at a row without a usable logit, it stops and the node's target token is the
    bonus. Unlinked nodes and duplicates behind the first are never reached.

    Args:
        rule: `greedy` (target token = argmax) or `target_only` (target token = exact draw at the request's
            temperature).
        tokens: [B, N] int64, contiguous; node 0 is the last committed token.
        tree: TreeLinks of the same B and N; its positions key the draws.
        logits: [B, N, V] float32, float16 or bfloat16, row n predicts the token after node n. Vocabulary of
            stride 1, [B, N] mergeable into one strided dimension, so a padded vocabulary may be sliced.
        lengths: [B] int64, committed tokens.
        max_depth: D >= 0, the greatest number of drafts to accept.
        temperature: [B] float32 or None; rows at 0, and all rows for None, take the argmax. Not with
            `greedy`.
        seeds: [B] int64; needed with `temperature` unless `uniforms` is given.
        uniforms: [B, N] float32 in [0, 1), replaces the generator (tests of the exact law).
        impl: `auto`, `triton` or `reference`.

    Returns:
        Accepted: tokens [B, D+1] int64, num_accepted [B] int32, nodes [B, D+1] int32, bonus [B] int64,
        new_lengths [B] int64, valid [B] bool.

    Raises:
        ValueError: unknown rule, `greedy` with sampling arguments, wrong shape, dtype, strides or devices.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    _check(rule, tokens, tree, logits, lengths, max_depth)
    if rule == "greedy" and (temperature is not None or uniforms is not None):
        raise ValueError(
            "rule 'greedy' draws nothing: expected no temperature and no uniforms, use 'target_only'"
        )
    batch, num_nodes = tokens.shape
    check_sources(batch, (batch, num_nodes), temperature, seeds, tree.positions, uniforms)
    expect_same_device(
        tokens=tokens,
        logits=logits,
        lengths=lengths,
        temperature=temperature,
        seeds=seeds,
        uniforms=uniforms,
        **tree._asdict(),
    )
    sampling = {"temperature": temperature, "seeds": seeds, "uniforms": uniforms}
    if use_triton(impl, logits):
        import specdec_kernels.verify.kernel as kernel

        return kernel.accept(rule, tokens, tree, logits, lengths, max_depth, **sampling)
    return reference.accept(rule, tokens, tree, logits, lengths, max_depth, **sampling)


def _check(
    rule: str,
    tokens: torch.Tensor,
    tree: TreeLinks,
    logits: torch.Tensor,
    lengths: torch.Tensor,
    max_depth: int,
) -> None:
    if rule not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
    if max_depth < 0:
        raise ValueError(f"max_depth: expected at least 0, got {max_depth}")
    expect_shape("tokens", tokens, (None, None))
    batch, num_nodes = tokens.shape
    if num_nodes < 1:
        raise ValueError(f"tokens: expected at least one node (the root), got {list(tokens.shape)}")
    expect_shape("logits", logits, (batch, num_nodes, None))
    expect_shape("lengths", lengths, (batch,))
    expect_dtype("tokens", tokens, torch.int64)
    expect_dtype("lengths", lengths, torch.int64)
    expect_dtype("logits", logits, torch.float32, torch.float16, torch.bfloat16)
    expect_row_layout(logits)
    if batch > 1 and num_nodes > 1 and logits.stride(0) != num_nodes * logits.stride(1):
        raise ValueError(
            f"logits: expected [B, N] to merge into one dimension, got strides {logits.stride()}"
        )
    for name in ("first_child", "next_sibling"):
        links = getattr(tree, name)
        expect_shape(f"tree.{name}", links, (batch, num_nodes))
        expect_dtype(f"tree.{name}", links, torch.int32)
        expect_contiguous(**{f"tree.{name}": links})
    expect_contiguous(tokens=tokens, lengths=lengths)
