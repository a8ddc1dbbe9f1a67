"""The definition of the commit in plain torch. No function reads a value back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels.commit.types import CommitInputs, Committed


def commit_step(inputs: CommitInputs) -> Committed:
    draft_tokens, first_child, next_sibling, tokens, num_accepted, nodes, valid, logprobs = inputs[:8]
    active, lengths, last_tokens, history = inputs[8:]
    start, counts = lengths.clone(), (num_accepted + 1) * active
    column = torch.arange(tokens.shape[1], device=tokens.device)
    on_path = column < counts[:, None]
    path = torch.where(on_path, nodes, -1)
    bits = torch.zeros_like(tokens) if logprobs is None else logprobs.view(torch.int32).to(torch.int64)
    num_drafted = (first_child >= 0).sum(1) + (next_sibling >= 0).sum(1)
    end = nodes.gather(1, num_accepted[:, None].long()).clamp(min=0)
    ran_out = first_child.gather(1, end.long()).squeeze(1) < 0
    figures = torch.stack([num_accepted.long(), valid.long(), num_drafted, ran_out.long()], dim=1)
    committed = Committed(
        start=start,
        counts=counts,
        positions=start[:, None] + column,
        nodes=path,
        tokens=draft_tokens.gather(1, path.clamp(min=0).long()),
        next_tokens=tokens.clamp(min=0),
        table=torch.cat([tokens, bits, figures], dim=1),
    )
    place = torch.arange(history.shape[1], device=history.device) - start[:, None] - 1
    emitted = (place >= 0) & (place < counts[:, None])
    history.copy_(torch.where(emitted, tokens.gather(1, place.clamp(0, tokens.shape[1] - 1)), history))
    bonus = tokens.gather(1, num_accepted[:, None].long()).squeeze(1)
    last_tokens.copy_(torch.where(active > 0, bonus, last_tokens))
    lengths.add_(counts)
    return committed


def gather_path(values: Sequence[Tensor], nodes: Tensor) -> list[Tensor]:
    inside = torch.where((nodes >= 0) & (nodes < values[0].shape[1]), nodes, 0).long()
    return [value.gather(1, inside[..., None].expand(-1, -1, value.shape[-1])) for value in values]


def keep_last(store: Tensor, values: Tensor, counts: Tensor) -> None:
    index = (counts.long() - 1).clamp(min=0)[:, None, None].expand(-1, 1, values.shape[-1])
    store.copy_(torch.where((counts > 0)[:, None], values.gather(1, index).squeeze(1), store))
