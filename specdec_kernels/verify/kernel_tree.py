# mypy: ignore-errors
"""The kernel that judges drawn trees; formulas in `reference_tree`.

Nothing of the size of the vocabulary is written, because every residual at a node is max(p - c q, 0) with one number c:
c_1 = 0, and a rejection at residual mass s, draft mass m and weight w adds s / (w m) to c (w = 1 from the root down).
(A difference of the form max(max(p - c q, 0) - d q, 0) is max(p - (c + d) q, 0). Without replacement m is what the
rejected siblings have left of q. They keep their place in q: a token that can be rejected has w p < q, hence no
residual at its c, nor at any larger one.) Under `k_seq` c is rho / m.

A team of programs walks through the tree of a request. All of them decide the same, and each reads its share of a row
when a sum over the vocabulary is asked for: m where a node is entered, s behind a rejection. s is due, and is summed
only where another child is judged with it, or under the rules from the leaves up where the node itself may still be
accepted (its weight never grows). Sums are counted in whole units, so they are exact in every order of addition, and
no bit depends on the number of programs. From the root down a child is entered if it is accepted. From the leaves up
every child that may be accepted is entered, and the walk goes back to the parent where neither it nor a node below it
was accepted; what it knew of the parent is kept in lanes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, lanes, launch, num_processors
from specdec_kernels.sampling import device as d
from specdec_kernels.tree.types import TreeLinks
from specdec_kernels.verify.configs import ACCEPTANCE
from specdec_kernels.verify.device import (
    CLASSES,
    draft_prob,
    draft_row,
    entry,
    judging_uniforms,
    skewed_prob,
    target_prob,
    target_terms,
    token_class,
)
from specdec_kernels.verify.types import BOTTOM_UP_RULES, WITHOUT_REPLACEMENT_RULES

_CLASSES = tl.constexpr(CLASSES)
_UNITS = tl.constexpr(2.0**46)  # of a mass
_LEAST = tl.constexpr(2.0**-46)  # the smallest sum above 0
_MOST = tl.constexpr(8.0)  # mass that a program counts: p sums to 1, and q should
_MOST_UNITS = tl.constexpr(1 << 49)
_PROGRAM = tl.constexpr(1 << 56)  # what a program counts for in the word of a sum
MOST_PROGRAMS = 64  # of a team
RATE_STEPS = 24
_RATE_STEPS = tl.constexpr(RATE_STEPS)
_RATE_ERROR = tl.constexpr(2.0**-36)  # of rho, and of the equation that it solves


@triton.jit
def _any(flags):
    """Whether one of the flags is set."""
    return tl.max(flags.to(tl.int32), 0) > 0


@triton.jit
def _in_units(mass):
    return (tl.minimum(mass.to(tl.float64), _MOST) * _UNITS + 0.5).to(tl.int64)


@triton.jit
def _team_sum(part, words_ptr, place, splits):
    """float64: the sum of `part` (int64, units) over the programs of a team, which wait here for each other.

    The words at `place` are 0 and serve this call alone. Every program adds its units and, above them, one for itself:
    a word is the sum as soon as it counts all programs, and no other memory has to be in order. A team of one has none.
    """
    part = tl.minimum(part, _MOST_UNITS)
    if words_ptr is not None:
        tl.atomic_add(words_ptr + place, part + _PROGRAM, sem="relaxed")
        word = tl.load(words_ptr + place, volatile=True)
        while tl.min(word // _PROGRAM) < splits:
            word = tl.load(words_ptr + place, volatile=True)
        part = word % _PROGRAM
    return part.to(tl.float64) / _UNITS


@triton.jit
def _mass(
    values_ptr, draft_ptr, factors_ptr, distribution_ptr, words_ptr, temperature, row, of_draft, rate, rows, row_stride,
    splits, word, asks, SLOPE: tl.constexpr,
    VOCAB: tl.constexpr, PROBS: tl.constexpr, WORDS: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[R] float64: sum of max(p - rate q, 0), or with a rate below 0 the sum of q; with SLOPE also the sum of q where
    p > rate q; and the next word."""
    lane, both = tl.arange(0, BLOCK_V)[None, :], asks & (rate >= 0)
    top, floor, total, scale = target_terms(distribution_ptr, temperature, row, rows, both)
    mass = tl.zeros((row.shape[0], BLOCK_V), tl.int64)
    slope = mass
    for start in tl.range(tl.program_id(0) * BLOCK_V, VOCAB, splits * BLOCK_V, num_stages=STAGES):
        column = start + lane
        inside = column < VOCAB
        with_p = both[:, None] & inside
        p = target_prob(
            values_ptr, top[:, None], floor[:, None], total[:, None], scale[:, None], row[:, None], column, row_stride,
            with_p, PROBS,
        )  # fmt: skip
        q = draft_prob(draft_ptr, of_draft[:, None], column, asks[:, None] & inside, VOCAB)
        q = skewed_prob(factors_ptr, row[:, None], p, q, with_p).to(tl.float64)
        left = tl.where(both[:, None], p.to(tl.float64) - rate[:, None] * q, q)
        mass += _in_units(tl.maximum(left, 0.0))
        if SLOPE:
            slope += _in_units(tl.where(left > 0, q, 0.0))
    place = tl.program_id(1) * WORDS + word + row * 0
    whole = _team_sum(tl.sum(mass, 1), words_ptr, place, splits)
    if SLOPE:
        return whole, _team_sum(tl.sum(slope, 1), words_ptr, place + 1, splits), word + 2
    else:
        return whole, whole, word + 1


@triton.jit
def _k_seq_rate(
    values_ptr, draft_ptr, distribution_ptr, words_ptr, temperature, row, of_draft, draft_mass, draws, rows, row_stride,
    splits, word, asks,
    VOCAB: tl.constexpr, PROBS: tl.constexpr, WORDS: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[R] float64: rho / m, by Newton's method between 1 and k; and the next word.

    With r = sum max(p - rho q, 0) the function r - (1 - (1 - r) / rho)^k falls in rho and is 0 at the rho of `k_seq`.
    """
    inverse = 1.0 / tl.maximum(draft_mass, _LEAST)
    low, high, times = inverse * 0.0 + 1.0, tl.maximum(draws, 1).to(tl.float64), draws.to(tl.float64)
    rho, step = low, 0
    asks = asks & (draws > 1)
    while _any(asks) & (step < _RATE_STEPS):
        left, slope, word = _mass(
            values_ptr, draft_ptr, None, distribution_ptr, words_ptr, temperature, row, of_draft, rho * inverse, rows,
            row_stride, splits, word, asks, True, VOCAB, PROBS, WORDS, BLOCK_V, STAGES,
        )  # fmt: skip
        slope *= -inverse
        rejected = tl.maximum(1.0 - (1.0 - left) / rho, 0.0)
        power = tl.exp((times - 1.0) * tl.log(tl.where(rejected > 0, rejected, 1.0)))
        power = tl.where(rejected > 0, power, 0.0)
        surplus = left - power * rejected
        falls = slope - times * power * ((1.0 - left) / (rho * rho) + slope / rho)
        low, high = tl.where(surplus > 0, rho, low), tl.where(surplus > 0, high, rho)
        asks = asks & (tl.abs(surplus) > _RATE_ERROR) & (high - low > _RATE_ERROR)
        guess = rho - surplus / tl.where(falls < 0, falls, -1.0)
        guess = tl.where((falls < 0) & (guess > low) & (guess < high), guess, 0.5 * (low + high))
        rho = tl.where(asks, guess, rho)
        step += 1
    return rho * inverse, word


@triton.jit
def _class_masses(
    values_ptr, draft_ptr, distribution_ptr, words_ptr, temperature, row, of_draft, rows, row_stride, splits, word,
    asks, VOCAB: tl.constexpr, PROBS: tl.constexpr, WORDS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """[R, CLASSES] float64: mass of q by class; and the next word."""
    lane, kinds = tl.arange(0, BLOCK_V)[None, :], tl.arange(0, _CLASSES)[None, :]
    top, floor, total, scale = target_terms(distribution_ptr, temperature, row, rows, asks)
    # Parts of a tile that one warp sums.
    WIDTH: tl.constexpr = BLOCK_V if BLOCK_V < 128 else 128
    found = tl.zeros((row.shape[0], _CLASSES, BLOCK_V // WIDTH), tl.int64)
    for start in tl.range(tl.program_id(0) * BLOCK_V, VOCAB, splits * BLOCK_V):
        column = start + lane
        live = asks[:, None] & (column < VOCAB)
        p = target_prob(
            values_ptr, top[:, None], floor[:, None], total[:, None], scale[:, None], row[:, None], column, row_stride,
            live, PROBS,
        )  # fmt: skip
        q = draft_prob(draft_ptr, of_draft[:, None], column, live, VOCAB)
        kind, units = token_class(p, q), _in_units(q)
        for each in range(_CLASSES):
            of_class = tl.where(kind == each, units, 0)
            of_class = tl.sum(tl.reshape(of_class, (row.shape[0], BLOCK_V // WIDTH, WIDTH)), 2)
            found += tl.where((kinds == each)[:, :, None], of_class[:, None, :], 0)
    place = tl.program_id(1) * WORDS + word + kinds + row[:, None] * 0
    return _team_sum(tl.sum(found, 2), words_ptr, place, splits), word + _CLASSES


@triton.jit
def _keep_best_child(
    values_ptr, draft_ptr, factors_ptr, distribution_ptr, words_ptr, temperature, candidate, ps, qs, row, of_draft,
    lane, rows, row_stride, splits, word, asks,
    NODES: tl.constexpr, VOCAB: tl.constexpr, PROBS: tl.constexpr, WORDS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The first child of the highest class among those with draft probability `qs` [R, N]; the factors q' / q of each
    class are stored. Rows that do not ask, or have no draws, keep their candidate."""
    drawn = qs > 0
    kind = tl.where(drawn, token_class(ps, qs), -1)
    best, draws = tl.max(kind, 1), tl.sum(drawn.to(tl.int32), 1)
    kept = tl.min(tl.where(drawn & (kind == best[:, None]), lane, NODES), 1)
    asks = asks & (draws > 0)
    mass, word = _class_masses(
        values_ptr, draft_ptr, distribution_ptr, words_ptr, temperature, row, of_draft, rows, row_stride, splits, word,
        asks, VOCAB, PROBS, WORDS, BLOCK_V,
    )  # fmt: skip
    whole = tl.sum(mass, 1)
    share = mass / tl.maximum(whole, _LEAST)[:, None]
    up_to = tl.cumsum(share, 1)
    before = tl.maximum(up_to - share, 0.0)
    power, lower, times = up_to * 0.0 + 1.0, up_to * 0.0 + 1.0, 0
    while times < tl.max(draws, 0):
        power = tl.where(times < draws[:, None], power * up_to, power)
        lower = tl.where(times < draws[:, None], lower * before, lower)
        times += 1
    # Of q as it is recorded: q' = q / m times the share of the kept mass.
    factor = (power - lower) / tl.maximum(mass, _LEAST)
    place = row.to(tl.int64)[:, None] * _CLASSES + tl.arange(0, _CLASSES)[None, :]
    tl.store(factors_ptr + place, factor.to(tl.float32), mask=asks[:, None])
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
def _behind_rejection(
    values_ptr, draft_ptr, factors_ptr, distribution_ptr, words_ptr, temperature, row, of_draft, weight, rate, due,
    left, rows, row_stride, splits, word, asks,
    VOCAB: tl.constexpr, PROBS: tl.constexpr, WORDS: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
    BOTTOM_UP: tl.constexpr,
):  # fmt: skip
    """Weight, c and s behind the rejection that is due; an empty residual leaves c and s as they are."""
    raised = tl.where(asks, rate + due, 0.0)
    mass, _, word = _mass(
        values_ptr, draft_ptr, factors_ptr, distribution_ptr, words_ptr, temperature, row, of_draft, raised, rows,
        row_stride, splits, word, asks, False, VOCAB, PROBS, WORDS, BLOCK_V, STAGES,
    )  # fmt: skip
    if BOTTOM_UP:
        part = weight * mass / left
        below = part + 1.0 - weight
        weight = tl.where(asks & (below > 0), part / tl.where(below > 0, below, 1.0), weight)
    shrinks = asks & (mass > 0)
    return weight, tl.where(shrinks, raised, rate), tl.where(shrinks, mass, left), word


@triton.jit
def _enter(
    values_ptr, draft_ptr, factors_ptr, distribution_ptr, words_ptr, temperature, candidate, ps, qs, row, of_draft,
    lane, mass, k_seq_rate, rows, row_stride, splits, word, asks,
    NODES: tl.constexpr, VOCAB: tl.constexpr, PROBS: tl.constexpr, WORDS: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr, K_SEQ: tl.constexpr,
):  # fmt: skip
    """What is asked where a node is entered: the child to judge first, m, and the c of `k_seq`; and the next word.
    `ps` and `qs` [R, N] are p and q of its children, 0 elsewhere."""
    if factors_ptr is not None:
        candidate, word = _keep_best_child(
            values_ptr, draft_ptr, factors_ptr, distribution_ptr, words_ptr, temperature, candidate, ps, qs, row,
            of_draft, lane, rows, row_stride, splits, word, asks, NODES, VOCAB, PROBS, WORDS, BLOCK_V,
        )  # fmt: skip
        mass = tl.where(asks, 1.0, mass)  # the mass of what is kept
    else:
        whole, _, word = _mass(
            values_ptr, draft_ptr, None, distribution_ptr, words_ptr, temperature, row, of_draft, mass * 0.0 - 1.0,
            rows, row_stride, splits, word, asks, False, VOCAB, PROBS, WORDS, BLOCK_V, STAGES,
        )  # fmt: skip
        mass = tl.where(asks, whole, mass)
    if K_SEQ:
        found, word = _k_seq_rate(
            values_ptr, draft_ptr, distribution_ptr, words_ptr, temperature, row, of_draft, mass,
            tl.sum((qs > 0).to(tl.int32), 1), rows, row_stride, splits, word, asks, VOCAB, PROBS, WORDS, BLOCK_V,
            STAGES,
        )  # fmt: skip
        k_seq_rate = tl.where(asks, found, k_seq_rate)
    return candidate, mass, k_seq_rate, word


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
    above, before = _linked_from(children, lane), _linked_from(siblings, lane)
    # In each turn a node asks a sibling twice as far in front of it.
    reach = 1
    while reach < NODES:
        above = tl.where(above < 0, _at(above, before, lane), above)
        before = _at(before, before, lane)
        reach *= 2
    return above


@triton.jit
def _load_tree(
    tokens_ptr, first_child_ptr, next_sibling_ptr, valid_ptr, place, lane, live,
    NODES: tl.constexpr, VOCAB: tl.constexpr,
):  # fmt: skip
    """Tokens, first children and next siblings [B, N] int32, -1 where there is none or it cannot be judged."""
    tokens = tl.load(tokens_ptr + place, mask=live, other=-1)
    usable = live & (tl.load(valid_ptr + place, mask=live, other=0) != 0)
    children = tl.load(first_child_ptr + place, mask=usable, other=-1)
    siblings = tl.load(next_sibling_ptr + place, mask=live, other=-1)
    return (
        tl.where((tokens >= 0) & (tokens < VOCAB), tokens, -1).to(tl.int32),
        tl.where((children > lane) & (children < NODES), children, -1),
        tl.where((siblings > lane) & (siblings < NODES), siblings, -1),
    )


@triton.jit(do_not_specialize=["batch", "splits"])
def _walk_tree_kernel(  # one loop over what stands in registers, 21 run-time arguments: the tree and two distributions
    tokens_ptr,  # [B, N] int64
    first_child_ptr,  # [B, N] int32
    next_sibling_ptr,  # [B, N] int32
    values_ptr,  # [B * N, VOCAB], row stride row_stride
    draft_ptr,  # [B, DRAFT_ROWS, VOCAB] float32
    draft_rows_ptr,  # [B, N] int32, or None: node n has row n
    distribution_ptr,  # [4, B * N] float32
    greedy_ptr,  # [B * N] int64
    valid_ptr,  # [B * N] bool
    temperature_ptr,  # [B] float32
    seeds_ptr,  # [B] int64, or None
    positions_ptr,  # [B, N] int64, or None
    uniforms_ptr,  # [B, N + 1] float64, or None
    words_ptr,  # [B, WORDS] int64, zeros; None for teams of one
    factors_ptr,  # [splits, B, N, CLASSES] float32: q' / q by class under `greedy_paths`, a copy a program, else None
    inverse_rate_ptr,  # [B, N] float32: at the last node 1 / c, 1 where no child was rejected there
    path_ptr,  # [B, DEPTH + 1] int32: nodes from the root on, -1 behind
    state_ptr,  # [2, B] int32: N where the residual of the last node is drawn from, else that node; that node
    batch,
    row_stride,
    splits,  # programs of a team; where there are several, BLOCK_B is 1
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    DRAFT_ROWS: tl.constexpr,
    VOCAB: tl.constexpr,
    PROBS: tl.constexpr,
    WORDS: tl.constexpr,
    K_SEQ: tl.constexpr,
    WITHOUT_REPLACEMENT: tl.constexpr,
    BOTTOM_UP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    request = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    in_batch, rows = request < batch, batch * NODES
    lane, column = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_D)[None, :]
    place, live = request.to(tl.int64)[:, None] * NODES + lane, in_batch[:, None] & (lane < NODES)
    temperature = tl.load(temperature_ptr + request, mask=in_batch, other=0.0)
    tokens, children, siblings = _load_tree(
        tokens_ptr, first_child_ptr, next_sibling_ptr, valid_ptr, place, lane, live, NODES, VOCAB
    )
    argmax = tl.load(greedy_ptr + place, mask=live, other=-1).to(tl.int32)
    above = _parents(children, siblings, lane, NODES)
    of_drafts = draft_row(draft_rows_ptr, request[:, None], lane, live, NODES, DRAFT_ROWS)
    known = live & (above >= 0) & (tokens >= 0) & (temperature > 0)[:, None]
    judging_rows = request[:, None] * NODES + above
    top, floor, total, scale = target_terms(distribution_ptr, temperature[:, None], judging_rows, rows, known)
    ps = target_prob(values_ptr, top, floor, total, scale, judging_rows, tokens, row_stride, known, PROBS)
    drawn_from = draft_row(draft_rows_ptr, request[:, None], above, known, NODES, DRAFT_ROWS)
    qs = draft_prob(draft_ptr, drawn_from, tokens, known, VOCAB)
    uniforms = judging_uniforms(seeds_ptr, positions_ptr, uniforms_ptr, request, in_batch, lane, NODES)
    if factors_ptr is not None:
        factors_ptr += tl.program_id(0).to(tl.int64) * rows * _CLASSES

    end, depth = request * 0, request * 0
    path = tl.where(column == 0, 0, -1) + tl.zeros((BLOCK_B, BLOCK_D), tl.int32)
    weight, rate = tl.full((BLOCK_B,), 1.0, tl.float64), tl.zeros((BLOCK_B,), tl.float64)
    left, due, mass, k_seq_rate = weight, rate, rate, rate  # due: what a rejection adds to c, once s is known behind it
    weights, rates, lefts, dues, masses = uniforms, uniforms, uniforms, uniforms, uniforms  # of the nodes above
    missed = tl.zeros((BLOCK_B, BLOCK_N), tl.int32)
    candidate = entry(children, lane, end)
    if DEPTH == 0:
        candidate = end - 1
    going, fresh = in_batch, in_batch
    word, step = 0, 0
    while _any(going) & (step < 2 * NODES):
        row, of_draft = request * NODES + end, entry(of_drafts, lane, end)
        has = going & (candidate >= 0)
        drawing = has & (temperature > 0)
        enters = drawing & fresh
        if _any(enters):
            own = above == end[:, None]
            candidate, mass, k_seq_rate, word = _enter(
                values_ptr, draft_ptr, factors_ptr, distribution_ptr, words_ptr, temperature, candidate,
                tl.where(own, ps, 0.0), tl.where(own, qs, 0.0), row, of_draft, lane, mass, k_seq_rate, rows, row_stride,
                splits, word, enters, NODES, VOCAB, PROBS, WORDS, BLOCK_V, STAGES, K_SEQ,
            )  # fmt: skip
            fresh = fresh & (enters == 0)
        token = entry(tokens, lane, candidate)
        p, q = _float_entry(ps, lane, candidate), _float_entry(qs, lane, candidate)
        judged = drawing & (q > 0)
        if WITHOUT_REPLACEMENT:
            judged &= tl.max(tl.where((tokens == token[:, None]) & (above == end[:, None]), missed, 0), 1) == 0
        q = tl.where(judged, skewed_prob(factors_ptr, row, p, q, judged), 1.0).to(tl.float64)

        settles = judged & (due > 0)
        if BOTTOM_UP:
            uniform = _float_entry(uniforms, lane, end)
            settles |= going & (has == 0) & (end > 0) & (due > 0) & (uniform < weight)
        if K_SEQ == 0:
            if _any(settles):
                weight, rate, left, word = _behind_rejection(
                    values_ptr, draft_ptr, factors_ptr, distribution_ptr, words_ptr, temperature, row, of_draft, weight,
                    rate, due, left, rows, row_stride, splits, word, settles, VOCAB, PROBS, WORDS, BLOCK_V, STAGES,
                    BOTTOM_UP,
                )  # fmt: skip
                due = tl.where(settles, 0.0, due)

        mass = tl.where(judged, tl.maximum(mass, q), mass)  # true but for rounding
        if K_SEQ:
            ratio = p.to(tl.float64) / tl.where(judged, k_seq_rate * q, 1.0)
            rises = k_seq_rate
        else:
            ratio = weight * (p.to(tl.float64) - rate * q) * mass / (left * q)
            rises = left / tl.where(weight * mass > 0, weight * mass, 1.0)
        right = has & (temperature <= 0) & (token == entry(argmax, lane, end))
        share = tl.where(judged, tl.minimum(tl.maximum(ratio, 0.0), 1.0), tl.where(right, weight, 0.0))
        if BOTTOM_UP:
            # Nothing hangs on a leaf, which is judged at once.
            leaf = (entry(children, lane, candidate) < 0) | (depth + 1 >= DEPTH)
            goes, misses = (share > 0) & ((leaf == 0) | (_float_entry(uniforms, lane, candidate) < share)), judged
        else:
            goes = _float_entry(uniforms, lane, candidate) < share
            misses = judged & (goes == 0)
        due = tl.where(misses & (weight > 0), rises, due)
        if WITHOUT_REPLACEMENT:
            mass = tl.where(misses, mass - q, mass)
            missed = _with_entry(missed, lane, candidate, candidate * 0 + 1, misses)

        following = entry(siblings, lane, tl.where(has, candidate, end))
        if factors_ptr is not None:
            following = tl.where(temperature > 0, -1, following)
        ends = going & (has == 0)
        if BOTTOM_UP:
            returns = ends & (end > 0) & (uniform >= weight)
            ends = ends & (returns == 0)
            parent = entry(above, lane, end)
            weights = _with_entry(weights, lane, end, weight, goes)
            rates, dues = _with_entry(rates, lane, end, rate, goes), _with_entry(dues, lane, end, due, goes)
            lefts, masses = _with_entry(lefts, lane, end, left, goes), _with_entry(masses, lane, end, mass, goes)
            weight = tl.where(goes, share, tl.where(returns, _float_entry(weights, lane, parent), weight))
            rate = tl.where(returns, _float_entry(rates, lane, parent), rate)
            due = tl.where(returns, _float_entry(dues, lane, parent), due)
            left = tl.where(returns, _float_entry(lefts, lane, parent), left)
            mass = tl.where(returns, _float_entry(masses, lane, parent), mass)
            path = tl.where(returns[:, None] & (column == depth[:, None]), -1, path)
            depth, end = depth - returns.to(tl.int32), tl.where(returns, parent, end)
        depth, end = depth + goes.to(tl.int32), tl.where(goes, candidate, end)
        path = tl.where(goes[:, None] & (column == depth[:, None]), end[:, None], path)
        rate, due, left = tl.where(goes, 0.0, rate), tl.where(goes, 0.0, due), tl.where(goes, 1.0, left)
        first = tl.where(depth < DEPTH, entry(children, lane, end), -1)
        candidate, fresh = tl.where(goes, first, following), fresh | goes
        going = going & (ends == 0)
        step += 1

    rate += due
    writes = in_batch & (tl.program_id(0) == 0)
    inverse = (1.0 / tl.where(rate > 0, rate, 1.0)).to(tl.float32)
    tl.store(inverse_rate_ptr + request.to(tl.int64) * NODES + end, inverse, mask=writes)
    tl.store(state_ptr + request, tl.where(rate > 0, NODES, end), mask=writes)
    tl.store(state_ptr + batch + request, end, mask=writes)
    out = request.to(tl.int64)[:, None] * (DEPTH + 1) + column
    tl.store(path_ptr + out, path, mask=writes[:, None] & (column <= DEPTH))


def judge_tree(
    rule: str,
    tokens: torch.Tensor,
    tree: TreeLinks,
    rows_of_both: tuple[torch.Tensor | None, ...],
    selected: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    sources: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    judged: torch.Tensor,
    state: torch.Tensor,
    max_depth: int,
    sizes: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fill `judged` [B, N] (1 / c at the last node) and `state` [2, B], as the residual kernel reads them.

    Returns the path [B, D + 1] int32, and under `greedy_paths` the factors [B, N, CLASSES], else None.
    """
    (batch, num_nodes), values, device = tokens.shape, rows_of_both[0], tokens.device
    vocab, config = values.shape[-1], ACCEPTANCE[current_chip(tokens)]
    block_v = min(max(triton.next_power_of_2(vocab), d.MIN_SCAN), config.pass_width)
    splits = max(1, min(num_processors(tokens) // max(batch, 1), triton.cdiv(vocab, block_v), MOST_PROGRAMS))
    num_words, kinds = 4 * num_nodes, CLASSES if rule == "greedy_paths" else 0
    if rule == "k_seq":
        num_words = min(max_depth + 1, num_nodes) * (1 + 2 * RATE_STEPS)
    num_words += num_nodes * kinds
    path = torch.empty(batch, max_depth + 1, dtype=torch.int32, device=device)
    words = torch.zeros(batch, num_words, dtype=torch.int64, device=device) if splits > 1 else None
    factors = torch.empty(splits, batch, num_nodes, kinds, device=device) if kinds else None
    warps = max(block_v // config.pass_lanes, 1)
    if kinds and warps > 8:
        block_v //= 2  # sums by class take many registers
    block_b = d.rows_per_program(batch, config.max_requests, block_v)
    launch(
        _walk_tree_kernel, (splits, triton.cdiv(batch, block_b)), tokens, tree.first_child, tree.next_sibling,
        *rows_of_both, *selected, *sources, words, factors, judged, path, state, batch, values.stride(0), splits,
        num_warps=warps, DEPTH=max_depth, WORDS=num_words, K_SEQ=rule == "k_seq",
        WITHOUT_REPLACEMENT=rule in WITHOUT_REPLACEMENT_RULES, BOTTOM_UP=rule in BOTTOM_UP_RULES, BLOCK_B=block_b,
        BLOCK_N=lanes(num_nodes), BLOCK_D=lanes(max_depth + 1), BLOCK_V=block_v, STAGES=config.pass_stages, **sizes,
        **(dict(launch_cooperative_grid=True) if splits > 1 else {}),
    )  # fmt: skip
    return path, None if factors is None else factors[0]
