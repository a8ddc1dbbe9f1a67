"""Mixture of experts: every row chooses K of E experts, and the output is the weighted sum of their MLPs.

    y = sum over the chosen e of w_e (down_e act(gate_e x, up_e x)) + shared(x)

Three functions in a row: `route_experts` chooses, `schedule_experts` sorts the rows by expert, `expert_mlp` computes.
`route_and_schedule` is the first two, in one launch where rows are few. Nothing is read by the host, and all sizes
follow from the number of rows, so all can be captured in a graph. A row of the result has the same bits whatever other
rows are beside it. Tensors are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.checks import Expected, expect_at_least_one, expect_between, expect_choice, expect_tensors
from specdec_kernels.experts.types import (
    GROUP_SCORES,
    SCORINGS,
    Activation,
    ExpertCall,
    ExpertSchedule,
    ExpertWeights,
    Matrices,
    Mxfp4,
    Routed,
    Routing,
    max_items,
)
from specdec_kernels.launch import dispatch
from specdec_kernels.norm.configs import MAX_WIDTH
from specdec_kernels.norm.types import Normed, NormInputs, weight_dtype
from specdec_kernels.projection.api import expected_scaled
from specdec_kernels.projection.types import ScaledWeight

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SWIGLU = Activation()


def route_experts(
    logits: Tensor,
    routing: Routing,
    correction_bias: Tensor | None = None,
    is_real: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Routed:
    """The experts of each row and their weights.

    The choice is by `sigmoid` score, or by logit for the other scorings, which order alike; among equals the lowest
    expert wins. NaN counts as -inf, and +inf as the largest float32.

    Args:
        logits: [T, E] float32, float16 or bfloat16, or float64 by torch alone.
        correction_bias: [E] float32, or float64 with float64 logits: added to the scores for the choice, not for the
            weights.
        is_real: [T] bool; rows where it is false have no expert.

    Returns:
        Weights rounded to the dtype of the logits, as float32 (float64 for float64 logits).

    Sources: Qwen3 (2505.09388), gpt-oss (2508.10925), DeepSeek-V2 (2405.04434) and V3 (2412.19437).
    """
    _check_logits(logits, routing, correction_bias, is_real)
    return Routed(
        *dispatch("route_experts", __package__, impl, logits, "kernel_route")(logits, routing, correction_bias, is_real)
    )


def route_and_schedule(
    logits: Tensor,
    routing: Routing,
    correction_bias: Tensor | None = None,
    is_real: Tensor | None = None,
    *,
    impl: str = "auto",
) -> tuple[Routed, ExpertSchedule]:
    """`route_experts`, and `schedule_experts` in tiles of `row_tile_of` the rows."""
    _check_logits(logits, routing, correction_bias, is_real)
    function = dispatch("route_and_schedule", __package__, impl, logits, "kernel_route")
    return function(logits, routing, correction_bias, is_real)


def schedule_experts(experts: Tensor, num_experts: int, row_tile: int, *, impl: str = "auto") -> ExpertSchedule:
    """The rows of each expert in tiles of at most `row_tile`: a stable counting sort, without atomics in memory.

    Args:
        experts: [T, K] int32, as `Routed.experts`; anything else than 0 to `num_experts` - 1 is no expert.
        row_tile: a power of two of at least 16, `row_tile_of` of the rows.
    """
    expect_tensors(experts=(experts, (None, None), torch.int32))
    expect_at_least_one(num_experts=num_experts)
    if row_tile < 16 or row_tile & (row_tile - 1):
        raise ValueError(f"row_tile: expected a power of two of at least 16, got {row_tile}")
    return dispatch("schedule_experts", __package__, impl, experts, "kernel_schedule")(experts, num_experts, row_tile)


def expert_mlp(
    x: Tensor,
    routed: Routed,
    schedule: ExpertSchedule,
    weights: ExpertWeights,
    activation: Activation = _SWIGLU,
    shared: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """The weighted sum of the MLPs of the chosen experts [T, H], plus `shared` [T, H].

    Gate and up are rounded to the dtype of x, and so is what the activation makes of them. The outputs of the experts
    are added in float32 in the order of `routed.experts`, then `shared`, and the sum is rounded once.

    Args:
        x: [T, H] float32, float16 or bfloat16, or float64 by torch alone.
        schedule: `schedule_experts` of `routed.experts`.
        weights: of the dtype of x. Matrices may be MXFP4: the result is that of the same numbers in the dtype of x,
            which all but float16 hold exactly. Or they are float8 codes, whose product is that of `linear`.
    """
    call = _checked(ExpertCall(x, routed, schedule, weights, activation, shared))
    return dispatch("expert_mlp", __package__, impl, x)(call)


def expert_mlp_add_rms_norm(
    x: Tensor,
    routed: Routed,
    schedule: ExpertSchedule,
    weights: ExpertWeights,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    activation: Activation = _SWIGLU,
    shared: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Normed:
    """`add_rms_norm` of `expert_mlp`, with the same roundings: the sum with `residual` [T, H], and its norm."""
    call, hidden = _checked(ExpertCall(x, routed, schedule, weights, activation, shared)), x.shape[1]
    expect_between("the width of a row", hidden, 1, MAX_WIDTH)
    expect_tensors(
        {"x": x},
        residual=(residual, x.shape, x.dtype),
        norm_weight=(norm_weight, (hidden,), weight_dtype(x, norm_weight)),
    )
    end = NormInputs(residual, norm_weight, eps)
    return dispatch("expert_mlp_add_rms_norm", __package__, impl, x)(call, end)


def _checked(call: ExpertCall) -> ExpertCall:
    x, routed, schedule, weights, _, shared = call
    expect_tensors(x=(x, (None, None), _DTYPES))
    rows, hidden = x.shape
    shape = tuple(weights.gate_up.shape)
    if len(shape) != 3 or 0 in shape or shape[1] % 2:
        raise ValueError(f"gate_up: expected [E, 2 F, {hidden}] of at least one expert, got {list(shape)}")
    experts, outer, _ = shape
    if schedule.num_experts != experts:
        raise ValueError(f"schedule: expected {experts} experts as the weights have, got {schedule.num_experts}")
    topk, width = routed.experts.shape[-1], outer // 2
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    count, capacity = rows * topk, max_items(rows * topk, experts, schedule.row_tile)
    expect_tensors(
        {"x": x},
        experts=(routed.experts, (rows, topk), torch.int32),
        weights=(routed.weights, (rows, topk), wide),
        order=(schedule.order, (count,), torch.int32),
        items=(schedule.items, (capacity, 3), torch.int32),
        **_expected("gate_up", weights.gate_up, (experts, 2 * width, hidden), x.dtype),
        **_expected("down", weights.down, (experts, hidden, width), x.dtype),
        gate_up_bias=(weights.gate_up_bias, (experts, 2 * width), x.dtype),
        down_bias=(weights.down_bias, (experts, hidden), x.dtype),
        shared=(shared, (rows, hidden), x.dtype),
    )
    return call


def _check_logits(logits: Tensor, routing: Routing, correction_bias: Tensor | None, is_real: Tensor | None) -> None:
    expect_tensors(logits=(logits, (None, None), _DTYPES))
    rows, experts = logits.shape
    _check_routing(routing, experts, correction_bias is not None)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    expect_tensors(
        {"logits": logits}, correction_bias=(correction_bias, (experts,), wide), is_real=(is_real, (rows,), torch.bool)
    )


def _check_routing(routing: Routing, experts: int, is_corrected: bool) -> None:
    expect_choice("routing.scoring", routing.scoring, SCORINGS)
    expect_choice("routing.group_score", routing.group_score, GROUP_SCORES)
    expect_at_least_one(**{"routing.groups": routing.groups})
    if experts % routing.groups:
        raise ValueError(f"routing.groups: expected a divisor of {experts} experts, got {routing.groups}")
    expect_between("routing.topk_groups", routing.topk_groups, 1, routing.groups)
    size = experts // routing.groups
    expect_between("routing.topk", routing.topk, 1, routing.topk_groups * size)
    if routing.group_score == "two_best" and (routing.scoring != "sigmoid" or size < 2):
        raise ValueError(
            "routing.group_score: expected 'two_best' with sigmoid scores and groups of at least 2 experts, got "
            f"{routing.scoring} and groups of {size}"
        )
    if is_corrected and routing.scoring != "sigmoid":
        raise ValueError(f"correction_bias: expected sigmoid scores with it, got {routing.scoring}")


def _expected(name: str, weight: Matrices, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Expected]:
    """What a matrix must be, by name."""
    if isinstance(weight, ScaledWeight):
        return expected_scaled(name, weight, shape, torch.float64 if dtype == torch.float64 else torch.float32)
    if not isinstance(weight, Mxfp4):
        return {name: (weight, shape, dtype)}
    if shape[2] % 32:
        raise ValueError(f"{name}: expected a multiple of 32 columns for MXFP4, got {shape[2]}")
    stride = -(-shape[2] // 512) * 16
    return {
        f"{name}.codes": (weight.codes, (*shape[:2], shape[2] // 2), torch.uint8),
        f"{name}.scales": (weight.scales, (*shape[:2], stride), torch.uint8),
    }
