"""Public functions of the family: arguments are checked here, once for both implementations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.commit.types import Committed
from specdec_kernels.launch import dispatch


def commit_step(
    draft_tokens: torch.Tensor,
    tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    nodes: torch.Tensor,
    valid: torch.Tensor,
    logprobs: torch.Tensor | None,
    *,
    active: torch.Tensor,
    lengths: torch.Tensor,
    last_tokens: torch.Tensor,
    history: torch.Tensor,
    impl: str = "auto",
) -> Committed:
    """Enter the outcome of a speculative step into the state of B requests, in one launch.

    The tokens that request b emits, its accepted drafts and the bonus token, are written to its history behind the last
    token, `lengths[b]` grows by their number, and the bonus token becomes the last token. Rows with `active[b]` 0 keep
    their state.

    Args:
        draft_tokens: [B, N] int64, contiguous: tokens of the draft tree, node 0 is the last token.
        tokens: [B, D + 1] int64, contiguous: accepted drafts, then the bonus token, -1 behind.
        num_accepted: [B] int32: accepted drafts, the bonus token excluded, 0 to D.
        nodes: [B, D + 1] int32, contiguous: the accepted path from node 0 on, -1 behind.
        valid: [B] bool, passed on to the table.
        logprobs: [B, D + 1] float32, contiguous, passed on to the table; None leaves zeros there.
        active: [B] int32: 1, or 0 for a padding row.
        lengths: [B] int64, committed tokens; written in place.
        last_tokens: [B] int64, the token at position `lengths[b]`; written in place.
        history: [B, C] int64, contiguous rows, tokens by position; written in place. Positions from C on are dropped.
        impl: `auto`, `triton` or `reference`.

    Returns:
        Committed: what the drafter may observe, and the table that the host reads.

    Raises:
        ValueError: wrong shape, dtype, strides or devices.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("draft_tokens", draft_tokens, (None, None))
    batch = draft_tokens.shape[0]
    expect_shape("tokens", tokens, (batch, None))
    path = tokens.shape[1]
    for name, tensor, shape, dtype in (
        ("draft_tokens", draft_tokens, (batch, None), torch.int64),
        ("tokens", tokens, (batch, path), torch.int64),
        ("num_accepted", num_accepted, (batch,), torch.int32),
        ("nodes", nodes, (batch, path), torch.int32),
        ("valid", valid, (batch,), torch.bool),
        ("active", active, (batch,), torch.int32),
        ("lengths", lengths, (batch,), torch.int64),
        ("last_tokens", last_tokens, (batch,), torch.int64),
        ("history", history, (batch, None), torch.int64),
        *([] if logprobs is None else [("logprobs", logprobs, (batch, path), torch.float32)]),
    ):
        expect_shape(name, tensor, shape)
        expect_dtype(name, tensor, dtype)
        expect_contiguous(**{name: tensor})
    expect_same_device(
        draft_tokens=draft_tokens, tokens=tokens, num_accepted=num_accepted, nodes=nodes, valid=valid,
        logprobs=logprobs, active=active, lengths=lengths, last_tokens=last_tokens, history=history,
    )  # fmt: skip
    implementation = dispatch("commit_step", __package__, impl, tokens)
    return implementation(
        draft_tokens, tokens, num_accepted, nodes, valid, logprobs, active, lengths, last_tokens, history
    )


def gather_path(values: Sequence[torch.Tensor], nodes: torch.Tensor, *, impl: str = "auto") -> list[torch.Tensor]:
    """Rows of the committed path out of tensors over all nodes, for example hidden states and captured features.

    Args:
        values: tensors [B, N, W] of one shape and dtype, each contiguous.
        nodes: [B, P] int32, contiguous; entries outside of [0, N) take node 0.
        impl: `auto`, `triton` or `reference`.

    Returns:
        One [B, P, W] for each tensor of `values`.

    Raises:
        ValueError: wrong shape, dtype, strides or devices.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    if not values:
        return []
    expect_shape("nodes", nodes, (values[0].shape[0], None))
    expect_dtype("nodes", nodes, torch.int32)
    expect_contiguous(nodes=nodes)
    for index, value in enumerate(values):
        expect_shape(f"values[{index}]", value, (nodes.shape[0], *values[0].shape[1:]))
        expect_dtype(f"values[{index}]", value, values[0].dtype)
        expect_contiguous(**{f"values[{index}]": value})
        expect_same_device(nodes=nodes, **{f"values[{index}]": value})
    return dispatch("gather_path", __package__, impl, values[0])(values, nodes)
