# mypy: ignore-errors
"""The kernels that judge sampled trees; formulas in `reference_tree`.

Every residual at a node is max(p - c q, 0) with one number c: c_1 = 0, and a rejection at residual mass s, draft mass m
and weight w adds s / (w m) to c (w = 1 from the root down; under `k_seq` c is rho / m). Without replacement m is what
the rejected siblings have left of q. They keep their place in q: a token that can be rejected has w p < q, hence no
residual at its c, nor at any larger one.

A team of programs judges the tree of a request. All of them decide the same, and each reads its share of a row where a
sum over the vocabulary is needed. A rejection is pending, and s is summed, only where another child is judged after it
or the node itself may still be accepted. Sums are counted in whole units, so no bit depends on the number of programs.

`_top_down_kernel` enters a child if it is accepted. `_bottom_up_kernel` enters every child that may be accepted, and
returns to the parent where neither the child nor a node below it was; the state of each node is kept in its lane.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, lanes, launch, num_processors
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling.device import Uniforms
from specdec_kernels.verify import device as v
from specdec_kernels.verify.configs import ACCEPTANCE
from specdec_kernels.verify.device import Distributions, Rows, Terms
from specdec_kernels.verify.types import BOTTOM_UP_RULES, Verification

_CLASSES = tl.constexpr(v.CLASSES)
_UNITS = tl.constexpr(2.0**46)  # of a mass
_LEAST = tl.constexpr(2.0**-46)  # the smallest sum above 0
_MOST = tl.constexpr(8.0)  # mass that a program counts: p sums to 1, and q should
_MOST_UNITS = tl.constexpr(1 << 49)
_PROGRAM = tl.constexpr(1 << 56)  # what a program counts for in the word of a sum
MOST_PROGRAMS = 64  # of a team
RATE_STEPS = 24
_RATE_STEPS = tl.constexpr(RATE_STEPS)
_RATE_ERROR = tl.constexpr(2.0**-36)  # of rho, and of the equation that it solves


class _Node(NamedTuple):
    """The node of each request whose children are judged, [R]."""

    row: Any  # of the target
    draft_row: Any  # -1 where no child was sampled
    temperature: Any


class _Tree(NamedTuple):
    """The nodes before any is judged, [R, N]."""

    tokens: Any  # int32, -1 where it is none
    children: Any  # int32: first child, -1 where there is none or it cannot be judged
    siblings: Any  # int32: next sibling, -1 where there is none
    parents: Any  # int32, -1 for the root and for nodes that no links lead to
    argmax: Any  # int32: the target's greedy token after the node
    draft_rows: Any  # int32: row of the draft that its children were sampled from, -1 for none
    p: Any  # float32: target probability of its token at its parent, 0 where it cannot be judged
    q: Any  # float32: draft probability
    uniforms: Any  # float64


class _State(NamedTuple):
    """How far the children of a node are judged, [R] float64."""

    weight: Any  # w
    rate: Any  # c
    left: Any  # s: residual mass at c
    due: Any  # what the pending rejection adds to c
    mass: Any  # m


class _Static(NamedTuple):
    """Compile-time sizes."""

    NODES: int
    DEPTH: int
    DRAFT_ROWS: int
    VOCAB: int
    PROBS: bool
    WORDS: int  # of a request
    RULE: str
    BOTTOM_UP: bool
    BLOCK_B: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_V: int


class _Batch(NamedTuple):
    """The requests of a program, and the lanes that hold their nodes and paths."""

    request: Any  # [R]
    live: Any  # [R]
    lane: Any  # [1, BLOCK_N]
    column: Any  # [1, BLOCK_D]
    temperature: Any  # [R]


@triton.jit
def _any(flags):
    """Whether one of the flags is set."""
    return tl.max(flags.to(tl.int32), 0) > 0


@triton.jit
def _in_units(mass):
    return (tl.minimum(mass.to(tl.float64), _MOST) * _UNITS + 0.5).to(tl.int64)


@triton.jit
def _team_sum(part, source, place):
    """float64: the sum of `part` (int64, units) over the programs of a team, which wait here for each other.

    The words at `place` are 0 and serve this call alone. Each program adds its units and, above them, one for
    itself."""
    part = tl.minimum(part, _MOST_UNITS)
    if source.words is not None:
        tl.atomic_add(source.words + place, part + _PROGRAM, sem="relaxed")
        word = tl.load(source.words + place, volatile=True)
        while tl.min(word // _PROGRAM) < source.splits:
            word = tl.load(source.words + place, volatile=True)
        part = word % _PROGRAM
    return part.to(tl.float64) / _UNITS


@triton.jit
def _node_terms(source, node, asks):
    """The `Terms` [R, 1] of the nodes' rows."""
    terms = v.target_terms(source, node.temperature, node.row, asks)
    return Terms(terms.top[:, None], terms.floor[:, None], terms.total[:, None], terms.scale[:, None])


@triton.jit
def _mass(source, node, rate, asks, word, SLOPE: tl.constexpr, STATIC: tl.constexpr):
    """[R] float64: sum of max(p - rate q, 0), or with a rate below 0 the sum of q; with SLOPE also the sum of q where
    p > rate q; and the next word."""
    lane = tl.arange(0, STATIC.BLOCK_V)[None, :]
    both = (asks & (rate >= 0))[:, None]
    terms = _node_terms(source, node, asks & (rate >= 0))
    mass = tl.full([rate.shape[0], STATIC.BLOCK_V], 0, tl.int64)
    slope = mass
    first, step = tl.program_id(0) * STATIC.BLOCK_V, source.splits * STATIC.BLOCK_V
    for start in tl.range(first, STATIC.VOCAB, step, num_stages=1):
        column = start + lane
        inside = column < STATIC.VOCAB
        p = v.target_prob(source, terms, node.row[:, None], column, both & inside, STATIC.PROBS)
        q = v.draft_prob(source, node.draft_row[:, None], column, asks[:, None] & inside, STATIC.VOCAB)
        q = v.kept_prob(source, node.row[:, None], p, q, both & inside).to(tl.float64)
        left = tl.where(both, p.to(tl.float64) - rate[:, None] * q, q)
        mass += _in_units(tl.maximum(left, 0.0))
        if SLOPE:
            slope += _in_units(tl.where(left > 0, q, 0.0))
    place = tl.program_id(1) * STATIC.WORDS + word + node.row * 0
    whole = _team_sum(tl.sum(mass, 1), source, place)
    if SLOPE:
        return whole, _team_sum(tl.sum(slope, 1), source, place + 1), word + 2
    else:
        return whole, whole, word + 1


@triton.jit
def _k_seq_rate(source, node, draft_mass, samples, asks, word, STATIC: tl.constexpr):
    """[R] float64: rho / m for `samples` [R] sampled children, by Newton's method between 1 and k; and the next word.

    With r = sum max(p - rho q, 0) the function r - (1 - (1 - r) / rho)^k falls in rho and is 0 at the rho of `k_seq`.
    """
    inverse = 1.0 / tl.maximum(draft_mass, _LEAST)
    low = inverse * 0.0 + 1.0
    high = tl.maximum(samples, 1).to(tl.float64)
    times = samples.to(tl.float64)
    rho = low
    step = 0
    asks = asks & (samples > 1)
    while _any(asks) & (step < _RATE_STEPS):
        left, slope, word = _mass(source, node, rho * inverse, asks, word, True, STATIC)
        slope *= -inverse
        rejected = tl.maximum(1.0 - (1.0 - left) / rho, 0.0)
        # x^(k - 1) by exp and log, which no chip lacks
        power = tl.exp((times - 1.0) * tl.log(tl.where(rejected > 0, rejected, 1.0)))
        power = tl.where(rejected > 0, power, 0.0)
        surplus = left - power * rejected
        falls = slope - times * power * ((1.0 - left) / (rho * rho) + slope / rho)
        low = tl.where(surplus > 0, rho, low)
        high = tl.where(surplus > 0, high, rho)
        asks = asks & (tl.abs(surplus) > _RATE_ERROR) & (high - low > _RATE_ERROR)
        guess = rho - surplus / tl.where(falls < 0, falls, -1.0)
        # A step of Newton's that leaves the interval gives way to its middle.
        guess = tl.where((falls < 0) & (guess > low) & (guess < high), guess, 0.5 * (low + high))
        rho = tl.where(asks, guess, rho)
        step += 1
    return rho * inverse, word


@triton.jit
def _class_masses(source, node, asks, word, STATIC: tl.constexpr):
    """[R, CLASSES] float64: mass of q by class; and the next word."""
    lane = tl.arange(0, STATIC.BLOCK_V)[None, :]
    kinds = tl.arange(0, _CLASSES)[None, :]
    terms = _node_terms(source, node, asks)
    # Part of a tile that one warp sums.
    WIDTH: tl.constexpr = STATIC.BLOCK_V if STATIC.BLOCK_V < 128 else 128
    found = tl.zeros((asks.shape[0], _CLASSES, STATIC.BLOCK_V // WIDTH), tl.int64)
    for start in tl.range(tl.program_id(0) * STATIC.BLOCK_V, STATIC.VOCAB, source.splits * STATIC.BLOCK_V):
        column = start + lane
        live = asks[:, None] & (column < STATIC.VOCAB)
        p = v.target_prob(source, terms, node.row[:, None], column, live, STATIC.PROBS)
        q = v.draft_prob(source, node.draft_row[:, None], column, live, STATIC.VOCAB)
        kind = v.token_class(p, q)
        units = _in_units(q)
        for each in range(_CLASSES):
            of_class = tl.where(kind == each, units, 0)
            of_class = tl.sum(tl.reshape(of_class, (asks.shape[0], STATIC.BLOCK_V // WIDTH, WIDTH)), 2)
            found += tl.where((kinds == each)[:, :, None], of_class[:, None, :], 0)
    place = tl.program_id(1) * STATIC.WORDS + word + kinds + node.row[:, None] * 0
    return _team_sum(tl.sum(found, 2), source, place), word + _CLASSES


@triton.jit
def _keep_best_child(source, node, ps, qs, candidate, lane, asks, word, STATIC: tl.constexpr):
    """The first child of the highest class among those with draft probability `qs` [R, N]; the factors q' / q of each
    class are stored. Rows outside `asks`, or without a sampled child, keep their candidate. `ps` and `qs` are p and
    q of the node's children, 0 elsewhere."""
    sampled = qs > 0
    kind = tl.where(sampled, v.token_class(ps, qs), -1)
    best = tl.max(kind, 1)
    samples = tl.sum(sampled.to(tl.int32), 1)
    kept = tl.min(tl.where(sampled & (kind == best[:, None]), lane, STATIC.NODES), 1)
    asks = asks & (samples > 0)
    mass, word = _class_masses(source, node, asks, word, STATIC)
    share = mass / tl.maximum(tl.sum(mass, 1), _LEAST)[:, None]
    up_to = tl.cumsum(share, 1)
    before = tl.maximum(up_to - share, 0.0)
    power = up_to * 0.0 + 1.0
    lower = power
    times = 0
    while times < tl.max(samples, 0):
        power = tl.where(times < samples[:, None], power * up_to, power)
        lower = tl.where(times < samples[:, None], lower * before, lower)
        times += 1
    # Of q as it is recorded: q' = q / m times the share of the kept mass.
    factor = (power - lower) / tl.maximum(mass, _LEAST)
    place = node.row.to(tl.int64)[:, None] * _CLASSES + tl.arange(0, _CLASSES)[None, :]
    tl.store(source.factors + place, factor.to(tl.float32), mask=asks[:, None])
    # Other threads of this program load the factors.
    tl.debug_barrier()
    return tl.where(asks, kept, candidate), word


@triton.jit
def _float_entry(values, lane, index):
    """`entry` of floats."""
    return tl.sum(tl.where(lane == index[:, None], values, 0.0), 1)


@triton.jit
def _with_entry(values, lane, index, new, where):
    """`values` [R, N] with `new` [R] at `index` [R] in the rows `where` [R]."""
    return tl.where(where[:, None] & (lane == index[:, None]), new[:, None], values)


@triton.jit
def _linked_from(links, lane):
    """[R, N] int32: the node whose link leads to each node, -1 where there is none."""
    return tl.max(tl.where(links[:, None, :] == lane[:, :, None], lane[:, None, :], -1), 2)


@triton.jit
def _at(values, index, lane):
    """`values` [R, N] at `index` [R, N], -1 where that is below 0."""
    return tl.max(tl.where(index[:, :, None] == lane[:, None, :], values[:, None, :], -1), 2)


@triton.jit
def _parents(children, siblings, lane, NODES: tl.constexpr):
    """[R, N] int32: the parent that the links lead from, -1 for the root and for nodes that no links lead to."""
    above = _linked_from(children, lane)
    before = _linked_from(siblings, lane)
    # In each turn a node takes the parent of a sibling twice as far before it.
    reach = 1
    while reach < NODES:
        above = tl.where(above < 0, _at(above, before, lane), above)
        before = _at(before, before, lane)
        reach *= 2
    return above


@triton.jit
def _requests(temperature_ptr, batch, STATIC: tl.constexpr):
    request = tl.program_id(1) * STATIC.BLOCK_B + tl.arange(0, STATIC.BLOCK_B)
    temperature = tl.load(temperature_ptr + request, mask=request < batch, other=0.0)
    lane, column = tl.arange(0, STATIC.BLOCK_N)[None, :], tl.arange(0, STATIC.BLOCK_D)[None, :]
    return _Batch(request, request < batch, lane, column, temperature)


@triton.jit
def _load_tree(source, origin, at, tokens_ptr, links, STATIC: tl.constexpr):
    """The trees, with p and q of every node. All is loaded at once: a load inside the loop would wait for another."""
    NODES: tl.constexpr = STATIC.NODES
    place = at.request.to(tl.int64)[:, None] * NODES + at.lane
    live = at.live[:, None] & (at.lane < NODES)
    tokens = tl.load(tokens_ptr + place, mask=live, other=-1)
    usable = live & (tl.load(source.of.valid + place, mask=live, other=0) != 0)
    children = tl.load(links.first_child + place, mask=usable, other=-1)
    siblings = tl.load(links.next_sibling + place, mask=live, other=-1)
    tokens = tl.where((tokens >= 0) & (tokens < STATIC.VOCAB), tokens, -1).to(tl.int32)
    # Links of sampled trees lead to later nodes; others are none, so that no path is endless.
    children = tl.where((children > at.lane) & (children < NODES), children, -1)
    siblings = tl.where((siblings > at.lane) & (siblings < NODES), siblings, -1)
    argmax = tl.load(source.of.argmax + place, mask=live, other=-1).to(tl.int32)
    parents = _parents(children, siblings, at.lane, NODES)
    if source.factors is not None:
        siblings = tl.where((at.temperature > 0)[:, None], -1, siblings)  # of sampled children only the best is kept
    draft_rows = v.draft_row(source.of.draft_rows, at.request[:, None], at.lane, live, NODES, STATIC.DRAFT_ROWS)
    known = live & (parents >= 0) & (tokens >= 0) & (at.temperature > 0)[:, None]
    judging_row = at.request[:, None] * NODES + parents
    terms = v.target_terms(source, at.temperature[:, None], judging_row, known)
    p = v.target_prob(source, terms, judging_row, tokens, known, STATIC.PROBS)
    sampled_from = v.draft_row(source.of.draft_rows, at.request[:, None], parents, known, NODES, STATIC.DRAFT_ROWS)
    q = v.draft_prob(source, sampled_from, tokens, known, STATIC.VOCAB)
    uniforms = v.judging_uniforms(origin, at.request, at.live, at.lane, NODES)
    return _Tree(tokens, children, siblings, parents, argmax, draft_rows, p, q, uniforms)


@triton.jit
def _first_child(tree, lane, end, depth, DEPTH: tl.constexpr):
    """The first child of `end` that may be judged, -1 where there is none."""
    return tl.where(depth < DEPTH, v.entry(tree.children, lane, end), -1)


@triton.jit
def _enter(source, node, tree, lane, end, candidate, state, k_seq_rate, asks, word, STATIC: tl.constexpr):
    """The values with which a node is entered: the child to judge first, m, and the c of `k_seq`; and the next word."""
    own = tree.parents == end[:, None]
    qs = tl.where(own, tree.q, 0.0)
    mass = state.mass
    if source.factors is not None:
        ps = tl.where(own, tree.p, 0.0)
        candidate, word = _keep_best_child(source, node, ps, qs, candidate, lane, asks, word, STATIC)
        mass = tl.where(asks, 1.0, mass)  # the mass of what is kept
    else:
        everything = mass * 0.0 - 1.0
        whole, _, word = _mass(source, node, everything, asks, word, False, STATIC)
        mass = tl.where(asks, whole, mass)
    if STATIC.RULE == "k_seq":
        samples = tl.sum((qs > 0).to(tl.int32), 1)
        found, word = _k_seq_rate(source, node, mass, samples, asks, word, STATIC)
        k_seq_rate = tl.where(asks, found, k_seq_rate)
    return candidate, _State(state.weight, state.rate, state.left, state.due, mass), k_seq_rate, word


@triton.jit
def _was_rejected(tree, missed, token, end):
    """[R]: whether a rejected child of `end` carries `token`; without replacement another child was not sampled."""
    same = (tree.tokens == token[:, None]) & (tree.parents == end[:, None])
    return tl.max(tl.where(same, missed, 0), 1) != 0


@triton.jit
def _settle(source, node, state, asks, word, STATIC: tl.constexpr):
    """The state after the pending rejection, and the next word; an empty residual leaves c and s as they are."""
    raised = tl.where(asks, state.rate + state.due, 0.0)
    mass, _, word = _mass(source, node, raised, asks, word, False, STATIC)
    weight = state.weight
    if STATIC.BOTTOM_UP:
        part = weight * mass / state.left
        below = part + 1.0 - weight
        weight = tl.where(asks & (below > 0), part / tl.where(below > 0, below, 1.0), weight)
    rate = tl.where(asks & (mass > 0), raised, state.rate)
    left = tl.where(asks & (mass > 0), mass, state.left)
    return _State(weight, rate, left, tl.where(asks, 0.0, state.due), state.mass), word


@triton.jit
def _judge(state, k_seq_rate, p, q, judged, right, K_SEQ: tl.constexpr):
    """The probability that the child is accepted, what its rejection adds to c, and m."""
    mass = tl.where(judged, tl.maximum(state.mass, q), state.mass)  # m >= q but for rounding
    if K_SEQ:
        ratio = p / tl.where(judged, k_seq_rate * q, 1.0)
        rises = k_seq_rate
    else:
        ratio = state.weight * (p - state.rate * q) * mass / (state.left * q)
        rises = state.left / tl.where(state.weight * mass > 0, state.weight * mass, 1.0)
    share = tl.where(judged, tl.minimum(tl.maximum(ratio, 0.0), 1.0), tl.where(right, state.weight, 0.0))
    return share, rises, mass


@triton.jit
def _reject(state, missed, lane, candidate, q, rises, mass, misses, WITHOUT_REPLACEMENT: tl.constexpr):
    """The state with a rejection pending in the rows `misses`, and the rejected nodes [R, N]."""
    if WITHOUT_REPLACEMENT:
        mass = tl.where(misses, mass - q, mass)
        missed = _with_entry(missed, lane, candidate, candidate * 0 + 1, misses)
    due = tl.where(misses & (state.weight > 0), rises, state.due)
    return _State(state.weight, state.rate, state.left, due, mass), missed


@triton.jit
def _with_state(saved, lane, node, state, where):
    """The states `saved` [R, N] with `state` [R] at `node` [R] in the rows `where` [R]."""
    weight = _with_entry(saved.weight, lane, node, state.weight, where)
    rate = _with_entry(saved.rate, lane, node, state.rate, where)
    left = _with_entry(saved.left, lane, node, state.left, where)
    due = _with_entry(saved.due, lane, node, state.due, where)
    return _State(weight, rate, left, due, _with_entry(saved.mass, lane, node, state.mass, where))


@triton.jit
def _saved_state(saved, lane, node, state, where):
    """`state` [R], in the rows `where` [R] the saved state of `node` [R]."""
    weight = tl.where(where, _float_entry(saved.weight, lane, node), state.weight)
    rate = tl.where(where, _float_entry(saved.rate, lane, node), state.rate)
    left = tl.where(where, _float_entry(saved.left, lane, node), state.left)
    due = tl.where(where, _float_entry(saved.due, lane, node), state.due)
    return _State(weight, rate, left, due, tl.where(where, _float_entry(saved.mass, lane, node), state.mass))


@triton.jit
def _entered_state(state, weight, where):
    """`state`, in the rows `where` reset for a node of weight `weight` whose children are not judged yet."""
    rate = tl.where(where, 0.0, state.rate)
    return _State(weight, rate, tl.where(where, 1.0, state.left), tl.where(where, 0.0, state.due), state.mass)


@triton.jit
def _store_end(
    inverse_rate_ptr, path_ptr, state_ptr, batch, at, end, path, state, NODES: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Store the path and what the residual kernel needs of its last node; the first program of a team does."""
    writes = at.live & (tl.program_id(0) == 0)
    rate = state.rate + state.due
    inverse = (1.0 / tl.where(rate > 0, rate, 1.0)).to(tl.float32)
    tl.store(inverse_rate_ptr + at.request.to(tl.int64) * NODES + end, inverse, mask=writes)
    tl.store(state_ptr + at.request, tl.where(rate > 0, NODES, end), mask=writes)
    tl.store(state_ptr + batch + at.request, end, mask=writes)
    out = at.request.to(tl.int64)[:, None] * (DEPTH + 1) + at.column
    tl.store(path_ptr + out, path, mask=writes[:, None] & (at.column <= DEPTH))


@triton.jit(do_not_specialize=["batch", "splits"])
def _top_down_kernel(
    tokens_ptr,  # [B, N] int64
    links,  # TreeLinks
    of,  # Rows
    origin,  # Uniforms
    words_ptr,  # [B, WORDS] int64, zeros; None for teams of one
    inverse_rate_ptr,  # [B, N] float32: at the last node 1 / c, 1 where no child was rejected there
    path_ptr,  # [B, DEPTH + 1] int32: nodes from the root on, then -1
    state_ptr,  # [2, B] int32: N where the residual of the last node is sampled, else that node; that node
    batch,
    row_stride,
    splits,  # programs of a team; where there are several, BLOCK_B is 1
    STATIC: tl.constexpr,  # _Static
):
    NODES: tl.constexpr = STATIC.NODES
    DEPTH: tl.constexpr = STATIC.DEPTH
    RULE: tl.constexpr = STATIC.RULE
    at = _requests(of.temperature, batch, STATIC)
    source = Distributions(of, row_stride, batch * NODES, None, words_ptr, splits)
    tree = _load_tree(source, origin, at, tokens_ptr, links, STATIC)
    end = at.request * 0
    depth = end
    path = tl.where(at.column == 0, 0, -1) + end[:, None]
    missed = at.lane * 0 + end[:, None]
    zero = end.to(tl.float64)
    one = zero + 1.0
    state = _State(one, zero, one, zero, zero)
    k_seq_rate = zero
    candidate = _first_child(tree, at.lane, end, depth, DEPTH)
    going = at.live
    fresh = at.live  # m of the node is not known yet
    word = 0
    step = 0
    while _any(going) & (step < 2 * NODES):
        node = _Node(at.request * NODES + end, v.entry(tree.draft_rows, at.lane, end), at.temperature)
        has = going & (candidate >= 0)
        sampled = has & (at.temperature > 0)
        if _any(sampled & fresh):
            _, state, k_seq_rate, word = _enter(
                source, node, tree, at.lane, end, candidate, state, k_seq_rate, sampled & fresh, word, STATIC
            )
            fresh = fresh & (sampled == 0)
        token = v.entry(tree.tokens, at.lane, candidate)
        p = _float_entry(tree.p, at.lane, candidate).to(tl.float64)
        q = _float_entry(tree.q, at.lane, candidate)
        judged = sampled & (q > 0)
        if RULE == "without_replacement":
            judged &= _was_rejected(tree, missed, token, end) == 0
        q = tl.where(judged, q, 1.0).to(tl.float64)
        if RULE != "k_seq":
            settles = judged & (state.due > 0)
            if _any(settles):
                state, word = _settle(source, node, state, settles, word, STATIC)
        right = has & (at.temperature <= 0) & (token == v.entry(tree.argmax, at.lane, end))
        share, rises, mass = _judge(state, k_seq_rate, p, q, judged, right, RULE == "k_seq")
        goes = _float_entry(tree.uniforms, at.lane, candidate) < share
        state, missed = _reject(
            state, missed, at.lane, candidate, q, rises, mass, judged & (goes == 0), RULE == "without_replacement"
        )
        following = v.entry(tree.siblings, at.lane, tl.where(has, candidate, end))
        depth += goes.to(tl.int32)
        end = tl.where(goes, candidate, end)
        path = tl.where(goes[:, None] & (at.column == depth[:, None]), end[:, None], path)
        state = _entered_state(state, state.weight, goes)
        candidate = tl.where(goes, _first_child(tree, at.lane, end, depth, DEPTH), following)
        fresh = fresh | goes
        going = going & has
        step += 1
    _store_end(inverse_rate_ptr, path_ptr, state_ptr, batch, at, end, path, state, NODES, DEPTH)


@triton.jit(do_not_specialize=["batch", "splits"])
def _bottom_up_kernel(  # arguments as of `_top_down_kernel`
    tokens_ptr,
    links,
    of,
    origin,
    words_ptr,
    factors_ptr,  # [splits, B, N, CLASSES] float32: q' / q by class under `greedy_paths`, a copy a program; else None
    inverse_rate_ptr,
    path_ptr,
    state_ptr,
    batch,
    row_stride,
    splits,
    STATIC: tl.constexpr,
):
    NODES: tl.constexpr = STATIC.NODES
    DEPTH: tl.constexpr = STATIC.DEPTH
    at = _requests(of.temperature, batch, STATIC)
    if factors_ptr is not None:
        factors_ptr += tl.program_id(0).to(tl.int64) * batch * NODES * _CLASSES
    source = Distributions(of, row_stride, batch * NODES, factors_ptr, words_ptr, splits)
    tree = _load_tree(source, origin, at, tokens_ptr, links, STATIC)
    end = at.request * 0
    depth = end
    path = tl.where(at.column == 0, 0, -1) + end[:, None]
    missed = at.lane * 0 + end[:, None]
    zero = end.to(tl.float64)
    one = zero + 1.0
    state = _State(one, zero, one, zero, zero)
    some = tree.uniforms  # every saved entry is written before it is read
    saved = _State(some, some, some, some, some)
    candidate = _first_child(tree, at.lane, end, depth, DEPTH)
    going = at.live
    fresh = at.live  # m of the node is not known yet
    word = 0
    step = 0
    while _any(going) & (step < 2 * NODES):
        node = _Node(at.request * NODES + end, v.entry(tree.draft_rows, at.lane, end), at.temperature)
        has = going & (candidate >= 0)
        sampled = has & (at.temperature > 0)
        if _any(sampled & fresh):
            candidate, state, _, word = _enter(
                source, node, tree, at.lane, end, candidate, state, zero, sampled & fresh, word, STATIC
            )
            fresh = fresh & (sampled == 0)
        token = v.entry(tree.tokens, at.lane, candidate)
        p = _float_entry(tree.p, at.lane, candidate)
        q = _float_entry(tree.q, at.lane, candidate)
        judged = sampled & (q > 0)
        if factors_ptr is None:
            judged &= _was_rejected(tree, missed, token, end) == 0
        q = tl.where(judged, v.kept_prob(source, node.row, p, q, judged), 1.0).to(tl.float64)
        uniform = _float_entry(tree.uniforms, at.lane, end)
        leaves = going & (has == 0) & (end > 0)  # all children of the node are judged: now it is judged itself
        settles = (judged | (leaves & (uniform < state.weight))) & (state.due > 0)
        if _any(settles):
            state, word = _settle(source, node, state, settles, word, STATIC)
        right = has & (at.temperature <= 0) & (token == v.entry(tree.argmax, at.lane, end))
        share, rises, mass = _judge(state, zero, p.to(tl.float64), q, judged, right, False)
        # Nothing hangs on a leaf, which is judged at once.
        leaf = (v.entry(tree.children, at.lane, candidate) < 0) | (depth + 1 >= DEPTH)
        goes = (share > 0) & ((leaf == 0) | (_float_entry(tree.uniforms, at.lane, candidate) < share))
        # A child that is entered has been rejected by the time the traversal returns to its parent.
        state, missed = _reject(state, missed, at.lane, candidate, q, rises, mass, judged, factors_ptr is None)
        following = v.entry(tree.siblings, at.lane, tl.where(has, candidate, end))
        returns = leaves & (uniform >= state.weight)
        parent = v.entry(tree.parents, at.lane, end)
        saved = _with_state(saved, at.lane, end, state, goes)
        state = _saved_state(saved, at.lane, parent, state, returns)
        state = _entered_state(state, tl.where(goes, share, state.weight), goes)
        path = tl.where(returns[:, None] & (at.column == depth[:, None]), -1, path)
        depth += goes.to(tl.int32) - returns.to(tl.int32)
        end = tl.where(goes, candidate, tl.where(returns, parent, end))
        path = tl.where(goes[:, None] & (at.column == depth[:, None]), end[:, None], path)
        candidate = tl.where(goes, _first_child(tree, at.lane, end, depth, DEPTH), following)
        fresh = fresh | goes
        going = going & (has | returns)
        step += 1
    _store_end(inverse_rate_ptr, path_ptr, state_ptr, batch, at, end, path, state, NODES, DEPTH)


def judge_tree(
    call: Verification, of: Rows, origin: Uniforms, judged: Tensor, state: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Fill `judged` [B, N] (1 / c at the last node) and `state` [2, B]; returns the path [B, D + 1] int32, and under
    `greedy_paths` the factors [B, N, CLASSES]."""
    rule, max_depth, values = call.rule, call.max_depth, of.target
    (batch, num_nodes), vocab, device = call.tokens.shape, values.shape[-1], values.device
    config = ACCEPTANCE[current_chip(values)]
    block_v = min(max(triton.next_power_of_2(vocab), d.MIN_SCAN), config.pass_width)
    splits = max(1, min(num_processors(values) // max(batch, 1), triton.cdiv(vocab, block_v), MOST_PROGRAMS))
    kinds = v.CLASSES if rule == "greedy_paths" else 0
    num_words = num_nodes * (4 + kinds)
    if rule == "k_seq":
        num_words = min(max_depth + 1, num_nodes) * (1 + 2 * RATE_STEPS)
    path = torch.empty(batch, max_depth + 1, dtype=torch.int32, device=device)
    words = torch.zeros(batch, num_words, dtype=torch.int64, device=device) if splits > 1 else None
    factors = torch.empty(splits, batch, num_nodes, kinds, device=device) if kinds else None
    warps = max(block_v // config.pass_lanes, 1)
    if kinds and warps > 8:
        block_v //= 2  # sums by class take many registers
    block_b = d.rows_per_program(batch, config.max_requests, block_v)
    bottom_up = rule in BOTTOM_UP_RULES
    static = _Static(
        NODES=num_nodes, DEPTH=max_depth, DRAFT_ROWS=of.draft.shape[1], VOCAB=vocab, PROBS=call.probabilities,
        WORDS=num_words, RULE=rule, BOTTOM_UP=bottom_up, BLOCK_B=block_b, BLOCK_N=lanes(num_nodes),
        BLOCK_D=lanes(max_depth + 1), BLOCK_V=block_v,
    )  # fmt: skip
    launch(
        _bottom_up_kernel if bottom_up else _top_down_kernel, (splits, triton.cdiv(batch, block_b)), call.tokens,
        call.tree, of, origin, words, *((factors,) if bottom_up else ()), judged, path, state, batch,
        values.stride(0), splits, num_warps=warps, STATIC=static,
        **(dict(launch_cooperative_grid=True) if splits > 1 else {}),
    )  # fmt: skip
    return path, None if factors is None else factors[0]
