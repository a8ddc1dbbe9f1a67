"""Definition of acceptance in plain torch, the rejection rules in float64.

`rejection` and `block` in symbols: p_r is the target's distribution at row r of the chain, q_r the distribution that
the draft of node r + 1 was drawn from, x_s the token of node s, u_s the uniform that judges it, G the number of drafts
that can be accepted at all: those linked in one chain, no deeper than `max_depth`, each judged by a usable row.

rejection (arXiv 2211.17192): x_s is accepted while u_s q_{s-1}(x_s) < p_{s-1}(x_s).
block (arXiv 2403.10444): P_0 = 1, P_s = min(P_{s-1} p_{s-1}(x_s) / q_{s-1}(x_s), 1);
    h_s = Z / (Z + 1 - P_s) with Z = sum_v max(P_s p_s(v) - q_s(v), 0), h_G = P_G; tau = the last s with u_s < h_s.

With tau accepted drafts the next token is drawn from max(P_tau p_tau - q_tau, 0) (P = 1 under rejection), from p_tau
where that is zero everywhere, and from p_G behind a wholly accepted chain.

The rules for drawn trees are in `reference_tree`.
"""

from __future__ import annotations

import torch

from specdec_kernels.sampling.reference import inverse_cdf, pick_tokens, token_logprobs
from specdec_kernels.sampling.types import SamplingTensors
from specdec_kernels.tree.types import TreeLinks
from specdec_kernels.verify.reference_tree import accept_tree, draft_by_node, entry, judging_uniforms, target_rows
from specdec_kernels.verify.types import CHAIN_RULES, DRAWN_RULES, Accepted


def accept(
    rule: str,
    tokens: torch.Tensor,
    tree: TreeLinks,
    values: torch.Tensor,
    lengths: torch.Tensor,
    max_depth: int,
    sampling: SamplingTensors,
    *,
    uniforms: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    draft_rows: torch.Tensor | None,
    probabilities: bool,
    return_logprobs: bool,
) -> Accepted:
    """See `specdec_kernels.verify.accept`; `values` are logits, or with `probabilities` target probabilities."""
    batch, num_nodes = tokens.shape
    if rule in DRAWN_RULES and sampling.temperature is not None:
        assert draft_probs is not None
        judge = _judged_chain if rule in CHAIN_RULES else accept_tree
        draft = draft_by_node(draft_probs, draft_rows, num_nodes)
        path, bonus, valid = judge(rule, tokens, tree, values, max_depth, sampling, uniforms, draft, probabilities)
    else:
        picked = pick_tokens(
            values.flatten(0, 1),
            sampling.repeated(num_nodes),
            tree.positions.reshape(-1),
            None if uniforms is None else uniforms.reshape(-1),
            probabilities=probabilities,
        )
        targets, valid = picked.tokens.view(batch, num_nodes), picked.valid.view(batch, num_nodes)
        path, bonus, valid = _walked(tokens, tree, targets, valid, max_depth)
    accepted = _outcome(tokens, path, bonus, valid, lengths)
    if not return_logprobs:
        return accepted
    rows = values[torch.arange(batch, device=tokens.device)[:, None], path.clamp(min=0)].flatten(0, 1)
    logprobs = token_logprobs(rows, accepted.tokens.clamp(min=0).flatten(), probabilities).view(path.shape)
    return accepted._replace(logprobs=torch.where(path >= 0, logprobs, 0.0))


def accept_targets(
    tokens: torch.Tensor, tree: TreeLinks, targets: torch.Tensor, lengths: torch.Tensor, max_depth: int
) -> Accepted:
    """See `specdec_kernels.verify.accept_targets`."""
    return _outcome(tokens, *_walked(tokens, tree, targets.clamp(min=0), targets >= 0, max_depth), lengths)


def _outcome(
    tokens: torch.Tensor, path: torch.Tensor, bonus: torch.Tensor, valid: torch.Tensor, lengths: torch.Tensor
) -> Accepted:
    """The accepted `path` [B, D + 1] int64 of nodes, -1 behind its end, and the token that follows it."""
    count = (path >= 0).sum(-1) - 1
    column = torch.arange(path.shape[1], device=path.device)
    drafts = tokens.gather(1, path.clamp(min=0)).roll(-1, 1)
    behind = torch.where(column == count[:, None], bonus[:, None], -1)
    emitted = torch.where(column < count[:, None], drafts, behind)
    return Accepted(emitted, count.int(), path.int(), bonus, lengths + count + 1, valid)


def _walked(
    tokens: torch.Tensor, tree: TreeLinks, targets: torch.Tensor, valid: torch.Tensor, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Path, bonus and validity [B] of following the target tokens ([B, N] int64, one per node) down the tree.

    Each of the at most N - 1 steps looks at one node: it becomes the path's end if it carries the end's target token,
    else its next sibling is looked at.
    """
    batch, num_nodes = tokens.shape
    end = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
    count = end.clone()
    path = torch.full((batch, max_depth + 1), -1, dtype=torch.int64, device=tokens.device)
    path[:, 0] = 0
    column = torch.arange(max_depth + 1, device=tokens.device)
    candidate = tree.first_child[:, 0].long()
    for _ in range(num_nodes - 1):
        target, usable = entry(targets, end), entry(valid, end)
        looking = (candidate >= 0) & (candidate < num_nodes) & usable & (count < max_depth)
        looked_at = torch.where(looking, candidate, 0)
        hit = looking & (entry(tokens, looked_at) == target)
        count = count + hit
        path = torch.where(hit[:, None] & (column == count[:, None]), looked_at[:, None], path)
        end = torch.where(hit, looked_at, end)
        following = torch.where(hit, entry(tree.first_child, end), entry(tree.next_sibling, looked_at)).long()
        candidate = torch.where(looking, following, -1)
    return path, entry(targets, end), entry(valid, end)


def _judged_chain(
    rule: str,
    tokens: torch.Tensor,
    tree: TreeLinks,
    values: torch.Tensor,
    max_depth: int,
    sampling: SamplingTensors,
    uniforms: torch.Tensor | None,
    draft: torch.Tensor,
    probabilities: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Path, bonus and validity [B] under `rejection` or `block`; of `draft` [B, N, V] the last row is zero."""
    batch, num_nodes, vocab = values.shape
    target, greedy, valid = target_rows(values, sampling, probabilities)
    judging, recover, bonus_uniform = judging_uniforms(sampling.seeds, uniforms, tree, num_nodes)
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
    assert sampling.temperature is not None
    drawn_rows = sampling.temperature > 0
    tau = torch.where(drawn_rows, tau, _leading((drafted == greedy[:, :-1]) & in_reach))

    rows = torch.arange(batch, device=tokens.device)
    whole = tau == reach
    subtracted = torch.where(whole[:, None], 0.0, draft[rows, tau])
    scale = torch.where(whole, 1.0, kept[rows, tau])
    residual = (scale[:, None] * target[rows, tau] - subtracted).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target[rows, tau])
    drawn = inverse_cdf(residual, torch.where(whole, bonus_uniform, recover))
    bonus = torch.where(drawn_rows, drawn, greedy[rows, tau])
    column = torch.arange(max_depth + 1, device=tokens.device)
    path = torch.where(column <= tau[:, None], column, -1)
    return path, torch.where(valid[rows, tau], bonus, 0), valid[rows, tau]


def _leading(flags: torch.Tensor) -> torch.Tensor:
    """[B] int64: how many of the first entries are all True."""
    return flags.long().cumprod(-1).sum(-1)


def _block_ratios(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """P_s of every node s, [B, N]."""
    ratio = torch.where(q > 0, p / q.clamp(min=1e-300), (p > 0).double())
    kept = [ratio.new_ones(len(ratio))]
    for column in ratio.unbind(1):
        kept.append((kept[-1] * column).clamp(max=1))
    return torch.stack(kept, 1)


def _block_length(
    kept: torch.Tensor, target: torch.Tensor, draft: torch.Tensor, judging: torch.Tensor, reach: torch.Tensor
) -> torch.Tensor:
    """tau [B]: the longest block whose uniform is below its h."""
    num_nodes = kept.shape[1]
    left = (kept[..., None] * target - draft).clamp(min=0).sum(-1)
    below = left + 1 - kept
    h = torch.where(below > 0, left / below.clamp(min=1e-300), 1.0)
    node = torch.arange(num_nodes, device=kept.device)
    h = torch.where(node == reach[:, None], kept, h)
    passes = (judging < h[:, 1:]) & (node[1:] <= reach[:, None])
    return torch.where(passes, node[1:], 0).amax(-1) if num_nodes > 1 else torch.zeros_like(reach)
