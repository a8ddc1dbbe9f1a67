"""Named inputs of the products of few rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from specdec_kernels.all_reduce.cases import exchange_inputs
from specdec_kernels.all_reduce.reference import words_of
from specdec_kernels.all_reduce.types import SLOTS, Exchange, exchange_elements
from specdec_kernels.cases import Case, Comparison, Maker, WorkModel, case_of
from specdec_kernels.parity import bytes_in
from specdec_kernels.projection.types import GROUP, ScaledWeight

_LARGE = ("large",)


def linear_inputs(
    make: Maker, rows: int | tuple[int, ...], outer: int, inner: int, bias: bool = False, **options: Any
) -> dict[str, Any]:
    """A weight of the size that keeps the variance of x."""
    leading = rows if isinstance(rows, tuple) else (rows,)
    inputs = dict(x=make.normal(*leading, inner), weight=make.normal(outer, inner, scale=inner**-0.5))
    return inputs | (dict(bias=make.normal(outer)) if bias else {}) | options


def normed_inputs(make: Maker, rows: int | tuple[int, ...], outer: int, inner: int, **options: Any) -> dict[str, Any]:
    inputs = linear_inputs(make, rows, outer, inner, **options)
    residual = make.normal(*inputs["x"].shape[:-1], outer)
    return inputs | dict(residual=residual, norm_weight=make.normal(outer), eps=1e-6)


def scaled_weight(make: Maker, outer: int, inner: int, group_rows: int, group_inner: int) -> ScaledWeight:
    """All finite codes, and scales that differ by a factor of up to 16 and keep the variance of x."""
    codes = make.integers(0, 256, outer, inner, dtype=torch.uint8)
    codes = torch.where(codes % 128 == 127, codes - 1, codes)
    scales = make.normal(-(-outer // group_rows), -(-inner // group_inner)).float().sigmoid()
    return ScaledWeight(codes, (scales * inner**-0.5 / 64).contiguous(), group_rows, group_inner)


def scaled_inputs(
    make: Maker,
    rows: int | tuple[int, ...],
    outer: int,
    inner: int,
    groups: tuple[int, int] = (GROUP, GROUP),
    bias: bool = False,
    float8_x: bool = False,
) -> dict[str, Any]:
    """`groups`: rows and inner elements that have one scale. One row of x is zeros, and one has large numbers."""
    leading = rows if isinstance(rows, tuple) else (rows,)
    weight = scaled_weight(make, outer, inner, *groups)._replace(float8_x=float8_x)
    x = make.normal(*leading, inner)
    if float8_x:
        x.view(-1, inner)[1:2] = 0.0
        x.view(-1, inner)[2:3, ::7] *= 32.0
    return dict(x=x, weight=weight) | (dict(bias=make.normal(outer)) if bias else {})


def scaled_normed_inputs(make: Maker, rows: int, outer: int, inner: int, **options: Any) -> dict[str, Any]:
    inputs = scaled_inputs(make, rows, outer, inner, **options)
    return inputs | dict(residual=make.normal(rows, outer), norm_weight=make.normal(outer), eps=1e-6)


def argmax_inputs(make: Maker, rows: int | tuple[int, ...], outer: int, inner: int) -> dict[str, Any]:
    """Small integers, whose products and sums are exact in every dtype: equal logits are equal bits."""
    leading = rows if isinstance(rows, tuple) else (rows,)
    x, weight = make.integers(-1, 2, *leading, inner), make.integers(-1, 2, outer, inner)
    x[..., 128:] = 0  # logits stay below 256, the last integer of bfloat16 without a gap
    return dict(x=x.to(make.dtype), weight=weight.to(make.dtype))


def chosen_inputs(
    make: Maker, rows: int, outer: int, inner: int, *, ranks: int = 2, rank: int = 0, capacity: int = 8
) -> dict[str, Any]:
    """The rows of a rank's share of a weight, where the other ranks have sent their largest logits. Some equal those of
    this rank, whose columns are before or after theirs; some rows have none."""
    inputs = argmax_inputs(make, rows, outer, inner)
    size = exchange_elements(ranks, capacity, 2)
    memory = torch.zeros(ranks * size, dtype=torch.int64, device=make.device)
    calls = make.integers(0, 5, rows)
    first = rank * size + 2 * SLOTS * ranks * capacity
    memory[first : first + rows] = calls
    best = (inputs["x"].float() @ inputs["weight"].float().T).amax(1)
    best[1::3] = float("-inf")
    row, lane = torch.arange(rows, device=make.device), torch.arange(2, device=make.device)
    best[2::3] += make.integers(-1, 2, len(best[2::3]))
    for other in range(ranks):
        columns = other * outer + make.integers(0, outer, rows)
        numbers = torch.stack([best.view(torch.int32), columns.int()], 1)
        at = rank * size + (calls + 1) % SLOTS * 2 * ranks * capacity + 2 * (other * capacity + row)
        memory[at[:, None] + lane] = words_of(numbers, calls + 1)
    offsets = make.tensor([other * size for other in range(ranks)], torch.int64)
    return inputs | dict(exchange=Exchange(memory, offsets, rank, capacity, 2))


def _unusable_inputs(make: Maker, rows: int, outer: int, inner: int) -> dict[str, Any]:
    """A row of NaN, one of -inf, one whose columns from 3 on are +inf, and ordinary ones."""
    inputs = argmax_inputs(make, rows, outer, inner)
    x, weight = inputs["x"], inputs["weight"]
    weight[:, :2] = 1.0
    weight[:3, 0] = -1.0
    x[0], x[1:3] = float("nan"), 0.0
    x[1, 1], x[2, 0] = float("-inf"), float("inf")
    return inputs


def _work_of(written: Callable[[int, int], int], bytes_apart: int = 0) -> WorkModel:
    """(bytes moved, floating-point operations): weight and x read once, `written(rows, outer)` elements read or written
    besides, and `bytes_apart` per row."""

    def work(inputs: dict[str, Any]) -> tuple[int, int]:
        x, weight = inputs["x"], inputs["weight"]
        (outer, inner), rows = weight.shape, x.numel() // x.shape[-1]
        read = bytes_in(weight)
        elements = x.numel() + written(rows, outer)
        return read + elements * x.element_size() + bytes_apart * rows, 2 * rows * outer * inner

    return work


COMPARISON = Comparison(float64=True)

WORK: dict[str, WorkModel] = {
    "linear": _work_of(lambda rows, outer: rows * outer),
    "linear_silu_mul": _work_of(lambda rows, outer: rows * outer // 2),
    "linear_add_rms_norm": _work_of(lambda rows, outer: 3 * rows * outer),
    "linear_all_reduce_add_rms_norm": _work_of(lambda rows, outer: 3 * rows * outer),
    "linear_argmax": _work_of(lambda rows, outer: 0, bytes_apart=8),
}

# Weights of the shapes that are timed: [outer, inner] of Qwen3-8B's packed projections, of
# their halves on two devices, then of SmolLM2-135M's.
WEIGHTS = {
    "8b_qkv": (6144, 4096),
    "8b_o": (4096, 4096),
    "8b_gate_up": (24576, 4096),
    "8b_down": (4096, 12288),
    "8b_head": (151936, 4096),
    "half8b_qkv": (3072, 4096),
    "half8b_o": (4096, 2048),
    "half8b_gate_up": (12288, 4096),
    "half8b_down": (4096, 6144),
    "135m_qkv": (960, 576),
    "135m_o": (576, 576),
    "135m_gate_up": (3072, 576),
    "135m_down": (576, 1536),
    "135m_head": (49152, 576),
}


def exchanged_inputs(
    make: Maker, rows: int | tuple[int, ...], outer: int, inner: int, **options: int
) -> dict[str, Any]:
    """A rank's part of a projection, where the other ranks have sent theirs. Sums of small integers are exact, so what
    this rank sends can be compared bit by bit."""
    inputs = normed_inputs(make, rows, outer, inner)
    for name in ("x", "weight"):
        inputs[name] = make.integers(-1, 2, *inputs[name].shape).to(make.dtype)
    other = exchange_inputs(make, *inputs["residual"].shape, **options)
    return inputs | dict(exchange=other["exchange"], slot=other["slot"])


_linear = partial(case_of, "linear", linear_inputs)
_gated = partial(case_of, "linear_silu_mul", linear_inputs)
_normed = partial(case_of, "linear_add_rms_norm", normed_inputs)
_exchanged = partial(case_of, "linear_all_reduce_add_rms_norm", exchanged_inputs)
_argmax = partial(case_of, "linear_argmax", argmax_inputs)
_chosen = partial(case_of, "linear_argmax", chosen_inputs)
_scaled = partial(case_of, "linear", scaled_inputs)
_scaled_gated = partial(case_of, "linear_silu_mul", scaled_inputs)
_scaled_normed = partial(case_of, "linear_add_rms_norm", scaled_normed_inputs)
_MAKERS = dict(gate_up=_gated, o=_normed, down=_normed)
_SCALED_MAKERS = dict(gate_up=_scaled_gated, o=_scaled_normed, down=_scaled_normed)
_FLOAT8_X: dict[str, Any] = dict(float8_x=True)
_GATED: dict[str, Any] = dict(gate=True, tags=_LARGE)
_SHIPPED: dict[str, Any] = _GATED | dict(batch_invariant=True)


def _timed(maker: Callable[..., Case], weight: str, rows: int, kind: str = "", **options: Any) -> Case:
    name = f"{weight}{kind}_{rows}"
    return maker(name, "the time of a step", rows, *WEIGHTS[weight], bench=True, tags=_LARGE, **options)


CASES = (
    _linear("linear_no_rows", "launch on an empty grid", 0, 32, 16),
    _linear("linear_one", "a product of one number", 1, 1, 1),
    _linear("linear_odd", "lanes past the rows, the columns and the inner dimension", 7, 45, 33),
    _linear("linear_batched", "leading dimensions", (2, 3), 32, 64),
    _linear("linear_bias", "the bias left out, or added by every split", 5, 70, 600, bias=True),
    _linear("linear_small_qkv", "several column tiles off the tile", 3, 960, 576),
    _linear("linear_small_down", "partial sums of three splits", 2, 576, 1536),
    _linear("linear_uneven", "a split shorter than the others", 3, 40, 1100),
    _linear("linear_17_rows", "a second block of rows", 17, 48, 64),
    _linear("linear_64_rows", "the last number of rows that the kernel takes by itself", 64, 48, 600),
    _linear("linear_65_rows", "rows that go to torch", 65, 48, 64),
    _exchanged("exchanged_split", "partial sums left to the exchange", 3, 64, 1536, slot=1),
    _exchanged("exchanged_whole", "a product without partial sums", 2, 48, 64, rank=1, ranks=3),
    _exchanged("exchanged_65_rows", "rows that go to torch", 65, 48, 64, capacity=80),
    _linear("linear_float32", "a sum rounded to the dtype of x", 3, 48, 600, out_dtype=torch.float32),
    _linear("linear_129_rows", "rows past those of one program", 129, 48, 600, batch_invariant=True),
    _linear("linear_1_shipped", "registers, shared memory and tensor cores of few tiles", 1, 4096, 4096, **_GATED),
    *(
        _linear(f"linear_{rows}_shipped", "the same for more rows", rows, 4096, 4096, **_SHIPPED)
        for rows in (32, 64, 128)
    ),
    *(
        _linear(f"linear_{rows}_wide_shipped", "the same of many tiles", rows, 49152, 576, **_SHIPPED)
        for rows in (1, 64, 128)
    ),
    _linear("linear_bias_shipped", "the variant with a bias", 16, 960, 576, gate=True, bias=True),
    _gated("gated_no_rows", "launch on an empty grid", 0, 32, 16),
    _gated("gated_odd", "gate and up mixed at an odd width", 7, 90, 33),
    _gated("gated_batched", "leading dimensions", (2, 3), 64, 32),
    _gated("gated_small", "several tiles, several splits", 3, 3072, 576),
    _gated("gated_65_rows", "rows that go to torch and the activation kernel", 65, 48, 64),
    _gated("gated_1_shipped", "registers of the split tile", 1, 24576, 4096, **_GATED),
    _linear("linear_resident_rows_shipped", "the same beside more rows", 20, 17024, 256, **_GATED),
    _linear("linear_resident_shipped", "registers of a resident weight", 1, 3072, 4096, **_GATED),
    _gated("gated_pairs_shipped", "two programs a processor", 16, 12288, 4096, **_GATED),
    _gated("gated_128_shipped", "the same at 128 rows", 128, 24576, 4096, **_SHIPPED),
    _normed("normed_no_rows", "launch on an empty grid", 0, 32, 16),
    _normed("normed_one_split", "the product itself taken for partial sums", 3, 45, 33),
    _normed("normed_splits", "partial sums of other rows or in another order", (2, 3), 70, 1100),
    _normed("normed_65_rows", "rows that go to torch and the norm kernel", 65, 48, 64),
    _normed("normed_shipped", "registers of the norm of partial sums", 1, 4096, 4096, **_GATED),
    _argmax("argmax_no_rows", "launch on an empty grid", 0, 32, 16),
    _argmax("argmax_one", "one column", 1, 1, 16),
    _argmax("argmax_ties", "the highest of equal columns", 7, 700, 4),
    _argmax("argmax_batched", "leading dimensions, several tiles", (2, 9), 1100, 130),
    case_of("linear_argmax", _unusable_inputs, "argmax_unusable", "a row without a usable logit", 5, 700, 4),
    _chosen("chosen_first_rank", "the columns of another rank", 7, 70, 33),
    _chosen("chosen_second_rank", "columns counted from 0, or the higher of equal ones", 8, 70, 33, rank=1),
    _chosen("chosen_of_four", "a rank left out", 4, 45, 33, ranks=4, rank=2),
    _chosen("chosen_shipped", "registers of the second kernel", 1, 75968, 64, **_GATED),
    _argmax("argmax_65_rows", "rows that go to torch", 65, 48, 64),
    _argmax("argmax_1_shipped", "registers of the reduction", 1, 49152, 576, **_GATED),
    _argmax("argmax_64_shipped", "the same at 64 rows", 64, 151936, 64, **_GATED),
    _argmax("8b_head_argmax_1", "greedy decode of one request", 1, *WEIGHTS["8b_head"], bench=True, tags=_LARGE),
    _argmax("8b_head_argmax_16", "greedy verify of one request", 16, *WEIGHTS["8b_head"], bench=True, tags=_LARGE),
    _scaled("scaled_no_rows", "launch on an empty grid", 0, 130, 16),
    _scaled("scaled_odd", "lanes past the rows, the columns and the inner dimension", 7, 45, 33),
    _scaled("scaled_576_rows", "the scales of a block that is not whole, and of several splits", 3, 576, 1100),
    _scaled("scaled_17_rows", "a second block of rows", 17, 130, 300),
    _scaled("scaled_129_rows", "rows past those of one program", 129, 48, 600),
    _scaled("scaled_bias", "the bias left out, or scaled", (2, 3), 300, 600, bias=True),
    _scaled("scaled_by_row", "scales of rows, in each split", 3, 300, 1100, groups=(1, 1100)),
    _scaled("scaled_packed", "scales of groups smaller than a tile", 3, 304, 300, groups=(16, 128)),
    _scaled("scaled_blocks_of_rows", "scales of rows and of groups", 3, 70, 300, groups=(1, 128)),
    _scaled("float8_x_odd", "a group of x past its end, zeros, numbers of two sizes", 7, 45, 333, float8_x=True),
    _scaled("float8_x_splits", "scales of x in several splits", 3, 300, 1100, float8_x=True, bias=True),
    _scaled("float8_x_17_rows", "codes of x that a kernel before the product wrote", 17, 130, 640, float8_x=True),
    _scaled("float8_x_200_rows", "the same for tiles that take all splits", 200, 300, 640, float8_x=True),
    _scaled("float8_x_by_row", "scales of rows and of groups of x", 3, 300, 1100, groups=(1, 1100), float8_x=True),
    _scaled_gated("float8_x_gated", "both scales of gate and up", 3, 512, 300, float8_x=True),
    _scaled_normed("float8_x_normed", "both scales in partial sums", 3, 300, 1100, float8_x=True),
    _scaled_gated("scaled_gated", "the scales of gate and up", 3, 512, 300),
    _scaled_gated("scaled_gated_odd", "halves of a tile that lie in two groups", 3, 2 * 192, 300, groups=(64, 128)),
    _scaled_gated("scaled_gated_by_row", "the same for scales of rows", 3, 90, 33, groups=(1, 33)),
    _scaled_normed("scaled_normed", "scaled partial sums left to the norm", 3, 300, 1100),
    *(
        maker(f"{name}_shipped", "resources of float8 weights", rows, *WEIGHTS[weight], **_GATED, **options)
        for name, maker, weight, rows, options in (
            *((f"scaled_{rows}", _scaled, "8b_qkv", rows, {}) for rows in (1, 32, 64, 128, 1024)),
            ("scaled_gated_1", _scaled_gated, "8b_gate_up", 1, {}),
            ("scaled_gated_16_by_row", _scaled_gated, "8b_gate_up", 16, dict(groups=(1, 4096))),
            ("scaled_down_1", _scaled_normed, "8b_down", 1, {}),
            ("scaled_by_row_1", _scaled, "8b_qkv", 1, dict(groups=(1, 4096))),
            ("scaled_packed_1", _scaled, "8b_qkv", 1, dict(groups=(16, 128))),
            ("scaled_135m_16", _scaled, "135m_qkv", 16, {}),
            *((f"float8_x_{rows}", _scaled, "8b_qkv", rows, _FLOAT8_X) for rows in (1, 32, 64, 128, 1024)),
            ("float8_x_gated_1", _scaled_gated, "8b_gate_up", 1, _FLOAT8_X),
            ("float8_x_gated_32", _scaled_gated, "8b_gate_up", 32, _FLOAT8_X),
            ("float8_x_gated_64", _scaled_gated, "8b_gate_up", 64, _FLOAT8_X),
            ("float8_x_bias_16", _scaled, "8b_o", 16, _FLOAT8_X | dict(bias=True)),
            ("float8_x_by_torch", _scaled, "8b_o", 65, _FLOAT8_X | dict(bias=True)),
            ("float8_x_normed_by_torch", _scaled_normed, "8b_o", 200, _FLOAT8_X),
            ("float8_x_down_1", _scaled_normed, "8b_down", 1, _FLOAT8_X),
            ("float8_x_by_row_1", _scaled, "8b_qkv", 1, _FLOAT8_X | dict(groups=(1, 4096))),
            ("float8_x_135m_16", _scaled, "135m_qkv", 16, _FLOAT8_X),
        )
    ),
    *(
        _timed(_SCALED_MAKERS.get(weight.split("_", 1)[1], _scaled), weight, rows, f"_{name}", float8_x=name == "w8a8")
        for weight in ("8b_qkv", "8b_o", "8b_gate_up", "8b_down")
        for name in ("w8a16", "w8a8")
        for rows in (1, 16, 64, 512)
    ),
    *(
        _timed(_MAKERS.get(weight.split("_", 1)[1], _linear), weight, rows)
        for weight in WEIGHTS
        for rows in (1, 16, 64)
    ),
)
