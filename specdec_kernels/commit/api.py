"""Public functions of the family. All take contiguous tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels.checks import expect_fields, expect_shape, expect_tensors
from specdec_kernels.commit.types import CommitInputs, Committed
from specdec_kernels.launch import dispatch


def commit_step(
    draft_tokens: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    tokens: Tensor,
    num_accepted: Tensor,
    nodes: Tensor,
    valid: Tensor,
    logprobs: Tensor | None,
    *,
    active: Tensor,
    lengths: Tensor,
    last_tokens: Tensor,
    history: Tensor,
    impl: str = "auto",
) -> Committed:
    """Enter the outcome of a speculative step into the state of B requests, in one launch.

    The tokens that request b emits, its accepted drafts and the bonus token, are appended to its history, `lengths[b]`
    grows by their number, and the bonus token becomes the last token. Requests with `active[b]` 0 keep their state.

    Args:
        draft_tokens: [B, N] int64: tokens of the draft tree, node 0 is the last token.
        first_child, next_sibling: [B, N] int32: the fields of `TreeLinks`, for the table.
        tokens, num_accepted, nodes, valid, logprobs: the fields of `Accepted`; without `logprobs` the table has zeros.
        active: [B] int32: 1, or 0 for a padding slot.
        lengths, last_tokens: [B] int64, committed tokens and the token at that position; written in place.
        history: [B, C] int64, tokens by position; written in place. Positions from C on are dropped.
    """
    inputs = CommitInputs(
        *(draft_tokens, first_child, next_sibling, tokens, num_accepted, nodes, valid, logprobs),
        *(active, lengths, last_tokens, history),
    )
    expect_fields(inputs)
    return dispatch("commit_step", __package__, impl, tokens)(inputs)


def gather_path(values: Sequence[Tensor], nodes: Tensor, *, impl: str = "auto") -> list[Tensor]:
    """Rows of the committed path out of tensors over all nodes, for example hidden states of the target layers.

    Args:
        values: tensors [B, N, W] of one shape and dtype.
        nodes: [B, P] int32; entries outside of [0, N) take node 0.

    Returns:
        One [B, P, W] for each tensor of `values`.
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


def keep_last(store: Tensor, values: Tensor, counts: Tensor, *, impl: str = "auto") -> None:
    """Keep the entry of each request's last committed position, in one launch.

    Args:
        store: [B, W]; row b becomes `values[b, counts[b] - 1]` where `counts[b]` is above 0.
        values: [B, P, W], dtype of `store`.
        counts: [B] int32, at most P.
    """
    expect_shape("store", store, (None, None))
    batch, width = store.shape
    expect_tensors(
        store=(store, (batch, width), store.dtype),
        values=(values, (batch, None, width), store.dtype),
        counts=(counts, (batch,), torch.int32),
    )
    dispatch("keep_last", __package__, impl, values)(store, values, counts)
