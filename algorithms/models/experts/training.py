"""The experts of a layer as torch computes them in training: every expert runs over every row, and a row takes the
weighted sum of those it chose. No size depends on the routing, so a GPU never waits for the host."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels import Routed
from specdec_kernels.activation.reference import silu_mul


def masked_expert_mlp(x: Tensor, routed: Routed, gate_up: Tensor, down: Tensor) -> Tensor:
    """[T, H]: `specdec_kernels.expert_mlp` of `x [T, H]` with the matrices `gate_up [E, 2 F, H]` and `down [E, H, F]`,
    through which gradients flow. Two products in all, the second of which adds the experts."""
    count, outer, _ = gate_up.shape
    shares = x.new_zeros(len(x), count + 1, dtype=routed.weights.dtype)
    shares = shares.scatter_add(1, routed.experts.long(), routed.weights)[:, :count]  # the last one is no expert
    hidden = silu_mul(F.linear(x, gate_up.flatten(0, 1)).unflatten(1, (count, outer)))
    return F.linear((hidden * shares[..., None]).flatten(1), down.transpose(0, 1).flatten(1)).to(x.dtype)


def imbalance(logits: Tensor, routed: Routed) -> Tensor:
    """E times the sum over experts of the share of rows' choices and the mean probability: 1 where all experts are
    chosen alike, E where one is (Switch Transformer, arXiv 2101.03961, equation 4). `logits [T, E]`."""
    experts = logits.shape[1]
    chosen = torch.zeros(experts, device=logits.device).index_add(
        0, routed.experts.flatten(), torch.ones(routed.experts.numel(), device=logits.device)
    )
    return experts * (chosen / routed.experts.numel()) @ logits.float().softmax(-1).mean(0)
