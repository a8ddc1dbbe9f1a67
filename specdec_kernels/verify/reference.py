"""Definition of acceptance in plain torch."""

from __future__ import annotations

import torch

from specdec_kernels.sampling import reference as sampling
from specdec_kernels.sampling.types import Filters
from specdec_kernels.tree.types import TreeLinks
from specdec_kernels.verify import rejection_reference
from specdec_kernels.verify.types import CHAIN_RULES, Accepted


def accept(
    rule: str,
    tokens: torch.Tensor,
    tree: TreeLinks,
    values: torch.Tensor,
    lengths: torch.Tensor,
    max_depth: int,
    *,
    temperature: torch.Tensor | None,
    seeds: torch.Tensor | None,
    uniforms: torch.Tensor | None,
    filters: Filters,
    draft_probs: torch.Tensor | None,
    probabilities: bool,
    return_logprobs: bool,
) -> Accepted:
    """See `specdec_kernels.verify.accept`; `values` are logits, or with `probabilities` target laws."""
    batch, num_nodes = tokens.shape
    if rule in CHAIN_RULES and temperature is not None:
        assert draft_probs is not None
        return rejection_reference.accept(
            rule, tokens, tree, values, lengths, max_depth, temperature=temperature, seeds=seeds, uniforms=uniforms,
            filters=filters, draft_probs=draft_probs, probabilities=probabilities, return_logprobs=return_logprobs,
        )  # fmt: skip
    picked = sampling.pick_tokens(
        values.flatten(0, 1),
        None if temperature is None else temperature.repeat_interleave(num_nodes),
        None if seeds is None else seeds.repeat_interleave(num_nodes),
        tree.positions.reshape(-1),
        None if uniforms is None or temperature is None else uniforms.reshape(-1),
        **filters.repeated(num_nodes)._asdict(),
        return_logprobs=return_logprobs,
        probabilities=probabilities,
    )
    targets, valid = picked.tokens.view(batch, num_nodes), picked.valid.view(batch, num_nodes)
    logprobs = None if picked.logprobs is None else picked.logprobs.view(batch, num_nodes)
    return walk(tokens, tree, targets, valid, lengths, max_depth, logprobs)


def accept_targets(
    tokens: torch.Tensor, tree: TreeLinks, targets: torch.Tensor, lengths: torch.Tensor, max_depth: int
) -> Accepted:
    """See `specdec_kernels.verify.accept_targets`."""
    return walk(tokens, tree, targets.clamp(min=0), targets >= 0, lengths, max_depth)


def walk(
    tokens: torch.Tensor,
    tree: TreeLinks,
    targets: torch.Tensor,
    valid: torch.Tensor,
    lengths: torch.Tensor,
    max_depth: int,
    logprobs: torch.Tensor | None = None,
) -> Accepted:
    """Follow the target tokens ([B, N] int64, one a node) down the tree.

    Each of the at most N - 1 steps looks at one node: it becomes the path's end if it carries the end's
    target token, else its next sibling is looked at.
    """
    batch, num_nodes = tokens.shape
    end = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
    count = end.clone()
    path = torch.full((batch, max_depth + 1), -1, dtype=torch.int64, device=tokens.device)
    path[:, 0] = 0
    column = torch.arange(max_depth + 1, device=tokens.device)
    candidate = tree.first_child[:, 0].long()
    for _ in range(num_nodes - 1):
        target, usable = _at(targets, end), _at(valid, end)
        open_ = (candidate >= 0) & (candidate < num_nodes) & usable & (count < max_depth)
        looked_at = torch.where(open_, candidate, 0)
        hit = open_ & (_at(tokens, looked_at) == target)
        count = count + hit
        path = torch.where(hit[:, None] & (column == count[:, None]), looked_at[:, None], path)
        end = torch.where(hit, looked_at, end)
        following = torch.where(hit, _at(tree.first_child, end), _at(tree.next_sibling, looked_at)).long()
        candidate = torch.where(open_, following, -1)
    bonus = _at(targets, end)
    drafts = tokens.gather(1, path.clamp(min=0)).roll(-1, 1)
    emitted = torch.where(column < count[:, None], drafts, -1)
    emitted = torch.where(column == count[:, None], bonus[:, None], emitted)
    on_path = None
    if logprobs is not None:
        # Every emitted token is the target token of the node it follows.
        on_path = torch.where(column <= count[:, None], logprobs.gather(1, path.clamp(min=0)), 0.0)
    return Accepted(emitted, count.int(), path.int(), bonus, lengths + count + 1, _at(valid, end), on_path)


def _at(values: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """values[b, nodes[b]] of a [B, N] tensor."""
    return values.gather(1, nodes[:, None])[:, 0]
