"""Definition of the rules that need the draft's own law, in plain torch and float64.

p_r is the target's law at row r of the chain, q_r the law that the draft of node r + 1 was drawn from, x_s the token of
node s, G the drafts that can be accepted at all: those linked in one chain, no deeper than `max_depth`, each judged by
a usable row.

rejection (arXiv 2211.17192): x_s is accepted while coin_s q_{s-1}(x_s) < p_{s-1}(x_s).
block (arXiv 2403.10444): P_0 = 1, P_s = min(P_{s-1} p_{s-1}(x_s) / q_{s-1}(x_s), 1);
    h_s = Z / (Z + 1 - P_s) with Z = sum_v max(P_s p_s(v) - q_s(v), 0), h_G = P_G; tau = the last s with coin_s < h_s.

With tau accepted drafts the next token is drawn from max(P_tau p_tau - q_tau, 0) (P = 1 under rejection), from p_tau
where that is zero everywhere, and from p_G behind a wholly accepted chain.
"""

from __future__ import annotations

import torch

from specdec_kernels.sampling import reference as sampling
from specdec_kernels.sampling.types import ACCEPT_STREAM, BONUS_STREAM, RECOVER_STREAM, Filters
from specdec_kernels.tree.types import TreeLinks
from specdec_kernels.verify.types import Accepted


def accept(
    rule: str,
    tokens: torch.Tensor,
    tree: TreeLinks,
    values: torch.Tensor,
    lengths: torch.Tensor,
    max_depth: int,
    *,
    temperature: torch.Tensor,
    seeds: torch.Tensor | None,
    uniforms: torch.Tensor | None,
    filters: Filters,
    draft_probs: torch.Tensor,
    probabilities: bool,
    return_logprobs: bool,
) -> Accepted:
    """See `specdec_kernels.verify.accept`."""
    batch, num_nodes, vocab = values.shape
    law = sampling.row_law(
        values.flatten(0, 1), temperature.repeat_interleave(num_nodes), filters.repeated(num_nodes), probabilities
    )
    target = torch.nan_to_num(law.weights / law.weights.sum(-1, keepdim=True)).view(batch, num_nodes, vocab)
    greedy, valid = law.greedy.view(batch, num_nodes), law.valid.view(batch, num_nodes)
    target = torch.where(valid[..., None], target, 0.0)
    # A row of zeros behind the last draft: nothing to take off the law of the bonus.
    draft = torch.nan_to_num(draft_probs.double()).clamp(min=0)
    draft = torch.cat([draft, torch.zeros_like(target[:, :1])], 1)
    coins, recover, bonus_uniform = _uniforms(seeds, uniforms, tree, num_nodes)
    reach = _reach(tree, valid, max_depth)

    drafted = tokens[:, 1:]
    known = (drafted >= 0) & (drafted < vocab)
    at = drafted.clamp(0, vocab - 1)[..., None]
    p = torch.where(known, target[:, :-1].gather(-1, at)[..., 0], 0.0)
    q = torch.where(known, draft[:, :-1].gather(-1, at)[..., 0], 0.0)
    step = torch.arange(1, num_nodes, device=tokens.device)
    in_reach = step <= reach[:, None]
    matches = (drafted == greedy[:, :-1]) & in_reach
    if rule == "rejection":
        kept = torch.ones(batch, num_nodes, dtype=torch.float64, device=tokens.device)
        tau = _leading((coins * q < p) & in_reach)
    else:
        kept = _block_ratios(p, q)
        tau = _block_length(kept, target, draft, coins, reach)
    tau = torch.where(temperature > 0, tau, _leading(matches))

    rows = torch.arange(batch, device=tokens.device)
    whole = tau == reach
    taken_off = torch.where(whole[:, None], 0.0, draft[rows, tau])
    scale = torch.where(whole, 1.0, kept[rows, tau])
    residual = (scale[:, None] * target[rows, tau] - taken_off).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target[rows, tau])
    drawn = sampling.inverse_cdf(residual, torch.where(whole, bonus_uniform, recover).float())
    bonus = torch.where(temperature > 0, drawn, greedy[rows, tau])
    bonus = torch.where(valid[rows, tau], bonus, 0)
    return _outcome(tokens, tau, bonus, valid[rows, tau], lengths, max_depth,
                    values if return_logprobs else None, probabilities)  # fmt: skip


def _uniforms(
    seeds: torch.Tensor | None, uniforms: torch.Tensor | None, tree: TreeLinks, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coins [B, N - 1], and the uniforms [B] of the token that recovers and of the bonus."""
    if uniforms is not None:
        exact = uniforms.double()
        return exact[:, : num_nodes - 1], exact[:, num_nodes - 1], exact[:, num_nodes]
    assert seeds is not None
    root = tree.positions[:, 0]
    slots = torch.arange(num_nodes - 1, device=root.device).expand(len(root), -1)
    coins = sampling.philox_uniform(
        seeds[:, None].expand_as(slots), root[:, None].expand_as(slots), ACCEPT_STREAM, slots
    )
    recover = sampling.philox_uniform(seeds, root, RECOVER_STREAM)
    return coins.double(), recover.double(), sampling.philox_uniform(seeds, root, BONUS_STREAM).double()


def _reach(tree: TreeLinks, valid: torch.Tensor, max_depth: int) -> torch.Tensor:
    """[B] int64: drafts that can be accepted, the leading ones that are linked, usable and not too deep."""
    node = torch.arange(1, valid.shape[1], device=valid.device)
    return _leading((tree.first_child[:, :-1] == node) & valid[:, :-1] & (node <= max_depth))


def _leading(flags: torch.Tensor) -> torch.Tensor:
    """[B] int64: how many of the first entries are all True."""
    return flags.long().cumprod(-1).sum(-1)


def _block_ratios(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """P_s of every node s, [B, N]."""
    ratio = torch.where(q > 0, p / q.clamp(min=1e-300), (p > 0).double())
    kept = [torch.ones_like(ratio[:, 0]) if ratio.shape[1] else ratio.new_ones(len(ratio))]
    for column in ratio.unbind(1):
        kept.append((kept[-1] * column).clamp(max=1))
    return torch.stack(kept, 1)


def _block_length(
    kept: torch.Tensor, target: torch.Tensor, draft: torch.Tensor, coins: torch.Tensor, reach: torch.Tensor
) -> torch.Tensor:
    """tau [B]: the longest block whose coin is below its h."""
    num_nodes = kept.shape[1]
    left = (kept[..., None] * target - draft).clamp(min=0).sum(-1)
    below = left + 1 - kept
    h = torch.where(below > 0, left / below.clamp(min=1e-300), 1.0)
    node = torch.arange(num_nodes, device=kept.device)
    h = torch.where(node == reach[:, None], kept, h)
    passes = (coins < h[:, 1:]) & (node[1:] <= reach[:, None])
    return torch.where(passes, node[1:], 0).amax(-1) if num_nodes > 1 else torch.zeros_like(reach)


def _outcome(
    tokens: torch.Tensor,
    tau: torch.Tensor,
    bonus: torch.Tensor,
    valid: torch.Tensor,
    lengths: torch.Tensor,
    max_depth: int,
    values: torch.Tensor | None,
    probabilities: bool,
) -> Accepted:
    """The accepted chain of `tau` [B] drafts and its bonus, with log-probabilities if `values` are given."""
    batch, num_nodes = tokens.shape
    column = torch.arange(max_depth + 1, device=tokens.device)
    following = (column + 1).clamp(max=num_nodes - 1)
    emitted = torch.where(column < tau[:, None], tokens[:, following], -1)
    emitted = torch.where(column == tau[:, None], bonus[:, None], emitted)
    nodes = torch.where(column <= tau[:, None], column, -1)
    logprobs = None
    if values is not None:
        rows = values[:, column.clamp(max=num_nodes - 1)].flatten(0, 1)
        logprobs = sampling.token_logprobs(rows, emitted.clamp(min=0).flatten(), probabilities)
        logprobs = torch.where(column <= tau[:, None], logprobs.view(batch, max_depth + 1), 0.0)
    return Accepted(emitted, tau.int(), nodes.int(), bonus, lengths + tau + 1, valid, logprobs)
