"""Keeps the processes of a tensor-parallel run in step.

Every rank runs the same loop over the same requests. Its logits come from the same all-reduced sums, but equal bits on
every device are not guaranteed, and after one different token the caches would no longer match. So rank 0 decides: its
draft and its acceptance are broadcast, and the other ranks use them. Greedy tokens that all ranks have chosen together
are equal on all of them already, see `Decoder.argmax`.
"""

import torch.distributed as dist
from torch import Tensor

from algorithms.algorithm import DraftTree
from algorithms.parallel.collectives import from_rank_0, parallel
from specdec_kernels import Accepted, TreeLinks


def own_share(tensor: Tensor, dim: int) -> Tensor:
    """This rank's part of `tensor`, which the ranks share out evenly along `dim`."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()] if parallel() else tensor


def agree_on_draft(draft: DraftTree) -> DraftTree:
    """Rank 0's draft, on every rank. A draft of node 0 alone is what all ranks have agreed on before."""
    if not parallel() or draft.tokens.shape[1] == 1:
        return draft
    others = {name: getattr(draft, name) for name in ("draft_probs", "draft_rows", "path_probs")}
    given = {name: tensor for name, tensor in others.items() if tensor is not None}
    tokens, *rest = from_rank_0([draft.tokens, *draft.links, *given.values()])
    links, agreed = TreeLinks(*rest[: len(draft.links)]), rest[len(draft.links) :]
    return DraftTree(tokens, links, **dict(zip(given, agreed, strict=True)))


def agree_on_acceptance(accepted: Accepted) -> Accepted:
    """Rank 0's acceptance, on every rank."""
    if not parallel():
        return accepted
    agreed = iter(from_rank_0([tensor for tensor in accepted if tensor is not None]))
    return Accepted(*(None if tensor is None else next(agreed) for tensor in accepted))  # type: ignore[arg-type]
