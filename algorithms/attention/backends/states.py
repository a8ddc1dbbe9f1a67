"""Attention over parts of the keys, merged by log-sum-exp.

    lse = log(e^lse_a + e^lse_b)        (natural logarithms)
    out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b

An attention sink of logit z is a part without a value: lse' = log(e^lse + e^z), out' = e^(lse - lse') out.
"""

import torch


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys: out [..., D] in out_a's dtype, lse [...] float32.

    A part without a visible key has lse -inf; its out is ignored, also where it is NaN.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    anchor = torch.where(lse == float("-inf"), 0.0, lse)
    parts = []
    for out, part in ((out_a, lse_a), (out_b, lse_b)):
        weighted = out.float() * torch.exp(part - anchor)[..., None]
        parts.append(weighted.masked_fill((part == float("-inf"))[..., None], 0.0))
    return (parts[0] + parts[1]).to(out_a.dtype), lse


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add to every row of out [..., H, D], lse [..., H] a sink of logit sinks[h] without a value."""
    grown = torch.logaddexp(lse, sinks.float())
    return (out.float() * torch.exp(lse - grown)[..., None]).to(out.dtype), grown
