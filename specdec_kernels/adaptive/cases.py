"""Named inputs of the choice of a size."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specdec_kernels.adaptive.types import SizeState
from specdec_kernels.cases import Maker, case_of


def choose_inputs(
    make: Maker,
    batch: int,
    sizes: tuple[int, ...],
    size: int,
    num_nodes: int | None = None,
    confident: bool = True,
    falling: bool = False,
    padding: bool = False,
    accept: str = "some",
    slope: float = 0.02,
    learnt: bool = True,
    levels: int = 1 << 10,
    last: int = 1,
    weight: int = 1,
) -> dict[str, Any]:
    """Steps of `sizes[size - 1]` nodes after others. `accept` says how many drafts are accepted: none, some or
    all. Confidence has `levels` values. `last` is the choice before, and `weight` that of the evidence so far."""
    nodes_drafted = num_nodes or sizes[size - 1]
    state = SizeState.create(sizes, make.device)
    if learnt:
        own = weight * make.integers(1, 9, len(sizes)).float()
        state.evidence.copy_(torch.stack([own * (1 + make.integers(0, 9, len(sizes)).float() / 8), own], 1))
        state.choice.fill_(last)
    confidence = make.integers(0, levels, batch, nodes_drafted).float() / levels
    confidence[:, 0] = 1.0
    if falling:
        confidence = confidence.sort(1, descending=True).values.contiguous()
    most = nodes_drafted - 1
    depth = min(most, 7)
    least = depth if accept == "all" else 0
    num_accepted = make.integers(least, 1 if accept == "none" else depth + 1, batch, dtype=torch.int32)
    order = torch.rand(batch, most, generator=make.generator).argsort(1)[:, :depth].to(make.device) + 1
    path = torch.cat([torch.zeros_like(order[:, :1]), order.sort(1).values], 1)
    nodes = torch.where(torch.arange(depth + 1, device=make.device) <= num_accepted[:, None], path, -1).int()
    active = torch.ones(batch, dtype=torch.int32, device=make.device)
    if padding:
        active[::3] = 0
    step_ms = 1.0 + slope * torch.tensor([0, *sizes], dtype=torch.float32, device=make.device)
    return dict(
        state=state,
        confidence=confidence if confident else None,
        nodes=nodes.contiguous(),
        num_accepted=num_accepted,
        active=active,
        step_ms=step_ms,
        size=size,
        num_nodes=nodes_drafted,
    )


_choose = partial(case_of, "choose_size", choose_inputs)
_POWERS = (2, 4, 8, 16)

CASES = (
    _choose("choose_empty_batch", "launch on an empty grid", batch=0, sizes=(2, 4), size=1),
    _choose("choose_padding_alone", "padding that counts", batch=1, sizes=(2, 4), size=2, padding=True),
    _choose("choose_one_size", "a band before the first", batch=2, sizes=(2,), size=1),
    _choose("choose_chain", "nodes of another band", batch=3, sizes=_POWERS, size=4, falling=True),
    _choose("choose_tree", "ranks of equal confidence", batch=5, sizes=(2, 4, 8, 16, 32), size=5),
    _choose("choose_ties", "two nodes of one rank", batch=4, sizes=_POWERS, size=4, levels=3),
    _choose("choose_small_step", "bands that were not drafted", batch=4, sizes=_POWERS, size=2),
    _choose("choose_fading", "old evidence that never fades", batch=4, sizes=_POWERS, size=1, weight=10),
    _choose("choose_more_nodes", "ranks beyond the size", batch=4, sizes=_POWERS, size=2, num_nodes=9),
    _choose("choose_lookup", "confidence that is not there", batch=6, sizes=_POWERS, size=4, confident=False),
    _choose("choose_padding", "padding that counts", batch=7, sizes=(2, 4, 5), size=3, padding=True),
    _choose("choose_never", "a draft that does not pay", batch=3, sizes=_POWERS, size=4, accept="none", slope=2.0),
    _choose("choose_trial", "evidence that outlives a trial", batch=3, sizes=_POWERS, size=3, accept="all", last=0),
    _choose("choose_first", "a last choice that is none", batch=2, sizes=_POWERS, size=4, learnt=False, accept="all"),
    _choose("choose_wide", "ranks over several blocks", batch=2, sizes=(2, 64, 255), size=3, num_nodes=256),
    _choose("choose_shipped", "registers", gate=True, batch=33, sizes=(2, 4, 8, 16, 32), size=5),
    _choose("choose_shipped_chain", "registers", gate=True, batch=1, sizes=_POWERS, size=4, confident=False),
    _choose("choose_shipped_wide", "registers", gate=True, batch=2, sizes=(2, 64, 256), size=3),
    _choose("choose_b1", "a step of one request", bench=True, batch=1, sizes=(2, 4, 8, 16, 32), size=5),
    _choose("choose_b32", "a step of 32 requests", bench=True, batch=32, sizes=(2, 4, 8, 16, 32), size=5),
)
