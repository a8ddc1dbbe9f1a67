"""Definition of the rules for sampled trees in plain torch, in float64.

At a node the children x_1, ..., x_k, in the order of their links, were sampled from q; p is the target's distribution
there, p_1 = p and q_1 = q. A child without draft probability was not sampled: it is passed over.

From the root down, the path goes on with the first child that is accepted:

multi_round (SpecInfer, arXiv 2305.09781), for children sampled independently: x_i is accepted with probability
    min(1, p_i(x_i) / q(x_i)); else p_{i+1} = norm(max(p_i - q, 0)), p_{i+1} = p_i where that is zero everywhere.
without_replacement (recursive rejection sampling, arXiv 2402.14160), for children sampled without replacement: the same
    with q_i in the place of q, q_{i+1} = norm(q_i outside x_i).
k_seq (SpecTr, arXiv 2310.15141), for children sampled independently: each is accepted with probability
    min(1, p(x_i) / (rho q(x_i))), where rho in [1, k] solves 1 - (1 - b)^k = rho b, b = sum_v min(q(v), p(v) / rho).
    Where all are rejected the next token is sampled from norm(max(p - rho q, 0)).

From the leaves up, a node is judged after its children, and the first that is accepted ends the path:

traversal (arXiv 2505.12398), for children sampled without replacement: the root has the weight w = 1. A child of a node
    of weight w_i (w_1 = w) has the weight min(1, w_i p_i(x_i) / q_i(x_i)). Where neither it nor a node below it is
    accepted, p_{i+1} = norm(r) and w_{i+1} = Z / (Z + 1 - w_i) with r = max(w_i p_i - q_i, 0) and Z = sum_v r(v), and
    q_{i+1} as above. A node is accepted with probability w_{k+1}, so the root always is. On a chain this is block
    verification.

greedy_paths (after greedy multi-path block verification, arXiv 2602.16961), for children sampled independently: the
    tokens are put into classes c by p / q (`CLASS_EDGES`). Only the first child of the highest class is kept. Its token
    has the distribution q'(v) = q(v) (F_c^k - F_{c-1}^k) / (F_c - F_{c-1}), c the class of v, F_c the mass of q in the
    classes up to c. The path of kept children is judged as by `traversal`, with q' in the place of q.

Where the path ends, the next token is sampled from p_{k+1}.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.sampling.reference import inverse_cdf, philox_uniform, row_distribution
from specdec_kernels.sampling.types import ACCEPT_STREAM, BONUS_STREAM, RECOVER_STREAM, SamplingTensors
from specdec_kernels.tree.types import TreeLinks
from specdec_kernels.verify.types import BOTTOM_UP_RULES, CLASS_EDGES, WITHOUT_REPLACEMENT_RULES, Verification

_HALVINGS = 60


class JudgedTree(NamedTuple):
    """The judgement of every node by a rule, before any uniform is known."""

    above: Tensor  # [B, N] int64: the parent of a node that can be judged, -1 for the others
    shares: Tensor  # [B, N] float64: the probability that the node is accepted when its turn comes
    left: Tensor  # [B, N, V] float64: what the next token is sampled from if the path ends at the node
    rejects: Tensor  # [B, N] bool: whether a child of the node was judged
    greedy: Tensor  # [B, N] int64: argmax of the target's rows
    valid: Tensor  # [B, N] bool: of the target's rows


def accept_tree(call: Verification) -> tuple[Tensor, Tensor, Tensor]:
    """Path [B, D + 1], bonus and validity [B] under one of `TREE_RULES`."""
    tokens, tree, sampling = call.tokens, call.tree, call.sampling
    assert call.draft_probs is not None and sampling.temperature is not None
    judged = judge_tree(call, draft_by_node(call.draft_probs, call.draft_rows, tokens.shape[1]))
    judging, recover, bonus_uniform = judging_uniforms(sampling.seeds, call.uniforms, tree, tokens.shape[1])
    path = _path(judged, judging, call.max_depth, call.rule in BOTTOM_UP_RULES)
    end = path.gather(1, (path >= 0).sum(1, keepdim=True) - 1)[:, 0]
    rows = torch.arange(len(tokens), device=tokens.device)
    sampled = inverse_cdf(judged.left[rows, end], torch.where(judged.rejects[rows, end], recover, bonus_uniform))
    bonus = torch.where(sampling.temperature > 0, sampled, judged.greedy[rows, end])
    return path, torch.where(judged.valid[rows, end], bonus, 0), judged.valid[rows, end]


def expected_accepted(
    rule: str, tokens: Tensor, tree: TreeLinks, logits: Tensor, max_depth: int, sampling: SamplingTensors, draft: Tensor
) -> Tensor:
    """[B] float64: the mean number of accepted drafts over all uniforms, for the drafts in `tokens`. Arguments as of
    `accept`, for one of `TREE_RULES` and with a temperature; `draft` [B, N, V] as of `draft_by_node`."""
    judged = judge_tree(Verification(rule, tokens, tree, logits, tree.positions[:, 0], max_depth, sampling), draft)
    above, shares = judged.above, judged.shares
    bottom_up, depth = rule in BOTTOM_UP_RULES, torch.zeros_like(shares)
    for node in range(1, tokens.shape[1]):
        depth[:, node] = entry(depth, above[:, node].clamp(min=0)) + 1
    # Children come after their parent, later siblings after earlier ones: each node adds itself to its parent before
    # what the siblings after it have added.
    mean = depth * shares if bottom_up else torch.zeros_like(shares)
    missed = 1 - shares
    for node in range(tokens.shape[1] - 1, 0, -1):
        linked, up = above[:, node] >= 0, above[:, node].clamp(min=0)
        if bottom_up:
            joined = mean[:, node] + missed[:, node] * entry(mean, up)
        else:
            joined = shares[:, node] * (1 + mean[:, node]) + missed[:, node] * entry(mean, up)
        if bottom_up:
            _set_entry(missed, up, torch.where(linked, missed[:, node] * entry(missed, up), entry(missed, up)))
        _set_entry(mean, up, torch.where(linked, joined, entry(mean, up)))
    return mean[:, 0]


def judge_tree(call: Verification, draft: Tensor) -> JudgedTree:
    """Judge every node, in the order of the nodes: parents before children, siblings in the order of their links.
    `draft` [B, N, V] as of `draft_by_node`."""
    rule, tokens, temperature = call.rule, call.tokens, call.sampling.temperature
    assert temperature is not None
    target, greedy, valid = target_rows(call.values, call.sampling, call.probabilities)
    batch, num_nodes, vocab = target.shape
    sampled_rows, rows = temperature > 0, torch.arange(batch, device=tokens.device)
    above = _linked(call.tree, valid, call.max_depth)
    left, proposal = target.clone(), normalised(draft)
    weight = torch.zeros(batch, num_nodes, dtype=torch.float64, device=tokens.device)
    weight[:, 0] = 1
    shares, rejects = weight.clone(), torch.zeros_like(valid)
    rho = _k_seq_rates(target, proposal, _samples(tokens, above, proposal)[1]) if rule == "k_seq" else None
    if rule == "greedy_paths":
        above, proposal = _greedy_paths(tokens, above, target, proposal, draft, sampled_rows)
    for node in range(1, num_nodes):
        linked, up, token = above[:, node] >= 0, above[:, node].clamp(min=0), tokens[:, node]
        at = token.clamp(0, vocab - 1)
        p, q, of_parent = left[rows, up, at], proposal[rows, up, at], entry(weight, up)
        judged = linked & sampled_rows & (token >= 0) & (token < vocab) & (q > 0)
        ratio = p / torch.where(judged, q, 1.0) / (1.0 if rho is None else entry(rho, up))
        # A row at temperature 0 has one right child, the first that carries the argmax.
        first = linked & ~sampled_rows & (token == entry(greedy, up)) & ~entry(rejects, up)
        share = torch.where(sampled_rows, torch.where(judged, (of_parent * ratio).clamp(max=1), 0.0), first * of_parent)
        shares[:, node], weight[:, node] = share, share if rule in BOTTOM_UP_RULES else 1.0
        _set_entry(rejects, up, entry(rejects, up) | judged | first)
        if rule == "k_seq":
            continue
        residual = (of_parent[:, None] * left[rows, up] - proposal[rows, up]).clamp(min=0)
        mass = residual.sum(-1)
        shrinks = judged & (mass > 0)
        left[rows, up] = torch.where(shrinks[:, None], normalised(residual), left[rows, up])
        if rule in BOTTOM_UP_RULES:
            below = mass + 1 - of_parent
            lowered = torch.where(below > 0, mass / below.clamp(min=1e-300), of_parent)
            _set_entry(weight, up, torch.where(judged, lowered, of_parent))
        if rule in WITHOUT_REPLACEMENT_RULES:
            others = normalised(proposal[rows, up].scatter(1, at[:, None], 0.0))
            proposal[rows, up] = torch.where(judged[:, None], others, proposal[rows, up])
    if rho is not None:
        residual = (target - rho[..., None] * proposal).clamp(min=0)
        shrinks = rejects & (residual.sum(-1) > 0)
        left = torch.where(shrinks[..., None], normalised(residual), target)
    return JudgedTree(above, weight if rule in BOTTOM_UP_RULES else shares, left, rejects, greedy, valid)


def _path(judged: JudgedTree, judging: Tensor, max_depth: int, bottom_up: bool) -> Tensor:
    """[B, D + 1] int64: nodes from the root on, then -1; `judging` [B, N - 1] are the nodes' uniforms."""
    batch, num_nodes = judged.above.shape
    accepts = judging < judged.shares[:, 1:]
    chosen = torch.full_like(judged.above, -1)
    for node in range(num_nodes - 1, 0, -1):  # the first child overwrites the others
        up = judged.above[:, node]
        takes = (up >= 0) & (accepts[:, node - 1] | (bottom_up & (chosen[:, node] != -1)))
        _set_entry(chosen, up.clamp(min=0), torch.where(takes, node, entry(chosen, up.clamp(min=0))))
    path = [torch.zeros_like(chosen[:, 0])]
    for _ in range(max_depth):
        path.append(torch.where(path[-1] >= 0, entry(chosen, path[-1].clamp(min=0)), -1))
    return torch.stack(path, 1)


def _linked(tree: TreeLinks, valid: Tensor, max_depth: int) -> Tensor:
    """[B, N] int64: the parent of every node that the links of the root lead to and that can be judged, else -1."""
    batch, num_nodes = valid.shape
    above = torch.full((batch, num_nodes), -1, dtype=torch.int64, device=valid.device)
    depth, reached = torch.zeros_like(above), torch.zeros_like(valid)
    reached[:, 0] = True
    for node in range(num_nodes):
        goes_down = reached[:, node] & valid[:, node] & (depth[:, node] < max_depth)
        own = torch.full_like(above[:, node], node)
        for link, parent, follows in (
            (tree.first_child[:, node].long(), own, goes_down),
            (tree.next_sibling[:, node].long(), above[:, node], reached[:, node] & (node > 0)),
        ):
            follows = follows & (link > node) & (link < num_nodes)
            to = torch.where(follows, link, 0)
            _set_entry(above, to, torch.where(follows, parent, entry(above, to)))
            _set_entry(depth, to, torch.where(follows, entry(depth, parent.clamp(min=0)) + 1, entry(depth, to)))
            _set_entry(reached, to, follows | entry(reached, to))
    return above


def _samples(tokens: Tensor, above: Tensor, proposal: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each node was sampled [B, N], and how many children of each node were [B, N] int64."""
    up, at = above.clamp(min=0), tokens.clamp(0, proposal.shape[-1] - 1)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    sampled = (above >= 0) & (tokens == at) & (proposal[rows, up, at] > 0)
    return sampled, torch.zeros_like(above).scatter_add_(1, up, sampled.long())


def _k_seq_rates(target: Tensor, proposal: Tensor, samples: Tensor) -> Tensor:
    """rho [B, N] of `k_seq` by bisection; 1 where there are fewer than two samples."""
    ratio, order = (target / proposal.clamp(min=1e-300)).sort(-1, descending=True)
    zero = torch.zeros_like(target[..., :1])
    p, q = (torch.cat([zero, each.gather(-1, order).cumsum(-1)], -1) for each in (target, proposal))
    low = torch.ones(samples.shape, dtype=torch.float64, device=target.device)
    high = samples.clamp(min=1).double()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        # Where p > rho q, which are the first entries, the residual p - rho q is left.
        first = (ratio > middle[..., None]).sum(-1, keepdim=True)
        left = p.gather(-1, first)[..., 0] - middle * q.gather(-1, first)[..., 0]
        shared = (p[..., -1] - left) / middle
        below = 1 - (1 - shared) ** samples > middle * shared
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high


def _greedy_paths(
    tokens: Tensor, above: Tensor, target: Tensor, proposal: Tensor, draft: Tensor, sampled_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """`above` without the children that `greedy_paths` drops, and the distributions [B, N, V] of those it keeps."""
    sampled, counts = _samples(tokens, above, proposal)
    edges = torch.tensor(CLASS_EDGES, dtype=torch.float64, device=target.device)
    kind = (target.float()[..., None] >= edges.float() * draft.float()[..., None]).sum(-1)
    mass = torch.zeros(*counts.shape, len(edges) + 1, dtype=torch.float64, device=target.device)
    mass.scatter_add_(-1, kind, proposal)
    up_to = mass.cumsum(-1)
    kept_mass = (up_to ** counts[..., None].double()).diff(dim=-1, prepend=torch.zeros_like(up_to[..., :1]))
    factor = kept_mass / mass.clamp(min=1e-300)

    # Of each node's sampled children the first of the highest class is kept.
    node, up = torch.arange(tokens.shape[1], device=tokens.device).expand_as(above), above.clamp(min=0)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    own = torch.where(sampled, kind[rows, up, tokens.clamp(0, target.shape[-1] - 1)], -1)
    best = torch.full_like(above, -1).scatter_reduce(1, up, own, "amax")
    wins = sampled & (own == best.gather(1, up))
    kept = torch.full_like(above, tokens.shape[1]).scatter_reduce(
        1, up, torch.where(wins, node, tokens.shape[1]), "amin"
    )
    stays = (kept.gather(1, up) == node) | ~sampled_rows[:, None]
    return torch.where(stays, above, -1), proposal * factor.gather(-1, kind)


def draft_by_node(draft_probs: Tensor, draft_rows: Tensor | None, num_nodes: int) -> Tensor:
    """[B, N, V] float64: what the children of each node were sampled from, zeros where none were."""
    draft = torch.nan_to_num(draft_probs.double()).clamp(min=0)
    spare = torch.zeros_like(draft[:, :1]) if draft.shape[1] else draft.new_zeros(len(draft), 1, draft.shape[2])
    draft = torch.cat([draft, spare], 1)
    if draft_rows is None:
        return draft
    last = draft.shape[1] - 1
    rows = torch.where((draft_rows >= 0) & (draft_rows < last), draft_rows, last).long()
    return draft[torch.arange(len(draft), device=draft.device)[:, None], rows]


def normalised(weights: Tensor) -> Tensor:
    """Rows [..., V] divided by their sums; a row of zeros stays one."""
    return torch.nan_to_num(weights / weights.sum(-1, keepdim=True))


def entry(values: Tensor, nodes: Tensor) -> Tensor:
    """values[b, nodes[b]] of a [B, N] tensor."""
    return values.gather(1, nodes[:, None])[:, 0]


def _set_entry(values: Tensor, nodes: Tensor, new: Tensor) -> None:
    """values[b, nodes[b]] = new[b]."""
    values.scatter_(1, nodes[:, None], new[:, None].to(values.dtype))


def target_rows(values: Tensor, sampling: SamplingTensors, probabilities: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Distributions [B, N, V] float64, argmax [B, N] and validity [B, N] of the target's rows."""
    batch, num_nodes, vocab = values.shape
    found = row_distribution(values.flatten(0, 1), sampling.repeated(num_nodes), probabilities)
    target = torch.nan_to_num(found.weights / found.weights.sum(-1, keepdim=True))
    target = torch.where(found.valid[:, None], target, 0.0)
    shape = (batch, num_nodes)
    return target.view(*shape, vocab), found.greedy.view(shape), found.valid.view(shape)


def judging_uniforms(
    seeds: Tensor | None, uniforms: Tensor | None, tree: TreeLinks, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The uniforms that judge the drafts [B, N - 1], of the token that recovers [B], and of the bonus [B]."""
    if uniforms is not None:
        return uniforms[:, : num_nodes - 1], uniforms[:, num_nodes - 1], uniforms[:, num_nodes]
    assert seeds is not None
    root = tree.positions[:, 0]
    slots = torch.arange(num_nodes - 1, device=root.device).expand(len(root), -1)
    judging = philox_uniform(seeds[:, None].expand_as(slots), root[:, None].expand_as(slots), ACCEPT_STREAM, slots)
    recover = philox_uniform(seeds, root, RECOVER_STREAM)
    return judging, recover, philox_uniform(seeds, root, BONUS_STREAM)
