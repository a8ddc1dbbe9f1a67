"""Definition of the tree functions in plain torch."""

import torch
from torch import Tensor

from specdec_kernels.sampling.reference import inverse_cdf, philox_uniform
from specdec_kernels.sampling.types import DRAFT_STREAM
from specdec_kernels.tree.types import (
    UNUSED_PARENT,
    WORD_BITS,
    Candidates,
    ChildSampling,
    DraftTopk,
    Expansion,
    Frontier,
    MergedTree,
    Selection,
    TreeLinks,
)

# A product of probabilities below this is treated as zero, so that chips that flush subnormals agree.
SMALLEST_PRODUCT = torch.finfo(torch.float32).tiny


def build_tree(parents: Tensor, lengths: Tensor) -> TreeLinks:
    num_nodes = parents.shape[1]
    node = torch.arange(num_nodes, device=parents.device)
    parent = parents.long()
    parent = torch.where((parent >= 0) & (parent < node), parent, -1)

    sees = (parent[:, :, None] == node) | (node[:, None] == node)
    for _ in range((num_nodes - 1).bit_length()):  # ancestors twice as far away each time
        sees = torch.bmm(sees.float(), sees.float()) > 0
    depth = sees.sum(-1) - 1

    child, sibling = links_of(parent)
    return TreeLinks(child.int(), sibling.int(), depth.int(), lengths[:, None] + depth, _pack_words(sees))


def build_chain(lengths: Tensor, num_nodes: int) -> TreeLinks:
    node = torch.arange(num_nodes, dtype=torch.int32, device=lengths.device)
    return build_tree((node - 1).expand(lengths.shape[0], num_nodes), lengths)


def links_from_mask(mask: Tensor, lengths: Tensor) -> TreeLinks:
    return build_tree(tree_parents(mask), lengths)


def tree_parents(mask: Tensor) -> Tensor:
    """See `specdec_kernels.tree.tree_parents`; bits may also be bools."""
    num_nodes = mask.shape[1]
    node = torch.arange(num_nodes, device=mask.device)
    sees = mask if mask.dtype == torch.bool else _unpack_words(mask, num_nodes)
    return torch.where(sees & (node < node[:, None]), node, -1).amax(-1).int()


def merge_trees(tree: MergedTree, other: MergedTree) -> MergedTree:
    first = tree.tokens.shape[1]
    merged = MergedTree(
        torch.cat([tree.tokens, other.tokens[:, 1:]], 1),
        torch.cat([tree.parents, torch.full_like(other.parents[:, 1:], UNUSED_PARENT)], 1),
    )
    for row, (own, others) in enumerate(zip(merged.parents, other.parents.tolist(), strict=True)):
        texts = merged.tokens[row].tolist()
        node = torch.arange(len(own), device=own.device)
        own.copy_(torch.where((own >= 0) & (own < node), own, UNUSED_PARENT))
        own[0] = -1
        children: dict[tuple[int, int], int] = {}
        for place, parent in enumerate(own.tolist()):
            if parent >= 0:
                children.setdefault((parent, texts[place]), place)
        places = {0: 0}
        for number, parent in enumerate(others):
            if 0 <= parent < number and parent in places:
                new, above = first + number - 1, places[parent]
                places[number] = children.setdefault((above, texts[new]), new)
                if places[number] == new:
                    own[new] = above
    return merged


def draft_topk(logits: Tensor, k: int) -> DraftTopk:
    usable = torch.nan_to_num(logits.float(), nan=-torch.inf, neginf=-torch.inf).double()
    values, tokens = (part[:, :k] for part in usable.sort(dim=-1, descending=True, stable=True))
    top = torch.nan_to_num(values[:, :1], neginf=0.0)
    total = (usable - top).exp().sum(-1, keepdim=True)
    probs = torch.where(total > 0, (values - top).exp() / total, 0.0)
    return DraftTopk(probs.float(), tokens.contiguous())


def sample_children(call: ChildSampling, replacement: bool) -> None:
    tokens, probs, children, rows, top_tokens, temperature, seeds, positions, uniforms = call
    (batch, num_nodes), (parents, count) = tokens.shape, children.shape
    if not batch * parents:
        return
    at_temperature, of_row = (temperature > 0)[:, None], rows.long()
    left = torch.nan_to_num(probs.double()).clamp(min=0).index_select(1, of_row)
    greedy = top_tokens.index_select(1, of_row)
    first = torch.zeros(batch, parents, dtype=torch.int64, device=tokens.device)
    written = torch.cat([tokens, tokens[:, :1]], 1)  # a spare column for places that are not used
    for rank in range(count):
        wanted = (children[:, rank] >= 0).expand(batch, -1)
        child = torch.where(wanted, children[:, rank].long(), num_nodes)
        if uniforms is None:
            assert seeds is not None and positions is not None
            seed, position = (each[:, None].expand_as(child) for each in (seeds, positions))
            uniform = philox_uniform(seed, position, DRAFT_STREAM, child)
        else:
            uniform = torch.cat([uniforms, uniforms[:, :1]], 1).gather(1, child)
        chosen = inverse_cdf(left.flatten(0, 1), uniform.flatten()).view(batch, parents)
        chosen = torch.where((left > 0).any(-1), chosen, first)
        first = chosen if rank == 0 else first
        if not replacement:
            kept = torch.where(wanted, 0.0, left.gather(-1, chosen[..., None])[..., 0])
            left = left.scatter(-1, chosen[..., None], kept[..., None])
        choice = greedy[..., min(rank, greedy.shape[2] - 1)]
        written.scatter_(1, child, torch.where(at_temperature, chosen, choice))
    tokens.copy_(written[:, :num_nodes])


def expand_tree(call: Expansion) -> Frontier | None:
    frontier, probs, tokens, candidates, first, width, mask, slot, root_is_stored, vocabulary = call
    batch, parents, children = probs.shape
    scores = probs.new_ones(batch, 1) if frontier is None else frontier.scores
    path_scores = scores[:, :, None] * probs
    path_scores = torch.where(path_scores.isnan(), -torch.inf, path_scores).flatten(1)
    ids = tokens if vocabulary is None else tokens + vocabulary[tokens]
    above = torch.full_like(candidates.parents[:, :1], -1) if frontier is None else frontier.candidates
    places = slice(first, first + parents * children)
    candidates.path_scores[:, places] = path_scores
    candidates.tokens[:, places] = ids.flatten(1)
    candidates.parents[:, places] = above.repeat_interleave(children, 1)
    if mask is None:
        return None
    best, index = (part[:, :width] for part in path_scores.sort(dim=-1, descending=True, stable=True))
    parent = index // children
    mask.zero_()
    if frontier is None:
        mask[..., 0] = int(root_is_stored)
    else:
        words = frontier.mask.shape[2]
        mask[..., :words] = frontier.mask.gather(1, parent[..., None].expand(-1, -1, words))
    own = slot + torch.arange(width, device=probs.device)
    word = torch.arange(mask.shape[2], device=probs.device)
    bit = torch.ones_like(own) << own % WORD_BITS
    mask |= torch.where(word == (own // WORD_BITS)[:, None], bit[:, None], 0)
    return Frontier(best.contiguous(), (first + index).int(), ids.flatten(1).gather(1, index), parent, mask)


def rerank_tree(candidates: Candidates, last_tokens: Tensor, num_nodes: int) -> Selection:
    path_scores, tokens, parents = candidates
    batch, num_candidates = path_scores.shape
    candidate = torch.arange(num_candidates, device=path_scores.device)
    score = torch.where(path_scores.isnan(), -torch.inf, path_scores)
    order = score.sort(dim=-1, descending=True, stable=True).indices[:, : num_nodes - 1]
    order = torch.where(score.gather(1, order) > -torch.inf, order, num_candidates).sort(-1).values
    chosen = torch.full((batch, num_nodes - 1), num_candidates, device=path_scores.device)
    chosen[:, : order.shape[1]] = order

    node_of = torch.full((batch, num_candidates + 1), UNUSED_PARENT, device=path_scores.device)
    node_of.scatter_(1, chosen, torch.arange(1, num_nodes, device=path_scores.device).expand_as(chosen))
    node_of[:, num_candidates] = UNUSED_PARENT
    parent = torch.where((parents >= 0) & (parents < candidate), parents.long(), num_candidates)
    parent_node = torch.where(parents == -1, 0, node_of.gather(1, parent))

    def of_chosen(values: Tensor, padding: int) -> Tensor:
        return torch.cat([values, values.new_full((batch, 1), padding)], 1).gather(1, chosen)

    return with_root(
        last_tokens,
        of_chosen(tokens, 0),
        of_chosen(parent_node, UNUSED_PARENT),
        of_chosen(candidate.expand(batch, -1), -1),
        of_chosen(score, 0),
    )


def best_first_tree(probs: Tensor, tokens: Tensor, last_tokens: Tensor, num_nodes: int) -> Selection:
    batch, depths, children = probs.shape
    usable = torch.where(probs > 0, probs.clamp(max=1.0), 0.0).float()
    # A row and a column of zeros stand for what lies below the last depth and past the last rank.
    usable = torch.nn.functional.pad(usable, (0, 1, 0, 1)).flatten(1)
    value = usable.new_zeros(batch, num_nodes)
    value[:, 0] = 1.0
    depth = torch.zeros(batch, num_nodes, dtype=torch.int64, device=probs.device)
    next_rank = torch.zeros_like(depth)
    grown = [(depth[:, :0], depth[:, :0])]
    for node in range(1, num_nodes):
        offer = value * usable.gather(1, depth * (children + 1) + next_rank)
        best, parent = torch.where(offer >= SMALLEST_PRODUCT, offer, 0.0).max(-1, keepdim=True)
        parent = (offer == best).int().argmax(-1, keepdim=True)
        found = best > 0
        rank, parent_depth = next_rank.gather(1, parent), depth.gather(1, parent)
        grown.append(
            (torch.where(found, parent, UNUSED_PARENT), torch.where(found, parent_depth * children + rank, -1))
        )
        next_rank.scatter_(1, parent, rank + found.long())
        value[:, node : node + 1] = best
        depth[:, node : node + 1] = parent_depth + 1
    parent, candidate = (torch.cat(columns, 1) for columns in zip(*grown, strict=True))
    token = torch.where(candidate >= 0, tokens.flatten(1).gather(1, candidate.clamp(min=0)), 0)
    return with_root(last_tokens, token, parent, candidate, value[:, 1:])


def with_root(last_tokens: Tensor, tokens: Tensor, parents: Tensor, candidates: Tensor, scores: Tensor) -> Selection:
    """The root and the nodes after it."""
    none = torch.full_like(last_tokens, -1)[:, None]
    return Selection(
        torch.cat([last_tokens[:, None], tokens], 1),
        torch.cat([none, parents], 1).int(),
        torch.cat([none, candidates], 1).int(),
        torch.nn.functional.pad(scores.float(), (1, 0), value=1.0),
    )


def links_of(parent: Tensor) -> tuple[Tensor, Tensor]:
    """First child and next sibling [B, N] int64 of every node, -1 where there is none, from parents [B, N]."""
    node = torch.arange(parent.shape[1], device=parent.device)
    is_child = parent[:, None, :] == node[:, None]
    is_later_sibling = (parent[:, None, :] == parent[:, :, None]) & (parent[:, :, None] >= 0) & (node > node[:, None])
    child, sibling = (torch.where(f.any(-1), f.int().argmax(-1), -1) for f in (is_child, is_later_sibling))
    return child, sibling


def _pack_words(bits: Tensor) -> Tensor:
    """[B, N, N] bool -> [B, N, ceil(N / 64)] int64; bit 63 is the sign bit."""
    one = torch.ones((), dtype=torch.int64, device=bits.device)
    weights = one << (torch.arange(bits.shape[-1], device=bits.device) % WORD_BITS)
    return torch.stack([word.sum(-1) for word in (bits * weights).split(WORD_BITS, -1)], -1)


def _unpack_words(words: Tensor, num_nodes: int) -> Tensor:
    """[B, N, W] int64 -> [B, N, num_nodes] bool."""
    bit = torch.arange(WORD_BITS, device=words.device)
    return ((words[..., None] >> bit) & 1).bool().flatten(2)[:, :, :num_nodes]
