"""How much each draft of a block counts.

A draft helps only if all drafts before it are right. So the k-th of a block, k = 1 … K, weighs w_k, and the loss of a
batch is sum w_k CE_k / sum w_k over all drafts that have a label:

* `decay`: w_k = exp(-(k - 1) / gamma), as DFlash is published (arXiv 2602.06036);
* `confidence`: D-PACE (arXiv 2605.18810, equations 7 and 8). With q_k = exp(-CE_k), the drafter's own probability of
  the label, and q~_k = (1 - alpha) q_k + alpha,

      w_k = sum over m >= k of the product of q~_1 … q~_m,

  the share of the smoothed expected length that passes through draft k. No gradient flows through weights. Here the
  weighted mean is over the batch, as for `decay`, so learning rates mean the same for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100
WEIGHTINGS = ("decay", "confidence")


def decay_weights(block_size: int, gamma: float, device: torch.device | str | None = None) -> Tensor:
    """exp(-(k - 1) / gamma) for k = 1 … block_size - 1."""
    return torch.exp(-torch.arange(block_size - 1, device=device) / gamma)


def confidence_weights(losses: Tensor, labelled: Tensor, alpha: float) -> Tensor:
    """D-PACE weights `[..., K]` from the cross entropies `losses [..., K]`; zero where not `labelled`, which a block is
    up to the end of its text."""
    smoothed = torch.where(labelled, (1 - alpha) * torch.exp(-losses.detach()) + alpha, 0.0)
    reached = smoothed.cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """sum w CE / sum w; zero where nothing has a weight."""
    return (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
