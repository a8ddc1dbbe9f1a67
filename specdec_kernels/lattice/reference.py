"""Definition of pair scores, chains, trees and states in plain torch; sums and probabilities in float64."""

import torch
from torch import Tensor

from specdec_kernels.lattice.types import Draws, Lattice, PairFactors, RnnStep, SampledChain
from specdec_kernels.sampling.reference import MIN_TEMPERATURE, inverse_cdf, philox_uniform
from specdec_kernels.sampling.types import DRAFT_STREAM
from specdec_kernels.tree.reference import with_root
from specdec_kernels.tree.types import UNUSED_PARENT, Selection


def pair_scores(lattice: Lattice, factors: PairFactors) -> Tensor:
    predecessors, successors, gates, token_gates = factors
    tokens = lattice.tokens
    before = torch.full_like(tokens, -1)  # [B, D, C]: the target's ids of the predecessors, -1 for none
    before[:, 1:] = _target_ids(lattice)[:, :-1]
    before[:, 0, 0] = lattice.last_tokens
    rows = _rows_of(predecessors, before).double()
    if gates is not None:
        gate = gates[:, :, None].double()
        if token_gates is not None:
            gate = torch.sigmoid(gate + _rows_of(token_gates, before).double())
        rows = rows * gate
    scores = torch.einsum("bdpr,bdcr->bdpc", rows, _rows_of(successors, tokens).double())
    return torch.where(_drafts(lattice)[:, :, None, None], scores, 0.0).float()


def greedy_chain(lattice: Lattice, pairs: Tensor) -> Selection:
    greedy = torch.zeros(len(pairs), device=pairs.device)
    unused = torch.zeros(pairs.shape[:2], dtype=torch.float64, device=pairs.device)
    return Selection(*sample_chain(lattice, pairs, Draws(greedy, None, None, unused))[:4])


def sample_chain(lattice: Lattice, pairs: Tensor, draws: Draws) -> SampledChain:
    temperature, seeds, positions, uniforms = draws
    batch, depth, candidates = lattice.tokens.shape
    values, drafts = _values(lattice, pairs), _drafts(lattice)
    sampled = temperature > 0
    divisor = torch.where(sampled, temperature.double(), 1.0).clamp(min=MIN_TEMPERATURE)[:, None]
    chosen = torch.zeros_like(lattice.last_tokens)
    alive, score = torch.ones_like(sampled), torch.ones_like(divisor[:, 0])
    columns, probs = [], []
    for place in range(depth):
        value = values[:, place].gather(1, chosen[:, None, None].expand(-1, 1, candidates))[:, 0]
        top = value.amax(-1, keepdim=True)
        alive = alive & drafts[:, place] & (top[:, 0] > -torch.inf)
        weights = torch.exp((value - top) / divisor)
        share = torch.where(alive[:, None], weights / weights.sum(-1, keepdim=True), 0.0)
        if uniforms is None:
            assert seeds is not None and positions is not None
            uniform = philox_uniform(seeds, positions, DRAFT_STREAM, torch.full_like(seeds, place + 1))
        else:
            uniform = uniforms[:, place]
        greedy = _first_by_id(value == top, lattice.tokens[:, place])
        chosen = torch.where(sampled, inverse_cdf(weights, uniform), greedy)
        one_hot = torch.nn.functional.one_hot(chosen, candidates) * alive[:, None]
        score = score * share.gather(1, chosen[:, None])[:, 0]
        columns.append((torch.where(alive, place * candidates + chosen, -1), score))
        probs.append(torch.where(sampled[:, None], share, one_hot.double()))
    candidate, scores = (torch.stack(each, 1) for each in zip(*columns, strict=True))
    node = torch.arange(depth, device=candidate.device).expand(batch, -1)
    selection = _selection(lattice, node, candidate, scores)
    return SampledChain(*selection, torch.stack(probs, 1).float())


def lattice_tree(lattice: Lattice, pairs: Tensor, num_nodes: int) -> Selection:
    batch, depth, candidates = lattice.tokens.shape
    device = pairs.device
    logprobs = torch.log_softmax(_values(lattice, pairs).double(), -1).nan_to_num(nan=-torch.inf).float()
    logprobs = torch.where(_drafts(lattice)[:, :, None, None], logprobs, -torch.inf)
    # What continues a node at the last position, and tokens there.
    logprobs = torch.cat([logprobs, torch.full_like(logprobs[:, :1], -torch.inf)], 1).flatten(1, 2)
    ids = torch.cat([lattice.tokens, torch.zeros_like(lattice.tokens[:, :1])], 1)
    offers = torch.full((batch, num_nodes, candidates), -torch.inf, device=device)
    offers[:, 0] = logprobs[:, 0]
    order = torch.full((batch, num_nodes, candidates), 0, device=device)
    order[:, 0] = ids[:, 0]
    place = torch.zeros(batch, num_nodes, dtype=torch.int64, device=device)  # the position of a node's children
    parents, chosen, scores = [], [], []
    requests = torch.arange(batch, device=device)
    for node in range(1, num_nodes):
        best = offers.flatten(1).amax(-1)
        parent = (offers == best[:, None, None]).any(-1).int().argmax(-1)
        index = _first_by_id(offers[requests, parent] == best[:, None], order[requests, parent])
        found, at = best > -torch.inf, place[requests, parent]
        parents.append(torch.where(found, parent, UNUSED_PARENT))
        chosen.append(torch.where(found, at * candidates + index, -1))
        scores.append(best.double().exp())
        offers[requests, parent, index] = -torch.inf
        place[:, node] = torch.where(found, at + 1, depth)
        offers[:, node] = best[:, None] + logprobs[requests, place[:, node] * candidates + index]
        order[:, node] = ids[requests, place[:, node]]
    columns = [torch.stack(each, 1) if each else place[:, 1:] for each in (parents, chosen, scores)]
    return _selection(lattice, *columns)


def rnn_step(tokens: Tensor, state: Tensor, embedding: Tensor, weight: Tensor, hidden: Tensor) -> RnnStep:
    inputs = torch.cat([state, _rows_of(embedding, tokens)], -1).double()
    gate, candidate, output = (inputs @ weight.double().T + hidden.double()).chunk(3, -1)
    kept = torch.sigmoid(gate)
    following = kept * state.double() + (1 - kept) * torch.tanh(candidate)
    return RnnStep(following.to(state.dtype), torch.tanh(output).to(state.dtype))


def gru_step(tokens: Tensor, state: Tensor, embedding: Tensor, weight_ih: Tensor, weight_hh: Tensor) -> Tensor:
    wide = state.double()
    of_token = (_rows_of(embedding, tokens).double() @ weight_ih.double().T).chunk(3, -1)
    of_state = (wide @ weight_hh.double().T).chunk(3, -1)
    reset, update = (torch.sigmoid(of_token[gate] + of_state[gate]) for gate in (0, 1))
    new = torch.tanh(of_token[2] + reset * of_state[2])
    return ((1 - update) * new + update * wide).to(state.dtype)


def _values(lattice: Lattice, pairs: Tensor) -> Tensor:
    """[B, D, C, C] float32: s_i(p, c)."""
    values = lattice.logits.float()[:, :, None] + pairs
    limit = torch.finfo(torch.float32).max
    return torch.nan_to_num(values, nan=-torch.inf, posinf=limit, neginf=-torch.inf)


def _drafts(lattice: Lattice) -> Tensor:
    """[B, D] bool: the positions that each request drafts."""
    place = torch.arange(lattice.tokens.shape[1], device=lattice.tokens.device)
    counts = torch.full_like(lattice.last_tokens, len(place)) if lattice.counts is None else lattice.counts
    return place < counts[:, None]


def _target_ids(lattice: Lattice) -> Tensor:
    return lattice.tokens if lattice.vocabulary is None else lattice.tokens + lattice.vocabulary[lattice.tokens]


def _rows_of(table: Tensor, tokens: Tensor) -> Tensor:
    """[..., r]: the rows of a table, zeros for tokens outside of it."""
    known = (tokens >= 0) & (tokens < len(table))
    return torch.where(known[..., None], table[torch.where(known, tokens, 0)], 0)


def _first_by_id(flags: Tensor, tokens: Tensor) -> Tensor:
    """[B]: of the flagged candidates [B, C] the one of the lowest id."""
    return torch.where(flags, tokens, torch.iinfo(torch.int64).max).argmin(-1)


def _selection(lattice: Lattice, parents: Tensor, candidates: Tensor, scores: Tensor) -> Selection:
    """The nodes after the root, those of candidate -1 unused."""
    used = candidates >= 0
    ids = _target_ids(lattice).flatten(1).gather(1, candidates.clamp(min=0))
    ids, parents = torch.where(used, ids, 0), torch.where(used, parents, UNUSED_PARENT)
    return with_root(lattice.last_tokens, ids, parents, candidates, torch.where(used, scores, 0.0))
