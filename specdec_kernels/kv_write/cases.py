"""Named inputs of the fused norm, rotation and paged store."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Comparison, Maker, WorkModel, case_of
from specdec_kernels.kv_write.rope import rope_table

_MAX_POS = 64


def _stored(
    make: Maker,
    tokens: int,
    planes: tuple[int, ...],
    kv_heads: int,
    head_dim: int,
    norms: Mapping[str, tuple[int, ...]],
    page_size: int = 16,
    norm: bool = True,
    skipped: str = "none",
    positions: tuple[int, int] = (0, _MAX_POS),
    rotary_dim: int | None = None,
    fp8: str = "",
    **options: Any,
) -> dict[str, Any]:
    """A pool [*planes, pages, page_size, H_kv, D] with old contents, distinct slots of the tokens, and all else that
    both functions take. `norms`: shapes of the weights, without `norm` there are none. `skipped`: which slots store
    nothing. `fp8`: scales of an e4m3 pool by number or by head, so small that some entries saturate."""
    pages = -(-tokens // page_size) + 2
    kv = make.normal(*planes, pages, page_size, kv_heads, head_dim)
    slots = torch.randperm(pages * page_size, generator=make.generator)[:tokens]
    if skipped == "some":
        slots[::3] = -1
    elif skipped == "all":
        slots[:] = -1
    elif skipped == "outside":
        slots[::2] = pages * page_size + torch.arange(len(slots[::2]))
    inputs: dict[str, Any] = dict(
        kv=kv.to(torch.float8_e4m3fn) if fp8 else kv,
        slots=slots.to(make.device),
        positions=make.integers(*positions, tokens),
        rope=rope_table(rotary_dim or head_dim, _MAX_POS, device=make.device),
        eps=1e-6,
    )
    inputs |= {name: make.normal(*shape) if norm else None for name, shape in norms.items()}
    if fp8 == "number":
        inputs |= dict(k_scale=0.004, v_scale=0.25)
    elif fp8 == "heads":
        by_head = 2.0 ** -make.integers(0, 9, 2, kv_heads).float()
        inputs |= dict(k_scale=by_head[0], v_scale=by_head[1])
    return inputs | options


def write_inputs(
    make: Maker, tokens: int, heads: tuple[int, int] = (4, 2), head_dim: int = 16, fused: bool = False, **options: Any
) -> dict[str, Any]:
    """`fused`: q, k, v are slices of one projection. `options` as of `_stored`."""
    sizes = (heads[0], heads[1], heads[1])
    if fused:
        parts = make.normal(tokens, sum(sizes), head_dim).split(sizes, dim=1)
    else:
        parts = tuple(make.normal(tokens, size, head_dim) for size in sizes)
    norms = dict(q_norm=(head_dim,), k_norm=(head_dim,))
    return dict(zip("qkv", parts, strict=True)) | _stored(make, tokens, (2,), heads[1], head_dim, norms, **options)


def materialize_inputs(
    make: Maker,
    tokens: int,
    layers: int = 3,
    kv_heads: int = 2,
    head_dim: int = 16,
    fused: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """As `write_inputs`."""
    if fused:
        k, v = make.normal(tokens, layers, 2 * kv_heads, head_dim).split(kv_heads, dim=2)
    else:
        k, v = (make.normal(tokens, layers, kv_heads, head_dim) for _ in range(2))
    norms = dict(k_norm=(layers, head_dim))
    return dict(k=k, v=v) | _stored(make, tokens, (layers, 2), kv_heads, head_dim, norms, **options)


def _write_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """(bytes moved, floating-point operations): every projected element read and written once."""
    elements = inputs["q"].numel() + 2 * inputs["k"].numel()
    stored = 2 * inputs["k"].numel() * inputs["kv"].element_size() + inputs["q"].numel() * inputs["q"].element_size()
    return elements * inputs["q"].element_size() + stored, 8 * elements


def _materialize_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """As `_write_work`, for the keys and values of all layers."""
    elements = 2 * inputs["k"].numel()
    return elements * (inputs["k"].element_size() + inputs["kv"].element_size()), 8 * elements


COMPARISON = Comparison(float64=True)
WORK: dict[str, WorkModel] = {"write_kv": _write_work, "materialize_kv": _materialize_work}

_write = partial(case_of, "write_kv", write_inputs)
_materialize = partial(case_of, "materialize_kv", materialize_inputs)

_SHIPPED: dict[str, Any] = dict(heads=(32, 8), head_dim=128, fused=True)
_SHIPPED_LAYERS: dict[str, Any] = dict(layers=5, kv_heads=8, head_dim=128, fused=True)
_BENCH_LAYERS: dict[str, Any] = dict(bench=True, tags=("large",), **_SHIPPED_LAYERS)

CASES = (
    _write("write_empty", "launch on an empty grid", tokens=0),
    _write("write_odd", "row to (token, head) arithmetic", tokens=7, heads=(6, 3)),
    _write("write_skipped", "slot -1 written, or its query dropped", tokens=10, skipped="some"),
    _write("write_none_stored", "slot -1 wrapped to the last page", tokens=4, skipped="all"),
    _write("write_outside", "slot past the pool written", tokens=9, skipped="outside"),
    _write("write_llama", "norm without weights", tokens=6, norm=False),
    _write("write_behind_table", "a row read past the table", tokens=2, positions=(_MAX_POS, _MAX_POS + 1)),
    _write("write_past_table", "table read out of bounds", tokens=6, positions=(-2, _MAX_POS + 5)),
    _write("write_page_1", "pages of one token", tokens=5, page_size=1),
    _write("write_many", "several programs", tokens=150, heads=(12, 1), skipped="some"),
    _write("write_shipped", "registers and vector width", tokens=4, gate=True, **_SHIPPED),
    _write("write_shipped_llama", "the variant without norms", tokens=4, gate=True, norm=False, **_SHIPPED),
    _write("write_interleaved", "pairs of neighbours", tokens=5, heads=(3, 2), interleaved=True, fused=True),
    _write("write_partial", "elements that do not turn", tokens=5, heads=(3, 2), head_dim=64, rotary_dim=16),
    _write(
        "write_partial_odd", "both parts off the block", tokens=4, head_dim=56, rotary_dim=22, interleaved=True,
        skipped="some",
    ),
    _write("write_scaled", "large numbers cut as for e4m3", tokens=3, k_scale=0.001, v_scale=0.002),
    _write("write_fp8", "saturation, subnormal codes", tokens=9, fp8="number", skipped="some"),
    _write("write_fp8_heads", "scales by head", tokens=6, heads=(6, 3), head_dim=32, fp8="heads", norm=False),
    _write("write_fp8_shipped", "registers of the e4m3 store", tokens=4, gate=True, fp8="heads", **_SHIPPED),
    _write("write_96_shipped", "registers", tokens=4, gate=True, heads=(32, 8), head_dim=96, fused=True),
    _write("write_256_shipped", "registers", tokens=4, gate=True, heads=(16, 8), head_dim=256, fused=True),
    _write("write_interleaved_shipped", "registers", tokens=4, gate=True, interleaved=True, rotary_dim=64, **_SHIPPED),
    _write("write_prefill_shipped", "registers of the long tile", tokens=300, gate=True, tags=("large",), **_SHIPPED),
    _write("write_b8_n16", "verify of eight requests", bench=True, tags=("large",), tokens=128, **_SHIPPED),
    _materialize("materialize_empty", "launch on an empty grid", tokens=0),
    _materialize("materialize_odd", "row to (token, layer, head) arithmetic", tokens=7, kv_heads=3),
    _materialize("materialize_fused", "strides of a stacked projection", tokens=5, fused=True),
    _materialize("materialize_skipped", "rejected rows written", tokens=16, skipped="some"),
    _materialize("materialize_none_stored", "slot -1 wrapped to the last page", tokens=4, skipped="all"),
    _materialize("materialize_outside", "slot past the pool written in the next plane", tokens=9, skipped="outside"),
    _materialize("materialize_llama", "norm without weights", tokens=6, norm=False),
    _materialize("materialize_many", "several programs", tokens=200, layers=2, kv_heads=3),
    _materialize("materialize_shipped", "registers and vector width", tokens=4, gate=True, **_SHIPPED_LAYERS),
    _materialize(
        "materialize_partial", "elements that do not turn", tokens=5, head_dim=32, rotary_dim=16, interleaved=True
    ),
    _materialize("materialize_fp8", "scales by head", tokens=9, kv_heads=3, fp8="heads", skipped="some"),
    _materialize("materialize_fp8_shipped", "registers", tokens=6, gate=True, fp8="number", **_SHIPPED_LAYERS),
    _materialize("materialize_prefill_shipped", "registers", tokens=300, gate=True, tags=("large",), **_SHIPPED_LAYERS),
    _materialize("materialize_b8_n16", "commit of eight requests", tokens=128, **_BENCH_LAYERS),
    _materialize("materialize_prefill_8k", "a long prompt, bound by bandwidth", tokens=8192, **_BENCH_LAYERS),
    _materialize("materialize_prefill_8k_fp8", "an e4m3 pool", tokens=8192, fp8="number", **_BENCH_LAYERS),
)  # fmt: skip
