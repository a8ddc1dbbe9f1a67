# mypy: ignore-errors
"""Three kernels over a lattice: pair scores, chains, trees.

1. pair scores, one program per position: all C x C pairs at once, before any predecessor is known, so that the chain
   and the tree, which go step by step, wait for no product.
2. chain, one program per request: the values of the next position are loaded while a position is decided.
3. tree, one program per request, with a lane per child of every node. An offer is the cost of a path, -log q summed
   from the root on; as the bits of a float that is not negative it is compared as an integer, whose minimum is one
   instruction of a warp. The smallest offer becomes a node, and its children's costs fill its lanes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.lattice.configs import CONFIGS
from specdec_kernels.lattice.types import Draws, Lattice, PairFactors, SampledChain
from specdec_kernels.launch import current_chip, launch
from specdec_kernels.pdl import begin
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling.types import DRAFT_STREAM
from specdec_kernels.tree.kernel_selection import empty_selection
from specdec_kernels.tree.types import UNUSED_PARENT, Selection

_UNUSED_PARENT = tl.constexpr(UNUSED_PARENT)
_DRAFT = tl.constexpr(DRAFT_STREAM)
_NO_ID = tl.constexpr((1 << 31) - 1)
_NO_OFFER = tl.constexpr(0x7F800000)  # the bits of +inf
_MIN_DOT = 16  # rows of a matrix product


@triton.jit
def _target_ids(ids, vocabulary_ptr, live):
    """Drafter's ids as the target's, int64."""
    ids = ids.to(tl.int64)
    if vocabulary_ptr is not None:
        ids += tl.load(vocabulary_ptr + ids, mask=live, other=0)
    return ids


@triton.jit
def _positions_of(counts_ptr, request, in_batch, DEPTH: tl.constexpr):
    """How many positions each request drafts."""
    if counts_ptr is not None:
        count = tl.minimum(tl.load(counts_ptr + request, mask=in_batch, other=0), DEPTH)
    else:
        count = (request * 0 + DEPTH).to(tl.int32)
    return count


@triton.jit
def table_rows(table_ptr, tokens, factor, size, RANK: tl.constexpr):
    """[C, F]: entries of the tokens' rows, zeros for tokens outside of the table."""
    inside = ((tokens >= 0) & (tokens < size))[:, None] & (factor < RANK)[None, :]
    return tl.load(table_ptr + tokens[:, None] * RANK + factor[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["vocab", "draft_vocab"])
def _pair_kernel(
    lattice,  # Lattice
    factors,  # PairFactors
    pairs_ptr,  # [B, DEPTH, CANDIDATES, CANDIDATES] float32
    vocab,
    draft_vocab,
    DEPTH: tl.constexpr,
    CANDIDATES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PDL: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64)
    request = cell // DEPTH
    place = cell - request * DEPTH
    lane = tl.arange(0, BLOCK_C)
    begin(PDL)
    live = (lane < CANDIDATES) & (place < _positions_of(lattice.counts, request, True, DEPTH))
    follows = live & (place > 0)
    tokens = tl.load(lattice.tokens + cell * CANDIDATES + lane, mask=live, other=-1)
    before = tl.load(lattice.tokens + (cell - 1) * CANDIDATES + lane, mask=follows, other=-1)
    before = _target_ids(before, lattice.vocabulary, follows)
    before = tl.where((place == 0) & (lane == 0), tl.load(lattice.last_tokens + request), before)
    scores = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
    for start in range(0, RANK, BLOCK_F):
        factor = start + tl.arange(0, BLOCK_F)
        row = table_rows(factors.predecessors, before, factor, vocab, RANK)
        successor = table_rows(factors.successors, tokens, factor, draft_vocab, RANK)
        if factors.gates is not None:
            gate = tl.load(factors.gates + cell * RANK + factor, mask=factor < RANK, other=0.0).to(tl.float32)[None, :]
            if factors.token_gates is not None:
                gate = tl.sigmoid(gate + table_rows(factors.token_gates, before, factor, vocab, RANK).to(tl.float32))
            # The gated row as the sum of two rows of its dtype, which hold twice as many bits as one.
            gated = row.to(tl.float32) * gate
            row = gated.to(row.dtype)
            rest = (gated - row.to(tl.float32)).to(row.dtype)
            scores = tl.dot(rest, tl.trans(successor), scores, input_precision="ieee")
        scores = tl.dot(row, tl.trans(successor), scores, input_precision="ieee")
    at = (cell * CANDIDATES + lane[:, None]) * CANDIDATES + lane[None, :]
    tl.store(pairs_ptr + at, scores, mask=(lane < CANDIDATES)[:, None] & (lane < CANDIDATES)[None, :])


@triton.jit
def _store_nodes(nodes, vocabulary_ptr, at, mask, used, id, parent, candidate, score):
    """Nodes of a `Selection`; `id` is the drafter's."""
    token = _target_ids(tl.where(used, id, 0), vocabulary_ptr, mask & used)
    tl.store(nodes.tokens + at, tl.where(used, token, 0), mask=mask)
    tl.store(nodes.parents + at, tl.where(used, parent, _UNUSED_PARENT), mask=mask)
    tl.store(nodes.candidates + at, tl.where(used, candidate, -1), mask=mask)
    tl.store(nodes.scores + at, tl.where(used, score, 0.0), mask=mask)


@triton.jit
def _store_root(nodes, last_tokens_ptr, request, mask, NODES):
    at = request * NODES
    tl.store(nodes.tokens + at, tl.load(last_tokens_ptr + request, mask=mask, other=0), mask=mask)
    tl.store(nodes.parents + at, request.to(tl.int32) * 0 - 1, mask=mask)
    tl.store(nodes.candidates + at, request.to(tl.int32) * 0 - 1, mask=mask)
    tl.store(nodes.scores + at, request.to(tl.float32) * 0 + 1.0, mask=mask)


@triton.jit
def _load_position(lattice, pairs_ptr, request, place, live, CANDIDATES: tl.constexpr, DEPTH: tl.constexpr, lane):
    """Ids [Q, C] int32 of a position, and values [Q, P, C] after each predecessor, -inf where not `live` [Q]."""
    cell = request * DEPTH + place
    within = lane < CANDIDATES
    row = cell[:, None] * CANDIDATES + lane[None, :]
    inside = live[:, None] & within[None, :]
    ids = tl.load(lattice.tokens + row, mask=inside, other=_NO_ID).to(tl.int32)
    logit = tl.load(lattice.logits + row, mask=inside, other=float("-inf")).to(tl.float32)
    at = (cell[:, None, None] * CANDIDATES + lane[None, :, None]) * CANDIDATES + lane[None, None, :]
    pair = tl.load(pairs_ptr + at, mask=inside[:, None, :] & within[None, :, None], other=0.0)
    return ids, d.usable(logit[:, None, :] + pair)


@triton.jit(do_not_specialize=["batch"])
def _chain_kernel(
    lattice,  # Lattice
    pairs_ptr,  # [B, DEPTH, CANDIDATES, CANDIDATES] float32
    draws,  # Draws, of None if greedy
    chain,  # Selection of DEPTH + 1 nodes, written
    probs_ptr,  # [B, DEPTH, CANDIDATES] float32, or None if greedy
    batch,
    DEPTH: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    in_batch = request < batch
    lane = tl.arange(0, BLOCK_C)
    begin(PDL)
    temperature = tl.zeros((BLOCK_Q,), tl.float32)
    if draws.temperature is not None:
        temperature = tl.load(draws.temperature + request, mask=in_batch, other=0.0)
    sampled = temperature > 0
    scale = d.exponent_scale(temperature)[:, None]
    count = tl.where(in_batch, _positions_of(lattice.counts, request, in_batch, DEPTH), 0)
    _store_root(chain, lattice.last_tokens, request, in_batch, DEPTH + 1)
    chosen = tl.zeros((BLOCK_Q,), tl.int32)
    score = tl.full((BLOCK_Q,), 1.0, tl.float32)
    alive = in_batch
    ids, values = _load_position(lattice, pairs_ptr, request, 0, count > 0, CANDIDATES, DEPTH, lane)
    for place in range(DEPTH):
        next_ids, next_values = _load_position(
            lattice, pairs_ptr, request, place + 1, count > place + 1, CANDIDATES, DEPTH, lane
        )
        value = tl.max(tl.where(lane[None, :, None] == chosen[:, None, None], values, float("-inf")), 1)
        top = tl.max(value, 1)
        alive = alive & (top > float("-inf"))
        weight = d.weigh(value, top[:, None], scale, False)
        total = tl.sum(weight, 1)
        share = tl.where(alive[:, None], weight / tl.where(alive, total, 1.0)[:, None], 0.0)
        largest = value == top[:, None]
        lowest = tl.min(tl.where(largest, ids, _NO_ID), 1)
        chosen = tl.min(tl.where(largest & (ids == lowest[:, None]), lane[None, :], BLOCK_C), 1)
        if draws.temperature is not None:
            at = request * DEPTH + place
            uniform = d.keyed_uniform(draws, at, request, request, in_batch, _DRAFT, place + 1)
            drawn, _, _, _ = d.locate(weight, total, uniform)
            chosen = tl.where(sampled, tl.maximum(drawn, 0), chosen)
        is_chosen = lane[None, :] == chosen[:, None]
        if draws.temperature is not None:
            prob = tl.where(sampled[:, None], share, (is_chosen & alive[:, None]).to(tl.float32))
            at = at[:, None] * CANDIDATES + lane[None, :]
            tl.store(probs_ptr + at, prob, mask=in_batch[:, None] & (lane < CANDIDATES)[None, :])
        score *= tl.sum(tl.where(is_chosen, share, 0.0), 1)
        _store_nodes(
            chain, lattice.vocabulary, request * (DEPTH + 1) + place + 1, in_batch, alive,
            tl.sum(tl.where(is_chosen, ids, 0), 1), place, place * CANDIDATES + chosen, score,
        )  # fmt: skip
        ids, values = next_ids, next_values


@triton.jit
def _costs(lattice, pairs_ptr, row, predecessor, candidate, mine, CANDIDATES: tl.constexpr):
    """-log q of the candidates in the lanes that are `mine`, after one predecessor; +inf elsewhere."""
    logit = tl.load(lattice.logits + row + candidate, mask=mine, other=float("-inf")).to(tl.float32)
    pair = tl.load(pairs_ptr + (row + predecessor) * CANDIDATES + candidate, mask=mine, other=0.0)
    value = d.usable(logit + pair)
    top = d.finite(tl.max(value, 0))
    total = tl.sum(tl.exp(value - top), 0)
    return (top - value) + tl.log(tl.maximum(total, 1.0))


@triton.jit
def _tree_kernel(
    lattice,  # Lattice
    pairs_ptr,  # [B, DEPTH, CANDIDATES, CANDIDATES] float32
    tree,  # Selection, written
    DEPTH: tl.constexpr,
    CANDIDATES: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_N * BLOCK_C)
    parent_of, candidate = lane // BLOCK_C, lane % BLOCK_C
    begin(PDL)
    count = _positions_of(lattice.counts, request, True, DEPTH)
    _store_root(tree, lattice.last_tokens, request, True, NODES)
    offer = tl.full((BLOCK_N * BLOCK_C,), _NO_OFFER, tl.int32)
    ids = offer * 0 + _NO_ID
    place_of = offer * 0
    best = request.to(tl.int32) * 0
    place, predecessor = best, best
    for node in range(1, NODES):
        mine = (parent_of == node - 1) & (candidate < CANDIDATES) & (place < count)
        row = (request * DEPTH + place) * CANDIDATES
        cost = _costs(lattice, pairs_ptr, row, predecessor, candidate, mine, CANDIDATES)
        cost = best.to(tl.float32, bitcast=True) + cost
        ids = tl.where(mine, tl.load(lattice.tokens + row + candidate, mask=mine, other=0).to(tl.int32), ids)
        place_of = tl.where(mine, place, place_of)
        offer = tl.where(mine, cost.to(tl.int32, bitcast=True), offer)
        best = tl.min(offer, 0)
        found = best < _NO_OFFER
        parent = tl.min(tl.where(offer == best, parent_of, BLOCK_N), 0)
        equal = (offer == best) & (parent_of == parent)
        id = tl.min(tl.where(equal, ids, _NO_ID), 0)
        choice = tl.min(tl.where(equal & (ids == id), place_of * BLOCK_C + candidate, _NO_ID), 0)
        place, predecessor = choice // BLOCK_C, choice % BLOCK_C
        offer = tl.where((parent_of == parent) & (candidate == predecessor), _NO_OFFER, offer)
        _store_nodes(
            tree, lattice.vocabulary, request * NODES + node, True, found, id, parent,
            place * CANDIDATES + predecessor, tl.exp(-best.to(tl.float32, bitcast=True)),
        )  # fmt: skip
        place = tl.where(found, place + 1, DEPTH)


def pair_scores(lattice: Lattice, factors: PairFactors) -> Tensor:
    batch, depth, candidates = lattice.tokens.shape
    rank, config = factors.predecessors.shape[1], CONFIGS[current_chip(factors.predecessors)]
    pairs = torch.empty(batch, depth, candidates, candidates, dtype=torch.float32, device=lattice.tokens.device)
    launch(
        _pair_kernel, (batch * depth,), lattice, factors, pairs, len(factors.predecessors), len(factors.successors),
        num_warps=config.pair_warps,
        DEPTH=depth, CANDIDATES=candidates, RANK=rank, BLOCK_C=max(triton.next_power_of_2(candidates), _MIN_DOT),
        BLOCK_F=min(max(triton.next_power_of_2(rank), _MIN_DOT), config.rank_block),
    )  # fmt: skip
    return pairs


def greedy_chain(lattice: Lattice, pairs: Tensor) -> Selection:
    chain = empty_selection(lattice.last_tokens, lattice.tokens.shape[1] + 1)
    _launch_chain(lattice, pairs, Draws(None, None, None, None), chain, None)
    return chain


def sample_chain(lattice: Lattice, pairs: Tensor, draws: Draws) -> SampledChain:
    chain = empty_selection(lattice.last_tokens, lattice.tokens.shape[1] + 1)
    probs = pairs.new_empty(lattice.tokens.shape)
    if draws.uniforms is not None:
        draws = draws._replace(seeds=None, positions=None)
    _launch_chain(lattice, pairs, draws, chain, probs)
    return SampledChain(*chain, probs)


def _launch_chain(lattice: Lattice, pairs: Tensor, draws: Draws, chain: Selection, probs: Tensor | None) -> None:
    (batch, depth, candidates), chip = lattice.tokens.shape, current_chip(pairs)
    block_c = max(triton.next_power_of_2(candidates), d.MIN_SCAN)
    block_q = d.rows_per_program(batch, CONFIGS[chip].max_requests, block_c * block_c)
    launch(
        _chain_kernel, (triton.cdiv(batch, block_q),), lattice, pairs, draws, chain, probs, batch,
        num_warps=_warps(chip, block_c * block_c), DEPTH=depth, CANDIDATES=candidates, BLOCK_Q=block_q, BLOCK_C=block_c,
    )  # fmt: skip


def lattice_tree(lattice: Lattice, pairs: Tensor, num_nodes: int) -> Selection:
    batch, depth, candidates = lattice.tokens.shape
    tree = empty_selection(lattice.last_tokens, num_nodes)
    block_n, block_c = (max(triton.next_power_of_2(size), d.MIN_SCAN) for size in (num_nodes, candidates))
    launch(
        _tree_kernel, (batch,), lattice, pairs, tree, num_warps=_warps(current_chip(pairs), block_n * block_c),
        DEPTH=depth, CANDIDATES=candidates, NODES=num_nodes, BLOCK_N=block_n, BLOCK_C=block_c,
    )  # fmt: skip
    return tree


def _warps(chip: str, lanes: int) -> int:
    return max(1, min(8, lanes // CONFIGS[chip].lanes_per_warp))
