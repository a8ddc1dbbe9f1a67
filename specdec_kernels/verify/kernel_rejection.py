# mypy: ignore-errors
"""Kernels of the rules that need the draft's own distribution; formulas in `reference`.

Each row's distribution is (top, floor, total) from the sampling family; nothing of the size of the vocabulary is
written:

1. judge, one program per request: p and q of the drafted tokens, P_s, and tau under `rejection`. Trees are judged by
   `kernel_tree`, with 1 / c of the path's last row for P_s, and that row for tau.
2. residual, over groups of tokens: the sums of max(P_s p_s - q_s, 0) and of p_s, at row tau or (`block`) at all rows.
3. row sums (`block` only): Z of every row.
4. finish, one program per request: tau under `block`, the next token, the outcome.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling.device import Uniforms
from specdec_kernels.sampling.kernel import select
from specdec_kernels.sampling.types import BONUS_STREAM, RECOVER_STREAM
from specdec_kernels.verify import device as v
from specdec_kernels.verify.configs import ACCEPTANCE
from specdec_kernels.verify.device import Distributions, Rows
from specdec_kernels.verify.kernel_tree import judge_tree
from specdec_kernels.verify.types import TREE_RULES, Accepted, Verification

_RECOVER = tl.constexpr(RECOVER_STREAM)
_BONUS = tl.constexpr(BONUS_STREAM)


@triton.jit
def _leading(flags, node, END: tl.constexpr):
    """How many of the nodes 1, 2, ... are flagged before the first that is not; lanes from END on do not count."""
    return tl.min(tl.where((node >= 1) & (node < END) & (flags == 0), node, END), 1) - 1


@triton.jit
def _block_ratios(p, q, node, NODES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    """P_s of every node [B, N], see `reference`."""
    ratio = tl.where(q > 0, p / tl.where(q > 0, q, 1.0), (p > 0).to(tl.float32))
    kept = tl.full((BLOCK_B, BLOCK_N), 1.0, tl.float32)
    running = tl.full((BLOCK_B,), 1.0, tl.float32)
    for step in range(1, NODES):
        running = tl.minimum(running * tl.sum(tl.where(node == step, ratio, 0.0), 1), 1.0)
        kept = tl.where(node == step, running[:, None], kept)
    return kept


@triton.jit(do_not_specialize=["batch"])
def _judge_kernel(
    tokens_ptr,  # [B, N] int64
    first_child_ptr,  # [B, N] int32
    of,  # Rows
    origin,  # Uniforms
    judged_ptr,  # [1 or, with BLOCK_RULE, 2; B, N] float32: P_s, (written by the row sums) Z
    state_ptr,  # [2, B] int32: drafts in reach, tau (under BLOCK_RULE only of greedy requests)
    batch,
    row_stride,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK_RULE: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    in_batch = request < batch
    node = tl.arange(0, BLOCK_N)[None, :]
    here = in_batch[:, None] & (node >= 1) & (node < NODES)
    row = request[:, None] * NODES + node - 1  # the row that judges the node
    temperature = tl.load(of.temperature + request, mask=in_batch, other=0.0)[:, None]
    token = tl.load(tokens_ptr + row.to(tl.int64) + 1, mask=here, other=-1)
    child = tl.load(first_child_ptr + row, mask=here, other=-1)
    usable = tl.load(of.valid + row, mask=here, other=0) != 0
    reach = _leading(here & (child == node) & usable & (node <= DEPTH), node, NODES)
    in_reach = node <= reach[:, None]
    known = here & in_reach & (token >= 0) & (token < VOCAB)
    source = Distributions(of, row_stride, batch * NODES)
    terms = v.target_terms(source, temperature, row, known)
    p = tl.where(known, v.target_prob(source, terms, row, token, known, PROBS), 0.0)
    q = v.draft_prob(source, request[:, None] * (NODES - 1) + node - 1, token, known, VOCAB)

    argmax = tl.load(of.argmax + row, mask=here, other=-1)
    greedy_tau = _leading(here & in_reach & (token == argmax), node, NODES)
    if BLOCK_RULE:
        tau = greedy_tau
        kept = _block_ratios(p, q, node, NODES, BLOCK_B, BLOCK_N)
    else:
        uniform = v.judging_uniforms(origin, request, in_batch, node, NODES)
        sampled_tau = _leading(here & in_reach & (uniform * q < p), node, NODES)
        tau = tl.max(tl.where(temperature > 0, sampled_tau[:, None], greedy_tau[:, None]), 1)
        kept = tl.full((BLOCK_B, BLOCK_N), 1.0, tl.float32)
    tl.store(judged_ptr + row + 1, kept, mask=in_batch[:, None] & (node < NODES))
    tl.store(state_ptr + request, reach, mask=in_batch)
    tl.store(state_ptr + batch + request, tau, mask=in_batch)


@triton.jit(do_not_specialize=["strips", "batch"])
def _residual_kernel(
    of,  # Rows
    factors_ptr,  # [B, N, CLASSES] float32, or None, see `kernel_tree`
    judged_ptr,  # [1 or 2, B, N] float32
    state_ptr,  # [2, B] int32
    sums_ptr,  # [2, B * ROWS, GROUPS] float32: residual, target
    strips,  # B * ROWS * GROUPS
    batch,
    row_stride,
    NODES: tl.constexpr,
    DRAFT_ROWS: tl.constexpr,
    ROWS: tl.constexpr,  # NODES, or 1: row tau alone
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDTH: tl.constexpr,
):
    strip = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    in_strips = strip < strips
    entry = strip // GROUPS
    request = entry // ROWS
    reach = tl.load(state_ptr + request, mask=in_strips, other=0)
    step = entry - request * ROWS
    if ROWS == 1:
        step = tl.load(state_ptr + batch + request, mask=in_strips, other=0)
    temperature = tl.load(of.temperature + request, mask=in_strips, other=0.0)
    active = in_strips & (step <= reach) & (temperature > 0)
    row = request * NODES + step
    kept = tl.load(judged_ptr + row, mask=active, other=1.0)
    column = (strip - entry * GROUPS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    live = active[:, None] & (column < VOCAB)
    source = Distributions(of, row_stride, batch * NODES, factors_ptr)
    terms = v.target_terms(source, temperature[:, None], row[:, None], active[:, None])
    p = tl.where(live, v.target_prob(source, terms, row[:, None], column, live, PROBS), 0.0)
    # At the end of its reach nothing was rejected, so that nothing is subtracted.
    of_draft = v.draft_row(of.draft_rows, request, step, active & (step < reach), NODES, DRAFT_ROWS)
    q = v.draft_prob(source, of_draft[:, None], column, live, VOCAB)
    q = v.kept_prob(source, row[:, None], p, q, live)
    residual = tl.sum(tl.maximum(kept[:, None] * p - q, 0.0), 1)
    place = strip.to(tl.int64)
    tl.store(sums_ptr + place, residual, mask=in_strips)
    tl.store(sums_ptr + strips + place, tl.sum(p, 1), mask=in_strips)


@triton.jit(do_not_specialize=["rows"])
def _row_sums_kernel(
    sums_ptr,  # [R, GROUPS] float32
    left_ptr,  # [R] float32
    rows,
    GROUPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.arange(0, BLOCK_G)[None, :]
    live = (row < rows)[:, None] & (group < GROUPS)
    part = tl.load(sums_ptr + row.to(tl.int64)[:, None] * GROUPS + group, mask=live, other=0.0)
    tl.store(left_ptr + row, tl.sum(part, 1), mask=row < rows)


@triton.jit
def _block_length(
    origin, judged_ptr, request, in_batch, reach, batch, NODES: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """tau: the last node whose uniform is below its h."""
    node = tl.arange(0, BLOCK_N)[None, :]
    live = in_batch[:, None] & (node >= 1) & (node <= reach[:, None])
    place = request[:, None] * NODES + node
    kept = tl.load(judged_ptr + place, mask=live, other=0.0).to(tl.float64)
    left = tl.load(judged_ptr + batch * NODES + place, mask=live, other=0.0).to(tl.float64)
    uniform = v.judging_uniforms(origin, request, in_batch, node, NODES)
    below = left + 1.0 - kept
    h = tl.where(below > 0, left / tl.where(below > 0, below, 1.0), 1.0)
    h = tl.where(node == reach[:, None], kept, h)
    return tl.max(tl.where(live & (uniform < h), node, 0), 1)


@triton.jit
def _sampled_token(
    source, sums_ptr, temperature, kept, entry, row, of_draft, entries, active, uniform,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, PROBS: tl.constexpr, BLOCK_G: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Token sampled from the residual of `row`, else from the target's distribution; -1 where both are empty."""
    group = tl.arange(0, BLOCK_G)[None, :]
    place = entry.to(tl.int64)[:, None] * GROUPS + group
    live = active[:, None] & (group < GROUPS)
    residual = tl.load(sums_ptr + place, mask=live, other=0.0)
    target = tl.load(sums_ptr + entries.to(tl.int64) * GROUPS + place, mask=live, other=0.0)
    empty = tl.max(residual, 1) <= 0
    mass = tl.where(empty[:, None], target, residual)
    chosen, within = d.find(mass, uniform)
    start = tl.maximum(chosen, 0) * WIDTH
    column = start[:, None] + tl.arange(0, WIDTH)[None, :]
    live = active[:, None] & (column < VOCAB)
    terms = v.target_terms(source, temperature[:, None], row[:, None], active[:, None])
    p = tl.where(live, v.target_prob(source, terms, row[:, None], column, live, PROBS), 0.0)
    q = v.draft_prob(source, of_draft[:, None], column, live & (empty == 0)[:, None], VOCAB)
    q = v.kept_prob(source, row[:, None], p, q, live)
    place, _ = d.find(tl.maximum(tl.where(empty, 1.0, kept)[:, None] * p - q, 0.0), within)
    return tl.where(place >= 0, start + place, -1)


@triton.jit
def _nodes_kept(path_ptr, request, in_batch, column, tau, DEPTH: tl.constexpr):
    """Nodes of the path [B, D + 1], then -1; the node after each; the number of drafts [B]."""
    if path_ptr is None:
        path = tl.where(column <= tau[:, None], column, -1)
        onward = column + 1
        count = tau
    else:
        place = request.to(tl.int64)[:, None] * (DEPTH + 1) + column
        path = tl.load(path_ptr + place, mask=in_batch[:, None] & (column <= DEPTH), other=-1)
        onward = tl.load(path_ptr + place + 1, mask=in_batch[:, None] & (column < DEPTH), other=-1)
        count = tl.sum((path >= 0).to(tl.int32), 1) - 1
    return path, onward, count


@triton.jit(do_not_specialize=["batch"])
def _finish_kernel(
    tokens_ptr,  # [B, N] int64
    of,  # Rows
    factors_ptr,  # [B, N, CLASSES] float32, or None
    origin,  # Uniforms
    judged_ptr,  # [1 or 2, B, N] float32
    state_ptr,  # [2, B] int32
    sums_ptr,  # [2, B * ROWS, GROUPS] float32
    path_ptr,  # [B, DEPTH + 1] int32, or None: the nodes 0..tau of a chain
    lengths_ptr,  # [B] int64
    accepted,  # Accepted, written
    batch,
    row_stride,
    NODES: tl.constexpr,
    DRAFT_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_RULE: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    WIDTH: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    in_batch = request < batch
    source = Distributions(of, row_stride, batch * NODES, factors_ptr)
    temperature = tl.load(of.temperature + request, mask=in_batch, other=0.0)
    reach = tl.load(state_ptr + request, mask=in_batch, other=0)
    tau = tl.load(state_ptr + batch + request, mask=in_batch, other=0)
    if BLOCK_RULE:
        longest = _block_length(origin, judged_ptr, request, in_batch, reach, batch, NODES, BLOCK_N)
        tau = tl.where(temperature > 0, longest, tau)
    row = request * NODES + tau
    usable = tl.load(of.valid + row, mask=in_batch, other=0) != 0
    whole = tau == reach
    kept = tl.load(judged_ptr + row, mask=in_batch, other=1.0)
    place = request * (NODES + 1) + NODES - 1 + whole.to(tl.int32)
    stream = tl.where(whole, _BONUS, _RECOVER)  # of the bonus, or of the token in place of the rejected draft
    uniform = d.keyed_uniform(origin, place, request, request.to(tl.int64) * NODES, in_batch, stream)
    entry = request if ROWS == 1 else row
    of_draft = v.draft_row(of.draft_rows, request, tau, in_batch & (whole == 0), NODES, DRAFT_ROWS)
    sampled = _sampled_token(
        source, sums_ptr, temperature, kept, entry, row, of_draft, batch * ROWS,
        in_batch & usable & (temperature > 0), uniform, VOCAB, GROUPS, PROBS, BLOCK_G, WIDTH,
    )  # fmt: skip
    bonus = tl.load(of.argmax + row, mask=in_batch, other=0)
    bonus = tl.where((temperature > 0) & (sampled >= 0), sampled.to(tl.int64), bonus)
    bonus = tl.where(usable, bonus, 0)

    column = tl.arange(0, BLOCK_D)[None, :]
    path, onward, count = _nodes_kept(path_ptr, request, in_batch, column, tau, DEPTH)
    in_out = in_batch[:, None] & (column <= DEPTH)
    before_end = in_out & (column < count[:, None])
    emitted = tl.load(tokens_ptr + request.to(tl.int64)[:, None] * NODES + onward, mask=before_end, other=-1)
    emitted = tl.where(column == count[:, None], bonus[:, None], emitted)
    length = tl.load(lengths_ptr + request, mask=in_batch, other=0)
    v.store_outcome(accepted, length, request, in_batch, column, emitted, path, count, bonus, usable, DEPTH)
    if accepted.logprobs is not None:
        of_path = request.to(tl.int64)[:, None] * NODES + path
        on_path = in_out & (column <= count[:, None])
        normaliser = tl.load(of.terms + 3 * batch * NODES + of_path, mask=on_path, other=0.0)
        value = d.log_value(of.target, of_path, emitted, row_stride, on_path, PROBS)
        logprob = tl.where(usable[:, None] | (column < count[:, None]), value - normaliser, float("-inf"))
        out = request.to(tl.int64)[:, None] * (DEPTH + 1) + column
        tl.store(accepted.logprobs + out, tl.where(on_path, logprob, 0.0), mask=in_out)


def accept_sampled(call: Verification) -> Accepted:
    """`accept` under the rules for sampled drafts, for rows with a temperature."""
    values, tree, sampling, max_depth = call.values, call.tree, call.sampling, call.max_depth
    (batch, num_nodes, vocab), flat = values.shape, values.flatten(0, 1)
    config, block_rule = ACCEPTANCE[current_chip(values)], call.rule == "block"
    found = select(
        flat, sampling, None, None, per_request=num_nodes, probabilities=call.probabilities, draw=False,
        want_distribution=True, normalise=call.return_logprobs,
    )  # fmt: skip
    origin = Uniforms(sampling.seeds, tree.positions, None)
    if call.uniforms is not None:
        origin = Uniforms(None, None, call.uniforms)
    of = Rows(
        flat, found.distribution, found.tokens, found.valid, sampling.temperature, call.draft_probs, call.draft_rows
    )
    out = partial(torch.empty, dtype=torch.float32, device=values.device)
    rows = num_nodes if block_rule else 1
    width, groups, block_g = d.grouping(vocab, config.width)
    block_n = max(triton.next_power_of_2(num_nodes), 2)
    judged, state = out(2 if block_rule else 1, batch, num_nodes), out(2, batch, dtype=torch.int32)
    sums = out(2, batch * rows, groups)
    accepted = v.empty_outcome(batch, max_depth, values.device, with_logprobs=call.return_logprobs)
    sizes = dict(NODES=num_nodes, VOCAB=vocab, PROBS=call.probabilities)
    ends, warps = (batch, flat.stride(0)), config.request_warps
    path, factors = None, None
    if call.rule in TREE_RULES:
        path, factors = judge_tree(call, of, origin, judged, state)
    else:
        block_b = d.rows_per_program(batch, config.max_requests, block_n)
        launch(
            _judge_kernel, (triton.cdiv(batch, block_b),), call.tokens, tree.first_child, of, origin, judged, state,
            *ends, num_warps=warps, DEPTH=max_depth, BLOCK_RULE=block_rule, BLOCK_B=block_b, BLOCK_N=block_n, **sizes,
        )  # fmt: skip
    sizes |= dict(DRAFT_ROWS=call.draft_probs.shape[1], ROWS=rows, GROUPS=groups, WIDTH=width)
    strips = batch * rows * groups
    block_s = min(config.strips, max(triton.next_power_of_2(max(strips, 1)), 2))
    launch(
        _residual_kernel, (triton.cdiv(strips, block_s),), of, factors, judged, state, sums, strips, *ends,
        num_warps=config.strip_warps, BLOCK_S=block_s, **sizes,
    )  # fmt: skip
    if block_rule:
        block_r = d.rows_per_program(batch * rows, config.max_requests, block_g)
        launch(
            _row_sums_kernel, (triton.cdiv(batch * rows, block_r),), sums, judged[1], batch * rows, num_warps=warps,
            GROUPS=groups, BLOCK_R=block_r, BLOCK_G=block_g,
        )  # fmt: skip
    block_b = d.rows_per_program(batch, config.max_requests, block_g)
    launch(
        _finish_kernel, (triton.cdiv(batch, block_b),), call.tokens, of, factors, origin, judged, state, sums, path,
        call.lengths, accepted, *ends, num_warps=warps, DEPTH=max_depth, BLOCK_RULE=block_rule, BLOCK_B=block_b,
        BLOCK_N=block_n, BLOCK_D=max(triton.next_power_of_2(max_depth + 1), 2), BLOCK_G=block_g, **sizes,
    )  # fmt: skip
    return accepted
