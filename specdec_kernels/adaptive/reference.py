"""Definition of the choice of a size in plain torch."""

from __future__ import annotations

import torch

from specdec_kernels.adaptive.types import LEAST_HALF_LIFE, PRIOR, ROW_HALF_LIFE, SLOWER, SizeState


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
    best = (1 / step_ms[0], 0)
    best_drafting: tuple[torch.Tensor, int] | None = None
    tokens, before = torch.ones((), device=nodes.device), torch.zeros((), device=nodes.device)
    for band, evidence in enumerate(state.evidence):
        if band < size:
            e, a = sums[band]
            evidence[0] = keep * evidence[0] + (a if confidence is None else e)
            evidence[1] = keep * evidence[1] + rows
            evidence[2] = keep_slowly * evidence[2] + a
            evidence[3] = keep_slowly * evidence[3] + e
            gain = evidence[0] / evidence[1]
            if confidence is not None:
                gain = gain * (evidence[2] + PRIOR) / (evidence[3] + PRIOR)
            if band > 0 and before > 0:
                evidence[4] = gain / before
        else:
            gain = before * evidence[4]
        gain = torch.minimum(gain, (state.sizes[band + 1] - state.sizes[band]).float())
        tokens, before = tokens + gain, gain
        rate = tokens / step_ms[band + 1]
        best = (rate, band + 1) if rate > best[0] else best
        best_drafting = (rate, band + 1) if best_drafting is None or rate > best_drafting[0] else best_drafting
    assert best_drafting is not None
    state.choice[0], state.choice[1] = best[1], best_drafting[1]


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
