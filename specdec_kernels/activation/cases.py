"""Named inputs of the gated activation."""

from functools import partial
from typing import Any

from specdec_kernels.cases import Comparison, Maker, case_of


def gated_inputs(make: Maker, *shape: int, scale: float = 1.0) -> dict[str, Any]:
    """`shape` is the shape of the result."""
    return dict(gate_up=make.normal(*shape[:-1], 2 * shape[-1], scale=scale))


COMPARISON = Comparison(float64=True)

_case = partial(case_of, "silu_mul", gated_inputs)
_BENCH: dict[str, Any] = dict(bench=True, tags=("large",))


CASES = (
    _case("silu_empty", "launch on an empty grid", 0, 64),
    _case("silu_one", "a row of one element", 1, 1),
    _case("silu_odd", "the second half of an odd width", 7, 63),
    _case("silu_batched", "leading dimensions", 2, 3, 128),
    _case("silu_small", "several blocks of a width off the block", 3, 1536),
    _case("silu_saturated", "an exponential that overflows", 3, 100, scale=200.0),
    _case("silu_shipped", "registers and vector width", 1, 12288, gate=True),
    _case("silu_1x12288", "decode of one request", 1, 12288, **_BENCH),
    _case("silu_16x12288", "verify of one request", 16, 12288, **_BENCH),
    _case("silu_128x12288", "verify of eight requests", 128, 12288, **_BENCH),
)
