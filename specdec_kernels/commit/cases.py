"""Named inputs of the commit."""

from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Maker, case_of


def _commit(
    make: Maker,
    batch: int,
    num_nodes: int,
    max_depth: int,
    capacity: int = 64,
    padding: bool = False,
    full: bool = False,
    logprobs: bool = True,
    room: int | None = None,
) -> dict[str, Any]:
    """Random paths and random links; `full` accepts all drafts, `padding` makes every third request inactive, `room` is
    what every history has left."""
    path = max_depth + 1
    num_accepted = make.integers(max_depth if full else 0, max_depth + 1, batch, dtype=torch.int32)
    column = torch.arange(path, device=make.device)
    on_path = column <= num_accepted[:, None]
    nodes = torch.rand(batch, num_nodes, generator=make.generator).argsort(1)[:, :path].sort(1).values.to(make.device)
    nodes = torch.where(on_path, nodes - nodes[:, :1], -1).to(torch.int32)
    lengths = make.integers(0, max(1, capacity - path - 1), batch)
    if room is not None:
        lengths = torch.full_like(lengths, capacity - room)
    active = torch.ones(batch, dtype=torch.int32, device=make.device)
    if padding:
        active[::3], lengths[::3] = 0, 0
    return dict(
        draft_tokens=make.integers(0, 1000, batch, num_nodes),
        first_child=make.integers(-num_nodes, num_nodes, batch, num_nodes, dtype=torch.int32).clamp(min=-1),
        next_sibling=make.integers(-3, 3, batch, num_nodes, dtype=torch.int32).clamp(min=-1, max=num_nodes - 1),
        tokens=torch.where(on_path, make.integers(0, 1000, batch, path), -1),
        num_accepted=num_accepted,
        nodes=nodes,
        valid=make.integers(0, 2, batch).bool(),
        logprobs=-make.normal(batch, path).float().abs() if logprobs else None,
        active=active,
        lengths=lengths,
        last_tokens=make.integers(0, 1000, batch),
        history=make.integers(0, 1000, batch, capacity),
    )


def _gather(make: Maker, batch: int, num_nodes: int, path: int, width: int, tensors: int = 1) -> dict[str, Any]:
    """Paths with entries after their end and one entry outside of the tree."""
    nodes = make.integers(-1, num_nodes, batch, path, dtype=torch.int32)
    nodes[-1, -1] = num_nodes
    return dict(values=[make.normal(batch, num_nodes, width) for _ in range(tensors)], nodes=nodes)


def _keep(make: Maker, batch: int, path: int, width: int) -> dict[str, Any]:
    counts = make.integers(0, path + 1, batch, dtype=torch.int32)
    return dict(store=make.normal(batch, width), values=make.normal(batch, path, width), counts=counts)


_keeps = partial(case_of, "keep_last", _keep)
_commits = partial(case_of, "commit_step", _commit)
_gathers = partial(case_of, "gather_path", _gather)

CASES = (
    _commits("commit_one_token", "no draft at all", batch=1, num_nodes=1, max_depth=0, gate=True),
    _commits("commit_chain", "a chain in position order", batch=5, num_nodes=4, max_depth=3),
    _commits("commit_tree", "a path shorter than the tree", batch=7, num_nodes=33, max_depth=6, gate=True),
    _commits("commit_padding", "state of padding slots", batch=8, num_nodes=16, max_depth=5, padding=True),
    _commits("commit_full", "all drafts accepted", batch=3, num_nodes=16, max_depth=15, full=True),
    _commits("commit_edge", "history that ends at the bonus token", batch=4, num_nodes=6, max_depth=5, capacity=7,
             full=True),
    _commits("commit_past_end", "a path that a history has no room for", batch=3, num_nodes=6, max_depth=5, capacity=9,
             full=True, room=3),
    _commits("commit_no_logprobs", "log-probabilities left out", batch=3, num_nodes=5, max_depth=4,
             logprobs=False, gate=True),
    _commits("commit_wide", "more nodes than a warp has lanes", batch=2, num_nodes=256, max_depth=255, capacity=600),
    _commits("commit_64x16", "a step of 64 requests", batch=64, num_nodes=16, max_depth=15, capacity=40_960,
             gate=True, bench=True, tags=("large",)),
    _keeps("keep_small", "requests that commit nothing", batch=7, path=3, width=9),
    _keeps("keep_8x7x4096", "the shipped size", batch=8, path=7, width=4096, gate=True, bench=True, tags=("large",)),
    _gathers("gather_small", "nodes outside of the tree", batch=3, num_nodes=5, path=4, width=7),
    _gathers("gather_features", "several tensors of odd width", batch=2, num_nodes=9, path=3, width=72, tensors=3),
    _gathers("gather_8x32x4096", "features of eight requests", batch=8, num_nodes=32, path=7, width=4096, tensors=4,
             gate=True, bench=True, tags=("large",)),
)  # fmt: skip


def _gather_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """(bytes, operations): each gathered row is read and written once."""
    values, nodes = inputs["values"], inputs["nodes"]
    return 2 * len(values) * nodes.numel() * values[0].shape[-1] * values[0].element_size(), 0


WORK = {"gather_path": _gather_work}
