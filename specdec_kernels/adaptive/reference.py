"""Definition of the choice of a size in plain torch."""

from __future__ import annotations

import torch

from specdec_kernels.adaptive.types import (
    CHAIN_WHOLE,
    KEEP_SMALLER,
    KEEP_STILL,
    LEAST_EVIDENCE,
    LEAST_GAIN,
    LEAST_HALF_LIFE,
    ROW_HALF_LIFE,
    TREE_EXTRA,
    TRIAL_HALF_LIFE,
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
    steps = steps_of_sizes(state, confidence, nodes, num_accepted, size, num_nodes)[live].sum(0)
    last = int(state.choice[0])
    half_life = LEAST_HALF_LIFE + ROW_HALF_LIFE / rows
    if last == 0:
        half_life = min(half_life, TRIAL_HALF_LIFE / rows)
    keep = 2.0 ** (-1 / half_life)
    above, gained = state.evidence[size:], _gain(state, size)
    above.copy_(torch.where(keep * above[:, 1:] > LEAST_EVIDENCE, keep * above, above))
    state.evidence[:size] = keep * state.evidence[:size] + torch.stack([steps[:-1], steps[1:]], 1)
    if last != 0:
        growth = (_gain(state, size) + LEAST_GAIN) / (gained + LEAST_GAIN)
        above[:, 0] = above[:, 1] + (above[:, 0] - above[:, 1]) * growth
    ratios = torch.cat([torch.ones_like(step_ms[:1]), state.evidence[:, 0] / state.evidence[:, 1]])
    rates = torch.minimum(ratios.cumprod(0), state.sizes.float()) / step_ms
    best = int(rates.argmax())
    if last >= 0 and rates[best] < rates[last] * (KEEP_SMALLER if best > last else KEEP_STILL):
        best = last
    state.choice[0] = best
    state.choice[1] = 1 + int(rates[1:].argmax())


def _gain(state: SizeState, size: int) -> torch.Tensor:
    """How many times more tokens a step of this size writes than one of the size before, less 1."""
    smaller, own = state.evidence[size - 1]
    return smaller / own - 1


def steps_of_sizes(
    state: SizeState,
    confidence: torch.Tensor | None,
    nodes: torch.Tensor,
    num_accepted: torch.Tensor,
    size: int,
    num_nodes: int,
) -> torch.Tensor:
    """[B, size + 1] float32: steps in which each size up to that of the step would have written its tokens."""
    batch, device = len(nodes), nodes.device
    number = torch.arange(num_nodes, device=device)
    scores = torch.zeros(batch, num_nodes, device=device) if confidence is None else confidence
    rank = torch.argsort(scores, dim=1, descending=True, stable=True).argsort(1)
    place = torch.arange(nodes.shape[1], device=device)
    drafts = (place > 0) & (place <= num_accepted[:, None])
    on_path = ((nodes[:, :, None] == number) & drafts[:, :, None]).any(1)
    within = rank[:, :, None] < state.sizes[: size + 1]
    tokens = 1 + (on_path[:, :, None] & within).sum(1).float()
    steps = tokens[:, -1:] / tokens
    if confidence is None:
        return steps + CHAIN_WHOLE * (steps.ceil() - steps)
    return torch.cat([steps[:, :1], 1 + TREE_EXTRA * (steps[:, 1:] - 1)], 1)
