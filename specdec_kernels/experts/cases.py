"""Named inputs of the expert kernels."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.cases import Comparison, Maker, WorkModel, case_of
from specdec_kernels.experts import reference
from specdec_kernels.experts.configs import row_tile_of
from specdec_kernels.experts.types import Activation, ExpertWeights, Matrices, Mxfp4, Routed, Routing
from specdec_kernels.parity import bytes_in
from specdec_kernels.projection.cases import scaled_weight
from specdec_kernels.projection.reference import dequantised, rounded
from specdec_kernels.projection.types import GROUP, LARGEST_CODE, ScaledWeight

_LARGE = ("large",)
GPT_OSS = Activation(limit=7.0, alpha=1.702)


def logits_of(make: Maker, rows: int, experts: int, ties: bool = False) -> Tensor:
    """With ties: quarters between -1 and 1, of which many are equal in a row."""
    if ties:
        return (make.integers(-4, 5, rows, experts).float() / 4).to(make.dtype)
    return make.normal(rows, experts, scale=2.0)


def route_inputs(
    make: Maker,
    rows: int,
    experts: int,
    topk: int,
    scoring: str = "softmax",
    *,
    ties: bool = False,
    bias: bool = False,
    masked: bool = False,
    unusable: bool = False,
    **routing: Any,
) -> dict[str, Any]:
    """masked: every third row is not real. unusable: NaN, infinities, and a row of -inf."""
    logits = logits_of(make, rows, experts, ties)
    if ties and scoring == "sigmoid":
        logits = logits.sign() * 128  # scores of 0, 1/2 and 1, whose sums with quarters are exact on every device
    if unusable:
        logits[0], logits[1, ::2], logits[2, 1], logits[3, 1:3] = -torch.inf, torch.nan, torch.inf, torch.inf
    inputs = dict(logits=logits, routing=Routing(topk, scoring, **routing))
    if bias:
        # Quarters too, so that a tie of logits can be one of choices.
        inputs["correction_bias"] = make.integers(-2, 3, experts).float() / 4
    if masked:
        inputs["is_real"] = torch.arange(rows, device=make.device) % 3 != 1
    return inputs


def chosen(make: Maker, rows: int, experts: int, topk: int, spread: str = "random") -> Tensor:
    """[rows, topk] int32 without equal ones in a row. `spread`: `random`, `one` (all rows choose the same), `apart` (no
    two rows share one), `none`, or `some` (random, where every third row and some single places have none)."""
    if spread == "none":
        return make.tensor([[experts] * topk] * rows, torch.int32).reshape(rows, topk)
    if spread in ("one", "apart"):
        first = torch.arange(rows, device=make.device)[:, None] * (topk if spread == "apart" else 0)
        return ((first + torch.arange(topk, device=make.device)) % experts).int()
    scores = torch.rand(rows, experts, generator=make.generator).to(make.device)
    found = scores.argsort(dim=1)[:, :topk].int()
    if spread == "some":
        found[::3], found[1::4, -1:] = experts, experts
    return found.contiguous()


def schedule_inputs(
    make: Maker, rows: int, experts: int, topk: int, spread: str = "random", row_tile: int = 16
) -> dict[str, Any]:
    return dict(experts=chosen(make, rows, experts, topk, spread), num_experts=experts, row_tile=row_tile)


def mxfp4(make: Maker, experts: int, rows: int, columns: int) -> Mxfp4:
    """Random codes of the size that keeps the variance of x, and scales with padding behind them."""
    codes = make.integers(0, 256, experts, rows, columns // 2, dtype=torch.uint8)
    middle = 127 - round(math.log2(columns) / 2 + 1.5)
    scales = make.integers(middle - 1, middle + 2, experts, rows, columns // 32, dtype=torch.uint8)
    return Mxfp4.padded(codes, scales)


def float8(make: Maker, shape: tuple[int, ...], group_rows: int, float8_x: bool) -> ScaledWeight:
    """Codes and scales as those of a projection, of each expert; one scale for each row if `group_rows` is 1."""
    experts, rows, columns = shape
    inner = columns if group_rows == 1 else GROUP
    each = [scaled_weight(make, rows, columns, group_rows, inner) for _ in range(experts)]
    codes, scales = (torch.stack(parts) for parts in zip(*((one.codes, one.scales) for one in each), strict=True))
    return ScaledWeight(codes, scales, group_rows, inner, float8_x)


def mlp_inputs(
    make: Maker,
    rows: int,
    experts: int,
    topk: int,
    hidden: int,
    width: int,
    spread: str = "random",
    *,
    bias: bool = False,
    shared: bool = False,
    packed: bool = False,
    group_rows: int | None = None,
    float8_x: bool = False,
    row_tile: int | None = None,
    scale: float = 1.0,
    **options: Any,
) -> dict[str, Any]:
    """Weights of the size that keeps the variance of x, which `scale` raises.

    packed: in MXFP4. group_rows: rows with one scale, of float8 codes; `float8_x` as `ScaledWeight` has it.
    row_tile: of the schedule; None: what this device takes.
    """
    ids = chosen(make, rows, experts, topk, spread)
    weights = torch.rand(rows, topk, generator=make.generator).to(make.device)
    weights = torch.where(ids < experts, weights, 0.0)

    def matrices(*shape: int) -> Matrices:
        if group_rows is not None:
            return float8(make, shape, group_rows, float8_x)
        return mxfp4(make, *shape) if packed else make.normal(*shape, scale=shape[2] ** -0.5)

    inputs = dict(
        x=make.normal(rows, hidden, scale=scale),
        routed=Routed(ids, weights),
        schedule=reference.schedule_experts(ids, experts, row_tile or row_tile_of(ids, experts)),
        weights=ExpertWeights(
            matrices(experts, 2 * width, hidden),
            matrices(experts, hidden, width),
            make.normal(experts, 2 * width) if bias else None,
            make.normal(experts, hidden) if bias else None,
        ),
    )
    return inputs | (dict(shared=make.normal(rows, hidden)) if shared else {}) | options


def normed_inputs(make: Maker, *sizes: Any, **options: Any) -> dict[str, Any]:
    """`mlp_inputs`, and what the result is added to and normed by."""
    inputs = mlp_inputs(make, *sizes, **options)
    rows, hidden = inputs["x"].shape
    return inputs | dict(residual=make.normal(rows, hidden), norm_weight=make.normal(hidden), eps=1e-6)


def _mlp_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """(bytes moved, floating-point operations): the weights of the experts that have a row, read once."""
    x, weights = inputs["x"], inputs["weights"]
    touched = int(inputs["schedule"].num_touched)
    one = [weight.shape[1] * weight.shape[2] for weight in weights[:2]]
    read = sum(bytes_in(weight) // weight.shape[0] for weight in weights[:2])
    flops = 2 * int(inputs["schedule"].starts[-1]) * sum(one)
    return touched * read + 2 * x.numel() * x.element_size(), flops


def _schedule_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """Ids read once, order written once."""
    return 8 * inputs["experts"].numel(), 0


def _unsettled_codes(inputs: dict[str, Any], exact: dict[str, Any]) -> Tensor | None:
    """[T, H] float64, of float32 inputs whose hidden numbers are rounded to codes. These may err as any result may: by
    twice the error of the reference and a few roundings of the largest. In half types so many reach another code that
    the error of the reference shows it."""
    routed, down = inputs["routed"], exact["weights"].down
    if inputs["x"].dtype != torch.float32 or not isinstance(down, ScaledWeight) or not down.float8_x:
        return None
    moved = torch.zeros_like(exact["x"])
    for expert in range(down.shape[0]):
        row, slot = (routed.experts == expert).nonzero(as_tuple=True)
        if not len(row):
            continue
        activation = inputs.get("activation", Activation())
        hidden, truth = (
            reference.hidden_of(each["x"][row], each["weights"].of(expert), activation) for each in (inputs, exact)
        )
        error = 2 * (hidden - truth).abs().max() + 4 * torch.finfo(hidden.dtype).eps * truth.abs().max()
        width = _between_codes(truth, error) @ dequantised(exact["weights"].of(expert).down, truth.dtype).abs().T
        moved.index_add_(0, row, routed.weights[row, slot, None] * width)
    return moved


def _between_codes(numbers: Tensor, error: Tensor) -> Tensor:
    """How far apart the codes of `numbers` less and more `error` are."""
    scale = rounded(numbers)[1].double().repeat_interleave(GROUP, -1)[..., : numbers.shape[-1]]
    low, high = (((numbers + shift) / scale).float().clamp(-LARGEST_CODE, LARGEST_CODE) for shift in (-error, error))
    return (high.to(torch.float8_e4m3fn).double() - low.to(torch.float8_e4m3fn).double()) * scale


COMPARISON = Comparison(float64=True, unsettled={"expert_mlp": _unsettled_codes})

WORK: dict[str, WorkModel] = {"expert_mlp": _mlp_work, "schedule_experts": _schedule_work}

_route = partial(case_of, "route_experts", route_inputs)
_schedule = partial(case_of, "schedule_experts", schedule_inputs)
_mlp = partial(case_of, "expert_mlp", mlp_inputs)
_both = partial(case_of, "route_and_schedule", route_inputs)
_normed = partial(case_of, "expert_mlp_add_rms_norm", normed_inputs)
_V3: dict[str, Any] = dict(
    scoring="sigmoid", bias=True, renormalise=True, scale=2.5, groups=8, topk_groups=4, group_score="two_best"
)
_V2: dict[str, Any] = dict(groups=4, topk_groups=2, scale=16.0)
_FLOAT8: dict[str, Any] = {
    "w8a16": dict(group_rows=128),
    "w8a8": dict(group_rows=128, float8_x=True),
    "w8a8_by_row": dict(group_rows=1, float8_x=True),
}
_QWEN3, _GPT_OSS = (128, 8, 2048, 768), (32, 4, 2880, 2880)  # E, K, H, F

CASES = (
    _route("route_no_rows", "launch on an empty grid", 0, 8, 2),
    _route("route_one_expert", "lanes past the only expert", 3, 1, 1),
    _route("route_odd", "lanes past the experts, the chosen and the rows", 7, 45, 3, renormalise=True),
    _route("route_ties", "the highest of equal experts", 40, 24, 6, ties=True, renormalise=True),
    _route("route_all", "an expert chosen twice", 5, 8, 8, ties=True),
    _route("route_unusable", "weights that are no numbers", 6, 9, 4, unusable=True, renormalise=True),
    _route("route_masked", "a row that is not real", 10, 16, 4, masked=True),
    _route("route_of_chosen", "a sum over all experts", 9, 32, 4, "softmax_of_chosen"),
    _route("route_of_chosen_ties", "the same where logits are equal", 9, 32, 4, "softmax_of_chosen", ties=True),
    _route("route_of_chosen_unusable", "infinities weighed", 6, 9, 4, "softmax_of_chosen", unusable=True),
    _route("route_sigmoid", "a weight with the bias", 9, 24, 4, "sigmoid", bias=True, renormalise=True, scale=1.5),
    _route("route_v3", "a group by its largest, or one group too many", 30, 64, 6, **_V3),
    _route("route_v3_ties", "the highest of equal groups", 60, 32, 4, ties=True, **_V3),
    _route("route_v3_unusable", "an expert of a group that was not chosen", 6, 24, 3, unusable=True,
           **_V3 | dict(groups=4, topk_groups=1)),
    _route("route_v2", "a group by its sum", 30, 20, 6, **_V2),
    _route("route_v2_ties", "the highest of equal groups", 40, 20, 6, ties=True, **_V2),
    _route("route_v2_unusable", "a group of -inf, or an expert outside", 6, 20, 6, unusable=True, **_V2),
    _route("route_qwen3_shipped", "registers", 16, 128, 8, renormalise=True, masked=True, gate=True),
    _route("route_gpt_oss_shipped", "the variant of the chosen", 16, 32, 4, "softmax_of_chosen", gate=True),
    _route("route_v3_shipped", "the variant with groups", 16, 256, 8, gate=True, **_V3),
    _route("route_v2_shipped", "groups by their largest", 16, 160, 6, gate=True,
           **_V2 | dict(groups=8, topk_groups=3)),
    _both("both_no_rows", "a schedule that nobody wrote", 0, 8, 2),
    _both("both_one_row", "lanes past the only row", 1, 24, 4, renormalise=True),
    _both("both_ties", "an expert of two rows twice", 4, 5, 3, ties=True),
    _both("both_masked", "assignments without expert in an item, or not last", 4, 16, 4, masked=True),
    _both("both_of_chosen", "experts and rows past the last", 3, 45, 4, "softmax_of_chosen"),
    _both("both_v3_unusable", "an expert of a group that was not chosen", 4, 24, 3, unusable=True,
          **_V3 | dict(groups=4, topk_groups=1)),
    _both("both_two_launches", "rows past those of one program", 5, 16, 4, masked=True),
    *(
        _both(f"both_{rows}_shipped", "registers", rows, 128, 8, renormalise=True, masked=True, gate=True)
        for rows in (1, 4)
    ),
    _both("both_v3_shipped", "registers with groups", 4, 256, 8, gate=True, **_V3),
    *(
        _both(f"both_{rows}x128", "decode of few requests", rows, 128, 8, renormalise=True, bench=True, tags=_LARGE)
        for rows in (1, 16)
    ),
    _schedule("schedule_no_rows", "items of an empty batch", 0, 8, 2),
    _schedule("schedule_sixteen", "a block that a compiler does not take", 8, 8, 2),
    _schedule("schedule_random", "rows of an expert out of order", 37, 12, 3),
    _schedule("schedule_one_expert", "items of an expert past the first", 70, 8, 1, "one"),
    _schedule("schedule_apart", "experts of one row", 6, 24, 4, "apart"),
    _schedule("schedule_none", "an item of no expert", 9, 8, 2, "none"),
    _schedule("schedule_some", "a row without expert in an item", 50, 16, 4, "some"),
    _schedule("schedule_wide_tile", "a tile of another size", 60, 4, 2, row_tile=32),
    _schedule("schedule_shipped", "registers of one pass", 1, 128, 8, gate=True),
    _schedule("schedule_512_shipped", "registers of several passes", 512, 128, 8, gate=True, row_tile=64),
    _schedule("schedule_1x128", "decode of one request", 1, 128, 8, bench=True, tags=_LARGE),
    _schedule("schedule_512x128", "a batch of trees", 512, 128, 8, bench=True, tags=_LARGE, row_tile=64),
    _normed("normed_odd", "columns past the last in the norm", 7, 5, 3, 45, 33, "some", shared=True),
    _normed("normed_no_rows", "launch on an empty grid", 0, 4, 2, 32, 16),
    _normed("normed_qwen3_shipped", "registers", 1, 8, 8, 2048, 768, gate=True, tags=_LARGE),
    _mlp("mlp_no_rows", "launch on an empty grid", 0, 4, 2, 32, 16),
    _mlp("mlp_one", "a product of one number", 1, 1, 1, 1, 1),
    _mlp("mlp_odd", "lanes past the rows, the columns and the inner dimension", 7, 5, 3, 45, 33),
    _mlp("mlp_several_tiles", "a column tile of another expert", 5, 6, 2, 150, 70),
    _mlp("mlp_one_expert", "rows past those of one item", 37, 4, 1, 32, 24, "one"),
    _mlp("mlp_ring", "a step of another tile in the ring", 5, 6, 3, 640, 768, "some", shared=True,
         tags=_LARGE),
    _mlp("mlp_ring_items", "rows past those of one item in the ring", 40, 5, 1, 768, 640, "one", row_tile=16,
         tags=_LARGE),
    _mlp("mlp_ring_64", "rows of a wide tile in the ring", 90, 3, 1, 384, 320, "some", row_tile=64,
         tags=_LARGE),
    _mlp("mlp_none", "a sum of parts that nobody wrote", 5, 4, 2, 32, 16, "none"),
    _mlp("mlp_some", "a slot without expert", 20, 8, 3, 32, 16, "some", shared=True),
    _mlp("mlp_shared", "the shared output left out, or weighed", 6, 8, 2, 48, 16, shared=True),
    _mlp("mlp_gpt_oss", "the other activation, or a bias outside of the sum", 9, 6, 2, 40, 24, bias=True, scale=4.0,
         activation=GPT_OSS),
    _mlp("mlp_mxfp4", "halves of a byte swapped, a scale of another group", 5, 4, 2, 96, 64, packed=True),
    _mlp("mlp_mxfp4_gpt_oss", "inner elements past the last step, rows without expert", 7, 5, 2, 160, 224, "some",
         packed=True, bias=True, scale=4.0, activation=GPT_OSS),
    _mlp("mlp_mxfp4_one_expert", "codes of rows past those of one item", 20, 3, 1, 32, 32, "one", packed=True),
    _mlp("mlp_float8", "the scales of another expert or block", 5, 4, 2, 140, 160, group_rows=128),
    _mlp("mlp_float8_rows", "the same for scales of rows", 6, 4, 2, 140, 70, "some", group_rows=1, shared=True),
    _mlp("mlp_float8_x", "rows of x rounded by the scales of others", 7, 4, 2, 140, 160, group_rows=128, float8_x=True),
    _mlp("mlp_float8_x_one_expert", "rows past those of one item", 37, 3, 1, 140, 136, "one", group_rows=8,
         float8_x=True, bias=True, scale=4.0, activation=GPT_OSS),
    _mlp("mlp_float8_x_rows", "scales of rows and of groups of x", 5, 4, 2, 140, 70, group_rows=1, float8_x=True),
    _mlp("mlp_qwen3_shipped", "registers of few rows", 1, 4, 2, 2048, 768, gate=True, tags=_LARGE),
    _mlp("mlp_shared_shipped", "the variant with a shared output", 1, 4, 2, 2048, 1408, gate=True, shared=True,
         tags=_LARGE),
    _mlp("mlp_gpt_oss_shipped", "steps that are odd, biases", 1, 4, 2, 2880, 2880, gate=True, bias=True,
         activation=GPT_OSS, tags=_LARGE),
    *(
        _mlp(f"mlp_mxfp4_{rows}_shipped", f"registers of tiles of {tile} rows, packed", rows, 4, 1, 2880, 2880,
             gate=True, bias=True, packed=True, row_tile=tile, activation=GPT_OSS, tags=_LARGE)
        for rows, tile in ((1, 16), (64, 32), (128, 64), (256, 128))
    ),
    *(
        _mlp(f"mlp_{name}_{rows}_shipped", f"registers of tiles of {tile} rows, float8", rows, 4, 1, 2048, 768,
             gate=True, row_tile=tile, tags=_LARGE, **options)
        for name, options in _FLOAT8.items()
        for rows, tile in ((1, 16), (64, 32), (128, 64), (256, 128))
    ),
    *(
        _mlp(f"mlp_{rows}_shipped", f"registers of tiles of {rows // 2} rows", rows, 4, 1, 2048, 768, gate=True,
             row_tile=rows // 2, tags=_LARGE)
        for rows in (64, 128, 256)
    ),
    *(
        _mlp(f"mlp_{name}_{rows}", "the time of a step", rows, *sizes, bench=True, tags=_LARGE)
        for name, sizes in (("qwen3", _QWEN3), ("gpt_oss", _GPT_OSS))
        for rows in (1, 8, 64, 512)
    ),
    *(
        _mlp(f"mlp_gpt_oss_mxfp4_{rows}", "the time of a step, packed", rows, *_GPT_OSS, packed=True, bias=True,
             activation=GPT_OSS, bench=True, tags=_LARGE)
        for rows in (1, 8, 64, 512)
    ),
    *(
        _mlp(f"mlp_qwen3_{name}_{rows}", "the time of a step, float8", rows, *_QWEN3, bench=True, tags=_LARGE,
             **_FLOAT8[name])
        for name in ("w8a16", "w8a8")
        for rows in (1, 8, 64, 512)
    ),
    _route("route_1x128", "decode of one request", 1, 128, 8, renormalise=True, bench=True, tags=_LARGE),
)  # fmt: skip
