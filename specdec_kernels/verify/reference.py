"""Definition of acceptance in plain torch, the rejection rules in float64.

`rejection` and `block` in symbols: p_r is the target's distribution at row r of the chain, q_r the distribution that
the draft of node r + 1 was sampled from, x_s the token of node s, u_s the uniform that judges it, G the number of
drafts that can be accepted at all: those linked in one chain, no deeper than `max_depth`, each judged by a usable row.

rejection (arXiv 2211.17192): x_s is accepted while u_s q_{s-1}(x_s) < p_{s-1}(x_s).
block (arXiv 2403.10444): P_0 = 1, P_s = min(P_{s-1} p_{s-1}(x_s) / q_{s-1}(x_s), 1);
    h_s = Z / (Z + 1 - P_s) with Z = sum_v max(P_s p_s(v) - q_s(v), 0), h_G = P_G; tau = the last s with u_s < h_s.

With tau accepted drafts the next token is sampled from max(P_tau p_tau - q_tau, 0) (P = 1 under rejection), from p_tau
where that is zero everywhere, and from p_G after a wholly accepted chain.

The rules for sampled trees are in `reference_tree`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.sampling.reference import inverse_cdf, pick_tokens, token_logprobs
from specdec_kernels.tree.types import TreeLinks
from specdec_kernels.verify.reference_tree import accept_tree, draft_by_node, judging_uniforms, target_rows
from specdec_kernels.verify.types import CHAIN_RULES, Accepted, Verification


def accept(call: Verification) -> Accepted:
    tokens, tree, values, num_nodes = call.tokens, call.tree, call.values, call.tokens.shape[1]
    if call.samples_drafts:
        path, bonus, valid = (_judged_chain if call.rule in CHAIN_RULES else accept_tree)(call)
    else:
        uniforms = None if call.uniforms is None else call.uniforms.reshape(-1)
        picked = pick_tokens(
            values.flatten(0, 1), call.sampling.repeated(num_nodes), tree.positions.reshape(-1), uniforms,
            probabilities=call.probabilities,
        )  # fmt: skip
        targets, valid = picked.tokens.view(tokens.shape), picked.valid.view(tokens.shape)
        path, bonus, valid = _followed(tokens, tree, targets, valid, call.max_depth)
    accepted = _outcome(tokens, path, bonus, valid, call.lengths)
    if not call.return_logprobs:
        return accepted
    rows = values[torch.arange(len(tokens), device=tokens.device)[:, None], path.clamp(min=0)].flatten(0, 1)
    logprobs = token_logprobs(rows, accepted.tokens.clamp(min=0).flatten(), call.probabilities).view(path.shape)
    return accepted._replace(logprobs=torch.where(path >= 0, logprobs, 0.0))


def accept_targets(tokens: Tensor, tree: TreeLinks, targets: Tensor, lengths: Tensor, max_depth: int) -> Accepted:
    return _outcome(tokens, *_followed(tokens, tree, targets.clamp(min=0), targets >= 0, max_depth), lengths)


def _outcome(tokens: Tensor, path: Tensor, bonus: Tensor, valid: Tensor, lengths: Tensor) -> Accepted:
    """The accepted `path` [B, D + 1] int64 of nodes, then -1, and the token that follows it."""
    count = (path >= 0).sum(-1) - 1
    column = torch.arange(path.shape[1], device=path.device)
    drafts = tokens.gather(1, path.clamp(min=0)).roll(-1, 1)
    behind = torch.where(column == count[:, None], bonus[:, None], -1)
    emitted = torch.where(column < count[:, None], drafts, behind)
    return Accepted(emitted, count.int(), path.int(), bonus, lengths + count + 1, valid)


def _followed(
    tokens: Tensor, tree: TreeLinks, targets: Tensor, valid: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Path, bonus and validity [B] of following the target tokens ([B, N] int64) down the tree, N - 1 links at most."""
    batch, num_nodes = tokens.shape
    node, stop = torch.arange(num_nodes, device=tokens.device), num_nodes**2
    # State e * N + c: the path ends at node e, and node c is looked at. A table [B, N * N] says which state is next.
    hits = valid[:, :, None] & (tokens[:, None] == targets[:, :, None])
    link = torch.where(hits, tree.first_child[:, None], tree.next_sibling[:, None]).long()
    end = torch.where(hits, node, node[:, None])
    link = torch.cat([tree.first_child[:, :1].long(), link.flatten(1)], 1)
    end = torch.nn.functional.pad(end.flatten(1), (1, 0))
    table = torch.where((link >= 0) & (link < num_nodes), end * num_nodes + link, stop)
    table = torch.nn.functional.pad(table, (0, 1), value=stop)

    states = [table[:, :1]]
    for _ in range(num_nodes - 2):
        states.append(table.gather(1, states[-1] + 1))
    walk = torch.cat(states[: num_nodes - 1], 1) if num_nodes > 1 else table[:, :0]
    hit = torch.nn.functional.pad(hits.flatten(1), (0, 1)).gather(1, walk)
    count = hit.cumsum(1)
    kept = hit & (count <= max_depth)
    path = torch.full((batch, max_depth + 2), -1, dtype=torch.int64, device=tokens.device)
    path[:, 0] = 0
    path.scatter_(1, torch.where(kept, count, max_depth + 1), walk % num_nodes)  # the spare column takes the others
    end = path.gather(1, kept.sum(1, keepdim=True))
    return path[:, :-1], targets.gather(1, end)[:, 0], valid.gather(1, end)[:, 0]


def _judged_chain(call: Verification) -> tuple[Tensor, Tensor, Tensor]:
    """Path, bonus and validity [B] under `rejection` or `block`."""
    rule, tokens, tree, max_depth, sampling = call.rule, call.tokens, call.tree, call.max_depth, call.sampling
    batch, num_nodes, vocab = call.values.shape
    assert call.draft_probs is not None and sampling.temperature is not None
    draft = draft_by_node(call.draft_probs, None, num_nodes)  # of [B, N, V] the last row is zero
    target, greedy, valid = target_rows(call.values, sampling, call.probabilities)
    judging, recover, bonus_uniform = judging_uniforms(sampling.seeds, call.uniforms, tree, num_nodes)
    node = torch.arange(1, num_nodes, device=tokens.device)
    reach = _leading((tree.first_child[:, :-1] == node) & valid[:, :-1] & (node <= max_depth))

    drafted = tokens[:, 1:]
    known = (drafted >= 0) & (drafted < vocab)
    at = drafted.clamp(0, vocab - 1)[..., None]
    p = torch.where(known, target[:, :-1].gather(-1, at)[..., 0], 0.0)
    q = torch.where(known, draft[:, :-1].gather(-1, at)[..., 0], 0.0)
    in_reach = node <= reach[:, None]
    if rule == "rejection":
        kept = torch.ones(batch, num_nodes, dtype=torch.float64, device=tokens.device)
        tau = _leading((judging * q < p) & in_reach)
    else:
        kept = _block_ratios(p, q)
        tau = _block_length(kept, target, draft, judging, reach)
    sampled_rows = sampling.temperature > 0
    tau = torch.where(sampled_rows, tau, _leading((drafted == greedy[:, :-1]) & in_reach))

    rows = torch.arange(batch, device=tokens.device)
    whole = tau == reach
    subtracted = torch.where(whole[:, None], 0.0, draft[rows, tau])
    scale = torch.where(whole, 1.0, kept[rows, tau])
    residual = (scale[:, None] * target[rows, tau] - subtracted).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target[rows, tau])
    sampled = inverse_cdf(residual, torch.where(whole, bonus_uniform, recover))
    bonus = torch.where(sampled_rows, sampled, greedy[rows, tau])
    column = torch.arange(max_depth + 1, device=tokens.device)
    path = torch.where(column <= tau[:, None], column, -1)
    return path, torch.where(valid[rows, tau], bonus, 0), valid[rows, tau]


def _leading(flags: Tensor) -> Tensor:
    """[B] int64: how many of the first entries are all True."""
    return flags.long().cumprod(-1).sum(-1)


def _block_ratios(p: Tensor, q: Tensor) -> Tensor:
    """P_s of every node s, [B, N]."""
    ratio = torch.where(q > 0, p / q.clamp(min=1e-300), (p > 0).double())
    kept = [ratio.new_ones(len(ratio))]
    for column in ratio.unbind(1):
        kept.append((kept[-1] * column).clamp(max=1))
    return torch.stack(kept, 1)


def _block_length(kept: Tensor, target: Tensor, draft: Tensor, judging: Tensor, reach: Tensor) -> Tensor:
    """tau [B]: the longest block whose uniform is below its h."""
    num_nodes = kept.shape[1]
    left = (kept[..., None] * target - draft).clamp(min=0).sum(-1)
    below = left + 1 - kept
    h = torch.where(below > 0, left / below.clamp(min=1e-300), 1.0)
    node = torch.arange(num_nodes, device=kept.device)
    h = torch.where(node == reach[:, None], kept, h)
    passes = (judging < h[:, 1:]) & (node[1:] <= reach[:, None])
    return torch.where(passes, node[1:], 0).amax(-1) if num_nodes > 1 else torch.zeros_like(reach)
