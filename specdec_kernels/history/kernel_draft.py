"""Drafting: one program a request builds its tree from its candidates.

The continuations of the candidates are compared two by two: `common[i, j]` is the length of the common prefix of those
of i and j. Each node of the trie belongs to the best candidate through it: candidate i owns the nodes of its
continuation from depth `branch` on, where `branch` is the largest `common` with a better candidate, its `parent`. So a
candidate owns a path of nodes, which hangs below a node of its parent.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from specdec_kernels.history import types

MAX_SHORTFALL, FULL_SHARE = tl.constexpr(types.MAX_SHORTFALL), tl.constexpr(types.FULL_SHARE)
MAX_BETTER_SIBLINGS = tl.constexpr(types.MAX_BETTER_SIBLINGS)
PROB_UNIT, MIN_PROB_UNIT = tl.constexpr(types.PROB_UNIT), tl.constexpr(types.MIN_PROB_UNIT)
UNROLL = tl.constexpr(4)
"""Tokens of a continuation that are loaded before the first is compared, so that loads do not wait for each other."""


@triton.jit
def _best_ranks(ranks_ptr, CANDIDATES: tl.constexpr, RANKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """[BLOCK_M] int64: the best ranks, the best first, -1 after the last."""
    rank = tl.load(ranks_ptr + tl.arange(0, RANKS))
    candidate = tl.arange(0, BLOCK_M)
    best = tl.full((BLOCK_M,), -1, tl.int64)
    count = 0
    top = tl.max(rank, 0)
    while (count < CANDIDATES) & (top >= 0):
        best = tl.where(candidate == count, top, best)
        rank = tl.where(rank == top, -1, rank)
        top = tl.max(rank, 0)
        count += 1
    return best


@triton.jit
def _append_latest(rank, latest_ptr, bucket, CANDIDATES: tl.constexpr, BLOCK_M: tl.constexpr):
    """`rank` [BLOCK_M], then the latest positions of the last token that are not in it, all of them in histories of
    other requests."""
    candidate = tl.arange(0, BLOCK_M)
    listed = (candidate < CANDIDATES) & (bucket >= 0)
    extra = tl.load(latest_ptr + bucket * CANDIDATES + candidate, mask=listed, other=-1)
    # The low 40 bits are history and position.
    known = ((rank & 0xFFFFFFFFFF)[None, :] == (extra & 0xFFFFFFFFFF)[:, None]) & (rank >= 0)[None, :]
    kept = (extra >= 0) & (tl.max(known.to(tl.int32), 1) == 0)
    place = tl.sum((rank >= 0).to(tl.int32), 0) + tl.cumsum(kept.to(tl.int32), 0) - 1
    moved = tl.where((place[None, :] == candidate[:, None]) & kept[None, :], extra[None, :], -1)
    return tl.where(candidate < CANDIDATES, tl.maximum(rank, tl.max(moved, 1)), -1)


@triton.jit
def _common_prefixes(continuation_ptr, size, BLOCK_M: tl.constexpr):
    """[BLOCK_M, BLOCK_M] int32: length of the common prefix of two continuations [BLOCK_M] of `size` tokens each."""
    both = tl.minimum(size[:, None], size[None, :])
    same = tl.full((BLOCK_M, BLOCK_M), True, tl.int1)
    common = tl.zeros((BLOCK_M, BLOCK_M), tl.int32)
    longest = tl.max(size, 0)
    step = 0
    while step < longest:
        for ahead in tl.static_range(UNROLL):
            token = tl.load(continuation_ptr + step + ahead, mask=step + ahead < size, other=0)
            same = same & (token[:, None] == token[None, :]) & (step + ahead < both)
            common += same.to(tl.int32)
        step += UNROLL
    return common


@triton.jit
def _latest_shares(common, branch, parent, size, BLOCK_M: tl.constexpr):
    """[BLOCK_M] int32: share of each candidate's nodes where the latest come first. An eighth less for each better
    sibling of its first node, MAX_BETTER_SIBLINGS at most, and for those of the nodes above."""
    candidate = tl.arange(0, BLOCK_M)
    sibling = (candidate[None, :] < candidate[:, None]) & (common == branch[:, None])
    sibling = sibling & (branch[None, :] <= branch[:, None]) & (size[None, :] > branch[:, None])
    own = tl.minimum(tl.sum(sibling.to(tl.int32), 1), MAX_BETTER_SIBLINGS)
    better = own
    ancestor = parent
    while tl.max(ancestor, 0) >= 0:
        is_ancestor = ancestor[:, None] == candidate[None, :]
        better += tl.sum(tl.where(is_ancestor, own[None, :], 0), 1)
        ancestor = tl.sum(tl.where(is_ancestor, parent[None, :] + 1, 0), 1) - 1
    share = tl.full((BLOCK_M,), FULL_SHARE, tl.int32)
    # One division a step, because each of them rounds down.
    while tl.max(better, 0) > 0:
        share = tl.where(better > 0, share * 7 // 8, share)
        better -= 1
    return share


@triton.jit
def _votes(common, weight, longest, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N] int32: weight of the candidates through the node of candidate i at depth j + 1."""
    depth = tl.arange(0, BLOCK_N)[None, :]
    votes = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    step = 0
    while step < longest:
        vote = tl.sum(tl.where(common > step, weight[None, :], 0), 1)
        votes = tl.where(depth == step, vote[:, None], votes)
        step += 1
    return votes


@triton.jit
def _choose_nodes(key, branch, parent, NODES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The nodes of the largest `key` [BLOCK_M, BLOCK_N], [BLOCK_N] each: their keys, 0 at node 0 and after the last;
    their parents. A node comes after the one above it, which has a larger key."""
    candidate = tl.arange(0, BLOCK_M)
    node = tl.arange(0, BLOCK_N)
    attach = tl.zeros((BLOCK_M,), tl.int32)  # the node below which the next one of each candidate hangs
    chosen = tl.zeros((BLOCK_N,), tl.int64)
    parents = tl.where(node == 0, -1, -2)
    count = 1
    top = tl.max(tl.max(key, 1), 0)
    while (count < NODES) & (top > 0):
        owner = 255 - (top & 255).to(tl.int32)
        depth = 255 - ((top >> 8) & 255).to(tl.int32)
        parents = tl.where(node == count, tl.sum(tl.where(candidate == owner, attach, 0), 0), parents)
        chosen = tl.where(node == count, top, chosen)
        # Candidates that branch off below this node hang there too.
        attach = tl.where((candidate == owner) | ((parent == owner) & (branch == depth + 1)), count, attach)
        key = tl.where(key == top, 0, key)
        top = tl.max(tl.max(key, 1), 0)
        count += 1
    return chosen, parents


@triton.jit(do_not_specialize=["row_stride", "context"])
def draft_kernel(
    history_ptr,  # [B, context] int64
    lengths_ptr,  # [B] int64
    store,  # HistoryStore
    ranks_ptr,  # [B, RANKS] int64, below 0 for no match
    scan,  # Scan
    draft,  # HistoryDraft, written
    row_stride,
    context,
    NODES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    LEAST: tl.constexpr,  # path probability of a draft, in parts of MIN_PROB_UNIT
    FREQUENT: tl.constexpr,
    LATEST: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    rank = _best_ranks(ranks_ptr + request * RANKS, CANDIDATES, RANKS, BLOCK_M)
    if LATEST:
        rank = _append_latest(rank, scan.latest, tl.load(scan.token_buckets + request), CANDIDATES, BLOCK_M)
    found = rank >= 0
    matched = tl.where(found, (rank >> 57).to(tl.int32), 0)
    longest = tl.max(matched, 0)
    shortfall = longest - matched
    weight = FULL_SHARE >> (2 * tl.minimum(shortfall, MAX_SHORTFALL))  # 4^-shortfall
    weight = tl.where(found & (shortfall <= MAX_SHORTFALL), weight, 0)
    whole = tl.sum(weight, 0) if FREQUENT else longest * 0 + FULL_SHARE

    candidate = tl.arange(0, BLOCK_M)
    depth = tl.arange(0, BLOCK_N)[None, :]
    other = (rank >> 24) & 0xFFFF
    next_place = (rank & 0xFFFFFF).to(tl.int32) + 1
    end = tl.load(store.lengths + other, mask=found, other=0)
    size = tl.where(found, tl.minimum(end - next_place, NODES - 1), 0)
    continuation = other * context + next_place
    common = _common_prefixes(store.tokens + continuation, size, BLOCK_M)
    better = candidate[None, :] < candidate[:, None]
    branch = tl.max(tl.where(better, common, 0), 1)
    parent = tl.min(tl.where(better & (common >= branch[:, None]), candidate[None, :], BLOCK_M), 1)
    parent = tl.where(branch > 0, parent, -1)
    owned = (depth >= branch[:, None]) & (depth < size[:, None])
    if FREQUENT:
        share = tl.where(owned, _votes(common, weight, tl.max(size, 0), BLOCK_M, BLOCK_N), 0)
    else:
        share = tl.where(owned, _latest_shares(common, branch, parent, size, BLOCK_M)[:, None], 0)

    # A draft at depth d + 1 holds with probability m / (m + d + 1) after a match of m tokens; in parts of a share.
    held = ((matched * 0 + longest if FREQUENT else matched)[:, None] + depth * 0).to(tl.int64)
    value = share.to(tl.int64) * held * PROB_UNIT // (held + depth + 1)
    certain = tl.maximum(whole, 1).to(tl.int64) * PROB_UNIT
    key = (value << 16) | ((255 - depth) << 8) | (255 - candidate)[:, None]
    key = tl.where((share > 0) & (value * MIN_PROB_UNIT >= certain * LEAST), key, 0)
    chosen, parents = _choose_nodes(key, branch, parent, NODES, BLOCK_M, BLOCK_N)

    node = tl.arange(0, BLOCK_N)
    owner = 255 - (chosen & 255).to(tl.int32)
    node_depth = 255 - ((chosen >> 8) & 255)
    start = tl.sum(tl.where(owner[:, None] == candidate[None, :], continuation[None, :], 0), 1)
    length = tl.load(lengths_ptr + request)
    inside = (length >= 0) & (length < context)
    last = tl.load(history_ptr + request * row_stride + length, mask=inside, other=0)
    tokens = tl.load(store.tokens + start + node_depth, mask=chosen > 0, other=0).to(tl.int64)
    values = tl.where(node == 0, certain, chosen >> 16)
    expected = (tl.sum(values, 0) - certain).to(tl.float32) / certain.to(tl.float32)
    path_probs = values.to(tl.float32) / certain.to(tl.float32)
    tl.store(draft.tokens + request * NODES + node, tl.where(node == 0, last, tokens), mask=node < NODES)
    tl.store(draft.parents + request * NODES + node, parents, mask=node < NODES)
    tl.store(draft.expected_accepted + request, expected)
    tl.store(draft.path_probs + request * NODES + node, path_probs, mask=node < NODES)
