"""Named inputs of the draft locations and of the KV indices of branches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Case, Maker
from specdec_kernels.kv_index.ragged_cases import pool_rows, token_table
from specdec_kernels.kv_index.types import SequenceIndices, StepIndices


def _requests(make: Maker, batch: int, longest: int, width: int, table_rows: int | None = None) -> dict[str, Any]:
    """Lengths 0, 1 and the longest, then random ones."""
    lengths = make.integers(0, longest + 1, batch)
    lengths[: min(batch, 3)] = torch.tensor([0, 1, longest])[: min(batch, 3)].to(make.device)
    rows = batch + 2 if table_rows is None else table_rows
    return dict(table=token_table(make, rows, width), rows=pool_rows(make, batch, rows), lengths=lengths)


def _draft_width(longest: int, topk: int, num_steps: int, page_size: int) -> int:
    """Positions that the drafts of the longest request may take."""
    branch = -(-(page_size - 1 + num_steps) // page_size) * page_size
    return longest + topk * max(branch, num_steps)


def _slots(make: Maker, batch: int, topk: int, num_steps: int, page_size: int, longest: int = 9) -> dict[str, Any]:
    width = _draft_width(longest, topk, num_steps, page_size)
    sizes = dict(topk=topk, num_steps=num_steps, page_size=page_size)
    return _requests(make, batch, longest, width) | sizes


def _indices(
    make: Maker,
    batch: int,
    topk: int,
    num_steps: int,
    page_size: int,
    longest: int = 9,
    short: int = 0,
    into: bool = False,
    **extra: Any,
) -> dict[str, Any]:
    """`short`: how much the capacity lacks; `into`: into tensors with contents and a longer row."""
    inputs = _slots(make, batch, topk, num_steps, page_size, longest)
    kept = inputs["lengths"].sum().item() if extra.get("window") is None else batch * longest
    capacity = int(kept) * topk + batch * topk * num_steps + (-short if short else 3)
    if into:
        indptr = make.integers(50, 60, num_steps, batch * topk + 4, dtype=torch.int32)
        extra["out"] = StepIndices(indptr, make.integers(50, 60, num_steps, capacity))
    return inputs | dict(capacity=capacity) | extra


def _verify(
    make: Maker, batch: int, factor: int, longest: int = 9, short: int = 0, into: bool = False
) -> dict[str, Any]:
    inputs = _requests(make, batch, longest, longest + factor)
    total = int(inputs["lengths"].sum()) * factor + batch * factor * (factor + 1) // 2
    capacity = total - short if short else total + 3
    inputs |= dict(factor=factor, capacity=capacity)
    if into:
        indptr = make.integers(50, 60, batch * factor + 4, dtype=torch.int32)
        inputs["out"] = SequenceIndices(indptr, make.integers(50, 60, capacity, dtype=torch.int32))
    return inputs


def _case(
    function: str,
    build: Any,
    name: str,
    catches: str,
    gate: bool = False,
    bench: bool = False,
    large: bool = False,
    **shape: Any,
) -> Case:
    return Case(name, function, partial(build, **shape), catches, gate, bench, ("large",) if large else ())


_slots_case = partial(_case, "draft_slots", _slots)
_indices_case = partial(_case, "draft_kv_indices", _indices)
_verify_case = partial(_case, "verify_decode_indices", _verify)
_STEP: dict[str, Any] = dict(batch=64, topk=4, num_steps=3)

DRAFT_CASES = (
    _slots_case("draft_empty", "B = 0", batch=0, topk=2, num_steps=3, page_size=4),
    _slots_case("draft_page_1", "branches of unpaged drafts", batch=4, topk=3, num_steps=2, page_size=1),
    _slots_case("draft_chain", "one branch over pages", batch=4, topk=1, num_steps=5, page_size=4),
    _slots_case("draft_page_4", "the hole of a copied tail", batch=5, topk=2, num_steps=5, page_size=4),
    _slots_case("draft_page_16", "a tail longer than drafts", batch=7, topk=3, num_steps=2, page_size=16, longest=40),
    _slots_case("draft_one", "a tile of one lane", batch=1, topk=1, num_steps=1, page_size=1),
    _slots_case("draft_b64", "the step's shape", page_size=16, longest=256, gate=True, bench=True, **_STEP),
    _slots_case("draft_b64_page_1", "the variant without tails", page_size=1, longest=40, gate=True, **_STEP),
    _indices_case("indices_empty", "B = 0", batch=0, topk=2, num_steps=2, page_size=4),
    _indices_case("indices_page_1", "topk 1", batch=4, topk=1, num_steps=3, page_size=1),
    _indices_case("indices_branches", "branches of unpaged drafts", batch=3, topk=2, num_steps=3, page_size=1),
    _indices_case("indices_paged", "drafts behind a copied tail", batch=4, topk=2, num_steps=3, page_size=4),
    _indices_case(
        "indices_window",
        "window and sink by the uncut length",
        batch=5,
        topk=2,
        num_steps=2,
        page_size=4,
        window=2,
        sink=1,
    ),
    _indices_case("indices_no_window", "a window of nothing", batch=4, topk=2, num_steps=2, page_size=1, window=0),
    _indices_case(
        "indices_short",
        "branches past the capacity",
        batch=4,
        topk=2,
        num_steps=3,
        page_size=1,
        short=20,
    ),
    _indices_case(
        "indices_into", "row strides, entries that no branch owns", batch=4, topk=2, num_steps=3, page_size=4, into=True
    ),
    _indices_case("indices_gate", "several blocks a program", page_size=16, longest=60, gate=True, **_STEP),
    _indices_case("indices_gate_page_1", "the unpaged variant", batch=2, topk=1, num_steps=3, page_size=1, gate=True),
    _indices_case("indices_b64", "the step's shape", page_size=16, longest=1024, bench=True, large=True, **_STEP),
    _verify_case("verify_empty", "B = 0", batch=0, factor=2),
    _verify_case("verify_2", "the pair of Naive-EAGLE", batch=5, factor=2),
    _verify_case("verify_1", "plain decoding", batch=3, factor=1),
    _verify_case("verify_7", "an odd factor", batch=4, factor=7),
    _verify_case("verify_short", "sequences past the capacity", batch=4, factor=3, short=15),
    _verify_case("verify_into", "entries that no sequence owns", batch=4, factor=3, into=True),
    _verify_case("verify_gate", "registers", batch=6, factor=4, gate=True),
    _verify_case("verify_b64", "the step's shape", batch=64, factor=4, longest=1024, bench=True, large=True),
)
