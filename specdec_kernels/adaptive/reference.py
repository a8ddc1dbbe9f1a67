"""Definition of the choice of a size in plain torch."""

from __future__ import annotations

import torch

from specdec_kernels.adaptive.types import (
    LEAST_HALF_LIFE,
    NEARLY_EQUAL,
    PRIOR,
    ROW_HALF_LIFE,
    SLOWER,
    SizeState,
)


def choose_size(
    state: SizeState,
    confidence: torch.Tensor | None,
    nodes: torch.Tensor,
    num_accepted: torch.Tensor,
    active: torch.Tensor,
    step_ms: torch.Tensor,
    size: int,
    num_nodes: int,
) -> None:
    """See `specdec_kernels.choose_size`, which has checked the arguments."""
    live = active > 0
    rows = float(live.sum())
    if not rows:
        return
    expected, accepted = bands(state, confidence, nodes, num_accepted, num_nodes)
    sums = [(expected[live, band].sum(), accepted[live, band].sum()) for band in range(size)]
    half_life = LEAST_HALF_LIFE + ROW_HALF_LIFE / rows
    keep, keep_slowly = 2.0 ** (-1 / half_life), 2.0 ** (-1 / (SLOWER * half_life))
    rates = [1 / step_ms[0]]
    tokens, before = torch.ones((), device=nodes.device), torch.zeros((), device=nodes.device)
    for band, evidence in enumerate(state.evidence):
        if band < size:
            e, a = sums[band]
            evidence[0] = keep * evidence[0] + (a if confidence is None else e)
            evidence[1] = keep * evidence[1] + rows
            evidence[2] = keep_slowly * evidence[2] + a
            evidence[3] = keep_slowly * evidence[3] + e
            gain = evidence[0] / evidence[1]
            evidence[4] = keep_slowly * evidence[4] + (sums[band - 1][1] if band else 0)
            if confidence is not None:
                gain = gain * (evidence[2] + PRIOR) / (evidence[3] + PRIOR)
        else:
            gain = before * (evidence[2] + PRIOR) / (evidence[4] + PRIOR)
        gain = torch.minimum(gain, (state.sizes[band + 1] - state.sizes[band]).float())
        tokens, before = tokens + gain, gain
        rates.append(tokens / step_ms[band + 1])
    every = torch.stack(rates)
    state.choice[0] = _or_larger(int(every.argmax()), step_ms)
    state.choice[1] = _or_larger(1 + int(every[1:].argmax()), step_ms)


def _or_larger(size: int, step_ms: torch.Tensor) -> int:
    """The last index of nearly the same cost, where `size` drafts."""
    if size == 0:
        return 0
    cheap = step_ms <= step_ms[size] * NEARLY_EQUAL
    return max(size, int(cheap.nonzero().max()))


def bands(
    state: SizeState,
    confidence: torch.Tensor | None,
    nodes: torch.Tensor,
    num_accepted: torch.Tensor,
    num_nodes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S] float32 each: summed confidence (0 without it) and accepted drafts of each band."""
    batch, device = len(nodes), nodes.device
    number = torch.arange(num_nodes, device=device)
    scores = torch.zeros(batch, num_nodes, device=device) if confidence is None else confidence
    rank = torch.argsort(scores, dim=1, descending=True, stable=True).argsort(1)
    place = torch.arange(nodes.shape[1], device=device)
    drafts = (place > 0) & (place <= num_accepted[:, None])
    on_path = ((nodes[:, :, None] == number) & drafts[:, :, None]).any(1)
    band = (rank[:, :, None] >= state.sizes[:-1]) & (rank[:, :, None] < state.sizes[1:])
    return (band * scores[:, :, None]).sum(1), (band & on_path[:, :, None]).sum(1).float()
