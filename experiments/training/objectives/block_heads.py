"""What the heads of block drafters make of the logits where the tokens before each draft are known.

In decoding a head reads one draft after another (`algorithms.dflash.heads`); here all drafts of a block are corrected
at once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.dflash.heads import GRUHead
from algorithms.dflash.model import DFlashDrafter
from experiments.training.corpus import IGNORED


def corrected(
    drafter: DFlashDrafter,
    logits: Tensor,
    hidden: Tensor,
    before: Tensor,
    labels: Tensor | None = None,
) -> Tensor:
    """`[..., K, V]`: the `logits` of K drafts after the head, from their slots' `hidden [..., K, hidden]` and the
    tokens `before [..., K]` each. A selector leaves -inf for all that are no candidates; `labels [..., K]` are."""
    if drafter.markov_head is not None:
        return logits + drafter.markov_head.bias(before, hidden)
    if drafter.gru_head is not None:
        return logits + _of_gru(drafter.gru_head, drafter.embed(before), hidden)
    if drafter.candidate_selector is not None:
        return _selected(drafter, logits, hidden, before, labels)
    return logits


def _of_gru(head: GRUHead, embedded: Tensor, hidden: Tensor) -> Tensor:
    """[..., K, V]: what Domino's head adds, zeros for the first drafts."""
    gru, rows = head.prefix_gru, embedded.flatten(0, -3).float()
    start = rows.new_zeros(1, len(rows), head.state_size)
    with torch.autocast(rows.device.type, enabled=False):
        states = torch.gru(rows, start, [gru.weight_ih_l0, gru.weight_hh_l0], False, 1, 0.0, True, False, True)[0]
    added = head.embed_proj(torch.cat([hidden, states.view(*hidden.shape[:-1], -1).to(hidden.dtype)], -1))
    plain = torch.arange(hidden.shape[-2], device=hidden.device) < head.num_plain
    return added.masked_fill(plain[:, None], 0.0)


def _selected(drafter: DFlashDrafter, logits: Tensor, hidden: Tensor, before: Tensor, labels: Tensor | None) -> Tensor:
    """[..., K, V]: the selector's scores; the label takes the place of the last candidate where it is none."""
    selector = drafter.candidate_selector
    assert selector is not None
    tokens = logits.topk(selector.num_candidates).indices
    if labels is not None:
        known = (tokens == labels[..., None]).any(-1) | (labels == IGNORED)
        tokens[..., -1] = torch.where(known, tokens[..., -1], labels)
    gates = selector.hidden_projection(hidden) * selector.predecessor_codebook[before]
    pairs = (F.embedding(tokens, selector.successor_codebook) * gates[..., None, :]).sum(-1)
    scores = drafter.cap(logits.gather(-1, tokens)).float() + pairs
    return torch.full_like(logits, float("-inf"), dtype=torch.float32).scatter(-1, tokens, scores)
