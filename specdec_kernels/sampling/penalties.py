"""Definition of the penalties inside a draft block, in plain torch."""

from __future__ import annotations

import torch


def apply_penalties(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_seen: torch.Tensor | None,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """See `specdec_kernels.sampling.apply_penalties`."""
    batch, num_nodes, vocab = logits.shape
    node = torch.arange(num_nodes, device=logits.device)
    on_path = ((mask[:, :, node // 64] >> (node % 64)) & 1).bool() & (node > 0)
    known = (tokens >= 0) & (tokens < vocab)
    drafted = torch.nn.functional.one_hot(tokens.clamp(0, vocab - 1), vocab) * known[..., None]
    counts = output_counts[:, None] + torch.einsum("bij,bjv->biv", on_path.double(), drafted.double())
    seen = counts > 0 if prompt_seen is None else (counts > 0) | prompt_seen[:, None]
    value = logits.double()
    factor = repetition.double()[:, None, None]
    value = torch.where(seen, torch.where(value > 0, value / factor, value * factor), value)
    value = value - frequency.double()[:, None, None] * counts - presence.double()[:, None, None] * (counts > 0)
    if bias is not None:
        value = value + bias.double()[:, None]
    logits.copy_(value)


def count_tokens(counts: torch.Tensor, tokens: torch.Tensor, num: torch.Tensor) -> None:
    """See `specdec_kernels.sampling.count_tokens`."""
    vocab = counts.shape[1]
    column = torch.arange(tokens.shape[1], device=tokens.device)
    counted = (column < num[:, None]) & (tokens >= 0) & (tokens < vocab)
    counts.scatter_add_(1, tokens.clamp(0, vocab - 1), counted.to(counts.dtype))
