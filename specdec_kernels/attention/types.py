"""The work list of paged attention, and the host-side shape it was made for."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PlanShape(NamedTuple):
    """What a plan depends on besides the lengths. A call that would cut its work otherwise refuses the plan."""

    batch: int
    num_nodes: int
    group: int
    num_slots: int
    all_slots: bool
    max_length: int
    window: int | None
    block_m: int
    split_tokens: int
    first_splits: int
    max_splits: int
    num_splits: int


class AttentionPlan(NamedTuple):
    """Device-side work list, made once a step by `plan_attention` and used by every layer of the same shape.

    items: [capacity, 3] int32 rows (request, tile of query rows, split of the keys), the first `num_items` in
        use, the rest zero.
    offsets: [B + 1] int32 first partial result of each request; the last entry is their number.
    num_items: [1] int32.
    """

    items: torch.Tensor
    offsets: torch.Tensor
    num_items: torch.Tensor
    shape: PlanShape
