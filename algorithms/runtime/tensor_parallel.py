"""Keeps the processes of a tensor-parallel run in step.

Every rank runs the same loop over the same requests. Its logits come from the same all-reduced sums, but equal bits on
every device are not guaranteed, and after one different token the caches would no longer match. So rank 0 decides: its
draft and its acceptance are broadcast, and the other ranks use them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from algorithms.runtime.algorithm import DraftTree
from specdec_kernels import Accepted, TreeLinks


def parallel() -> bool:
    """Whether this process is one of several that share a target."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def own_share(tensor: Tensor, dim: int) -> Tensor:
    """This rank's part of `tensor`, which the ranks share out evenly along `dim`."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()] if parallel() else tensor


def agree_on_draft(draft: DraftTree) -> DraftTree:
    """Rank 0's draft, on every rank."""
    if not parallel():
        return draft
    probs = None if draft.draft_probs is None else _from_rank_0(draft.draft_probs)
    return DraftTree(_from_rank_0(draft.tokens), TreeLinks(*map(_from_rank_0, draft.links)), probs)


def agree_on_acceptance(accepted: Accepted) -> Accepted:
    """Rank 0's acceptance, on every rank."""
    if not parallel():
        return accepted
    return Accepted(*(None if tensor is None else _from_rank_0(tensor) for tensor in accepted))  # type: ignore[arg-type]


def _from_rank_0(tensor: Tensor) -> Tensor:
    own = tensor.contiguous()
    # Not every transport knows bool.
    dist.broadcast(own.view(torch.uint8) if own.dtype == torch.bool else own, 0)
    return own
