"""Named inputs of the norms."""

from functools import partial
from typing import Any

from specdec_kernels.cases import Comparison, Maker, WorkModel, case_of

_EPS = 1e-6
_8B = 4096
_SMALL = 576  # SmolLM2-135M


def norm_inputs(make: Maker, *shape: int, scale: float = 1.0, eps: float = _EPS, wide: bool = False) -> dict[str, Any]:
    """wide: a weight in float32."""
    weight = make.normal(shape[-1])
    return dict(x=make.normal(*shape, scale=scale), weight=weight.float() if wide else weight, eps=eps)


def add_inputs(make: Maker, *shape: int, scale: float = 1.0, wide: bool = False) -> dict[str, Any]:
    return norm_inputs(make, *shape, wide=wide) | dict(residual=make.normal(*shape, scale=scale))


def embed_inputs(make: Maker, *shape: int, vocab: int = 50, width: int = 64, outside: bool = False) -> dict[str, Any]:
    """`outside`: some tokens lie just before or after the table, others are its first and its last."""
    tokens = make.integers(0, vocab, *shape)
    if outside:
        tokens.view(-1)[::3] = -1
        tokens.view(-1)[1::3] = vocab
        tokens.view(-1)[2::6] = 0
        tokens.view(-1)[5::6] = vocab - 1
    return dict(tokens=tokens, table=make.normal(vocab, width), weight=make.normal(width), eps=_EPS)


def join_inputs(
    make: Maker, *shape: int, columns: int | None = None, outside: bool = False, **sizes: int
) -> dict[str, Any]:
    """`columns` features for each row of tokens, each in any order; None: one for each token."""
    inputs = embed_inputs(make, *shape, outside=outside, **sizes)
    width = inputs["table"].shape[1]
    feature = make.normal(*shape[:-1], columns or shape[-1], width, scale=3.0)
    sources = None
    if columns is not None:
        sources = make.integers(-1, columns + 1, *shape) if outside else make.integers(0, columns, *shape)
    return inputs | dict(feature=feature, feature_weight=make.normal(width), sources=sources)


def _embed_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """(bytes moved, floating-point operations): of the table the rows of the tokens alone."""
    elements = inputs["tokens"].numel() * inputs["table"].shape[1]
    return 3 * elements * inputs["table"].element_size(), 4 * elements


def _join_work(inputs: dict[str, Any]) -> tuple[int, int]:
    elements = inputs["tokens"].numel() * inputs["table"].shape[1]
    return (4 + (inputs["sources"] is not None)) * elements * inputs["table"].element_size(), 8 * elements


COMPARISON = Comparison(float64=True)

WORK: dict[str, WorkModel] = {"embed_rms_norm": _embed_work, "embed_join_rms_norm": _join_work}

_norm = partial(case_of, "rms_norm", norm_inputs)
_add = partial(case_of, "add_rms_norm", add_inputs)
_embed = partial(case_of, "embed_rms_norm", embed_inputs)
_join = partial(case_of, "embed_join_rms_norm", join_inputs)
_BENCH: dict[str, Any] = dict(bench=True, tags=("large",))


CASES = (
    _norm("norm_empty", "launch on an empty grid", 0, 64),
    _norm("norm_one", "a row of one element", 1, 1),
    _norm("norm_odd", "lanes past the width", 7, 63),
    _norm("norm_batched", "leading dimensions", 2, 3, _SMALL),
    _norm("norm_large_values", "squares summed in a narrow type", 3, 1536, scale=300.0),
    _norm("norm_eps", "eps left out", 3, 64, scale=1e-3, eps=1e-2),
    _norm("norm_zero", "a division by zero", 2, 64, scale=0.0),
    _norm("norm_shipped", "registers and vector width", 2, _8B, gate=True),
    _norm("norm_small_shipped", "registers of a width off the block", 2, _SMALL, gate=True),
    _norm("norm_widest_shipped", "registers of the widest row", 1, 16384, gate=True),
    _norm("norm_wide_weight_shipped", "a row rounded before a float32 weight", 2, 2880, wide=True, gate=True),
    _norm("norm_128x4096", "verify of eight requests", 128, _8B, **_BENCH),
    _add("add_empty", "launch on an empty grid", 0, 64),
    _add("add_odd", "lanes past the width", 7, 1535),
    _add("add_large_residual", "a sum that is not rounded before the norm", 5, 576, scale=1000.0),
    _add("add_shipped", "registers and vector width", 2, _8B, gate=True),
    _add("add_wide_weight_shipped", "the same after an addition", 2, 2880, wide=True, gate=True),
    _add("add_1x4096", "decode of one request", 1, _8B, **_BENCH),
    _add("add_16x4096", "verify of one request", 16, _8B, **_BENCH),
    _add("add_128x4096", "verify of eight requests", 128, _8B, **_BENCH),
    _add("add_8x576", "decode of eight requests of a small model", 8, _SMALL, **_BENCH),
    _embed("embed_empty", "launch on an empty grid", 0),
    _embed("embed_odd", "row to token", 7, width=63),
    _embed("embed_batched", "leading dimensions", 2, 3),
    _embed("embed_outside", "a token outside the table read out of bounds", 2, 9, outside=True),
    _embed("embed_shipped", "registers", 2, vocab=32, width=_8B, gate=True),
    _embed("embed_16x4096", "verify of one request", 16, vocab=151936, width=_8B, **_BENCH),
    _join("join_empty", "launch on an empty grid", 0, 3, columns=2),
    _join("join_chain", "halves in the wrong order", 3, 1, width=63),
    _join("join_sources", "a feature of another request", 3, 5, columns=4),
    _join("join_outside", "a source outside read out of bounds", 4, 9, columns=3, outside=True),
    _join("join_more_columns", "rows of one side taken for the other's", 2, 3, columns=7),
    _join("join_shipped", "registers", 1, 10, columns=10, vocab=32, width=_8B, gate=True),
    _join("join_chain_shipped", "registers without sources", 1, 1, vocab=32, width=_8B, gate=True),
    _join("join_10x4096", "a level of a tree", 1, 10, columns=10, vocab=151936, width=_8B, **_BENCH),
)
