"""Routing: a program takes the logits of a few rows whole. Experts are chosen in rounds of (largest, lowest expert).

Choices are compared as integers that order as the floats do, so that an expert that was chosen, or whose group was
not, ranks after one with -inf.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.experts import reference
from specdec_kernels.experts.configs import ROUTE
from specdec_kernels.experts.types import Routed, Routing
from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.pdl import launch_dependents, pdl_options, wait_for_predecessor
from specdec_kernels.sampling.device import finite, sort_key, usable

_TAKEN = tl.constexpr(-(1 << 31))  # below the key of -inf
_NO_LANE = tl.constexpr((1 << 31) - 1)


@triton.jit
def _first_largest(key, lane):
    """[T]: the lowest lane with the largest key of each row."""
    return tl.min(tl.where(key == tl.max(key, 1)[:, None], lane[None, :], _NO_LANE), 1)


@triton.jit
def _group_scores(
    choice, expert, GROUPS: tl.constexpr, SIZE: tl.constexpr, TWO_BEST: tl.constexpr, BLOCK_G: tl.constexpr
):
    """[T, BLOCK_G] keys of the groups' scores."""
    group = tl.arange(0, BLOCK_G)
    keys = tl.zeros([choice.shape[0], BLOCK_G], tl.int32) + _TAKEN
    for own in tl.range(0, GROUPS):
        member = tl.where((expert // SIZE == own)[None, :], choice, float("-inf"))
        score = tl.max(member, 1)
        if TWO_BEST:
            first = _first_largest(sort_key(member, 0), expert)
            score += tl.max(tl.where(expert[None, :] == first[:, None], float("-inf"), member), 1)
        keys = tl.where(group[None, :] == own, sort_key(score, 0)[:, None], keys)
    return keys


@triton.jit
def _in_best_groups(
    choice, expert, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, TWO_BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """[T, BLOCK_E]: whether the expert's group is among the KEPT best."""
    keys = _group_scores(choice, expert, GROUPS, SIZE, TWO_BEST, BLOCK_G)
    group = tl.arange(0, BLOCK_G)
    kept = choice != choice  # false
    for _ in tl.range(0, KEPT):
        best = _first_largest(keys, group)
        kept = kept | ((expert // SIZE)[None, :] == best[:, None])
        keys = tl.where(group[None, :] == best[:, None], _TAKEN, keys)
    return kept


@triton.jit
def _scores(logit, bias_ptr, expert, inside, SIGMOID: tl.constexpr):
    """(scores, choice) [T, BLOCK_E]."""
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
        choice = score
        if bias_ptr is not None:
            choice += tl.load(bias_ptr + expert, mask=inside, other=0.0)[None, :]
    else:
        exponential = tl.exp(logit - finite(tl.max(logit, 1))[:, None])
        score = exponential / tl.maximum(tl.sum(exponential, 1), 1.0)[:, None]
        choice = logit
    return score, choice


@triton.jit(do_not_specialize=["rows", "scale"])
def _route_kernel(
    logits_ptr,  # [rows, EXPERTS]
    bias_ptr,  # [EXPERTS] float32, or None
    is_real_ptr,  # [rows] bool, or None
    experts_ptr,  # [rows, TOPK] int32
    weights_ptr,  # [rows, TOPK] float32
    rows,
    scale,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    TWO_BEST: tl.constexpr,
    SIGMOID: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert, slot = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    there, inside = row < rows, expert < EXPERTS
    wait_for_predecessor(PDL)
    launch_dependents(PDL)
    at = row.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    logit = tl.load(logits_ptr + at, mask=there[:, None] & inside[None, :], other=float("-inf"))
    narrow = logit.dtype
    logit = usable(logit.to(tl.float32))
    score, choice = _scores(logit, bias_ptr, expert, inside, SIGMOID)
    key = tl.where(inside[None, :], sort_key(choice, 0), _TAKEN)
    if KEPT_GROUPS < GROUPS:
        choice = tl.where(inside[None, :], choice, float("-inf"))
        kept = _in_best_groups(choice, expert, GROUPS, EXPERTS // GROUPS, KEPT_GROUPS, TWO_BEST, BLOCK_G)
        key = tl.where(kept, key, _TAKEN)
    chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    weight = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for place in tl.range(0, TOPK):
        best = _first_largest(key, expert)
        taken = expert[None, :] == best[:, None]
        # A sum over one entry: -inf times zero would not be one.
        value = tl.max(tl.where(taken, logit if OF_CHOSEN else score, float("-inf")), 1)
        chosen = tl.where(slot[None, :] == place, best[:, None], chosen)
        weight = tl.where(slot[None, :] == place, value[:, None], weight)
        key = tl.where(taken, _TAKEN, key)
    used = (slot < TOPK)[None, :]
    if OF_CHOSEN:
        weight = tl.where(used, weight, float("-inf"))
        weight = tl.exp(weight - finite(tl.max(weight, 1))[:, None])
        weight /= tl.maximum(tl.sum(weight, 1), 1.0)[:, None]
    if RENORMALISE:
        weight /= (tl.sum(weight, 1) + 1e-20)[:, None]
    weight = (weight * scale).to(narrow).to(tl.float32)
    if is_real_ptr is not None:
        real = tl.load(is_real_ptr + row, mask=there, other=0) != 0
        chosen = tl.where(real[:, None], chosen, EXPERTS)
        weight = tl.where(real[:, None], weight, 0.0)
    out = row.to(tl.int64)[:, None] * TOPK + slot[None, :]
    tl.store(experts_ptr + out, chosen, mask=there[:, None] & used)
    tl.store(weights_ptr + out, weight, mask=there[:, None] & used)


def route_experts(
    logits: Tensor, routing: Routing, correction_bias: Tensor | None = None, is_real: Tensor | None = None
) -> Routed:
    if logits.dtype == torch.float64:
        return reference.route_experts(logits, routing, correction_bias, is_real)
    (rows, experts), chip = logits.shape, current_chip(logits)
    config = ROUTE[chip]
    out = Routed(
        torch.empty((rows, routing.topk), dtype=torch.int32, device=logits.device),
        torch.empty((rows, routing.topk), dtype=torch.float32, device=logits.device),
    )
    launch(
        _route_kernel,
        (triton.cdiv(rows, config.rows),),
        *(logits, correction_bias, is_real, *out, rows, float(routing.scale)),
        num_warps=max(1, min(4, experts // 64)),
        EXPERTS=experts,
        TOPK=routing.topk,
        GROUPS=routing.groups,
        KEPT_GROUPS=routing.topk_groups,
        TWO_BEST=routing.group_score == "two_best",
        SIGMOID=routing.scoring == "sigmoid",
        OF_CHOSEN=routing.scoring == "softmax_of_chosen",
        RENORMALISE=routing.renormalise,
        BLOCK_T=min(config.rows, lanes(rows)),
        BLOCK_E=lanes(experts),
        BLOCK_G=lanes(routing.groups),
        BLOCK_K=lanes(routing.topk),
        **pdl_options(chip),
    )
    return out
