"""Public functions of the family: arguments are checked here, once for both implementations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_kernels.checks import expect_shape, expect_tensors
from specdec_kernels.commit.types import Committed
from specdec_kernels.launch import dispatch


def commit_step(
    draft_tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
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
        draft_tokens: [B, N] int64: tokens of the draft tree, node 0 is the last token. All tensors are contiguous.
        first_child, next_sibling: [B, N] int32: the fields of `TreeLinks`, which the table alone has use for.
        tokens, num_accepted, nodes, valid, logprobs: the fields of `Accepted`. Of the last two the table alone has use;
            `logprobs` None leaves zeros there.
        active: [B] int32: 1, or 0 for a padding row.
        lengths: [B] int64, committed tokens; written in place.
        last_tokens: [B] int64, the token at position `lengths[b]`; written in place.
        history: [B, C] int64, tokens by position; written in place. Positions from C on are dropped.
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
    expect_tensors(
        draft_tokens=(draft_tokens, (batch, None), torch.int64),
        first_child=(first_child, tuple(draft_tokens.shape), torch.int32),
        next_sibling=(next_sibling, tuple(draft_tokens.shape), torch.int32),
        tokens=(tokens, (batch, path), torch.int64),
        num_accepted=(num_accepted, (batch,), torch.int32),
        nodes=(nodes, (batch, path), torch.int32),
        valid=(valid, (batch,), torch.bool),
        logprobs=(logprobs, (batch, path), torch.float32),
        active=(active, (batch,), torch.int32),
        lengths=(lengths, (batch,), torch.int64),
        last_tokens=(last_tokens, (batch,), torch.int64),
        history=(history, (batch, None), torch.int64),
    )
    implementation = dispatch("commit_step", __package__, impl, tokens)
    drafted, accepted = (draft_tokens, first_child, next_sibling), (tokens, num_accepted, nodes, valid, logprobs)
    return implementation(*drafted, *accepted, active, lengths, last_tokens, history)


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
    expect_shape("values[0]", values[0], (None, None, None))
    batch, num_nodes, width = values[0].shape
    expect_tensors(
        nodes=(nodes, (batch, None), torch.int32),
        **{f"values[{i}]": (value, (batch, num_nodes, width), values[0].dtype) for i, value in enumerate(values)},
    )
    return dispatch("gather_path", __package__, impl, values[0])(values, nodes)


def keep_last(store: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, *, impl: str = "auto") -> None:
    """Keep the entry of each request's last committed position, in one launch.

    Args:
        store: [B, W], contiguous; row b becomes `values[b, counts[b] - 1]` where `counts[b]` is above 0.
        values: [B, P, W], contiguous, dtype of `store`.
        counts: [B] int32, at most P.
        impl: `auto`, `triton` or `reference`.

    Raises:
        ValueError: wrong shape, dtype, strides or devices.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("store", store, (None, None))
    batch, width = store.shape
    expect_tensors(
        store=(store, (batch, width), store.dtype),
        values=(values, (batch, None, width), store.dtype),
        counts=(counts, (batch,), torch.int32),
    )
    dispatch("keep_last", __package__, impl, values)(store, values, counts)
