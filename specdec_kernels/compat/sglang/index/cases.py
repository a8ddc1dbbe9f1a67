"""Named inputs of the index functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from specdec_kernels.cases import Case, Maker
from specdec_kernels.tree import build_tree


def _case(
    name: str, catches: str, use: str = "", *, function: str, build: Callable[..., dict[str, Any]], **shape: Any
) -> Case:
    """`use`: any of the words gate, bench and large."""
    tags = ("large",) if "large" in use else ()
    return Case(name, function, partial(build, **shape), catches, "gate" in use, "bench" in use, tags)


def _candidates(make: Maker, batch: int, num_nodes: int, topk: int, steps: int, closed: bool = True) -> dict[str, Any]:
    """The ids that a worker keeps after `steps` steps; not `closed`: any ids, also some without meaning."""
    rows, total = topk * (steps - 1) + 1, topk + topk * topk * (steps - 1)
    history = [torch.full((batch, 1), -1), torch.arange(topk).repeat(batch, 1)]
    for step in range(1, steps - 1):
        ids = torch.rand(batch, topk * topk, generator=make.generator).argsort(-1)[:, :topk].sort(-1).values
        history.append(ids + topk + topk * topk * (step - 1))
    parent_list = torch.cat(history, 1)[:, : rows if steps > 1 else 0]
    drafts = num_nodes - 1
    if closed:
        selected = torch.rand(batch, total, generator=make.generator).argsort(-1)[:, :drafts].sort(-1).values
    else:
        selected = torch.randint(-2, total + 3 * topk, (batch, drafts), generator=make.generator)
    return dict(selected=selected.to(make.device), parent_list=parent_list.to(make.device), topk=topk)


def _mask(make: Maker, batch: int, num_nodes: int, longest: int = 40, **options: Any) -> dict[str, Any]:
    """Words of random trees over requests of up to `longest` committed tokens."""
    lengths = make.integers(0, longest + 1, batch)
    parents = (torch.rand(batch, num_nodes, generator=make.generator) * torch.arange(num_nodes)).int()
    mask = build_tree(parents.to(make.device), lengths, impl="reference").mask
    return dict(mask=mask, lengths=lengths, **options)


def _noise_mask(make: Maker, batch: int, num_nodes: int, **options: Any) -> dict[str, Any]:
    words = make.integers(-(1 << 62), 1 << 62, batch, num_nodes, -(-num_nodes // 64))
    return dict(mask=words & (words >> 1), lengths=make.integers(0, 40, batch), **options)


_candidates_case = partial(_case, function="parents_from_candidates", build=_candidates)
_mask_case = partial(_case, function="export_mask", build=_mask)
_full_case = partial(_mask_case, form="full")
_bytes_case = partial(_mask_case, form="flashinfer")
_64: dict[str, Any] = dict(batch=64, num_nodes=64)

TREE_CASES = (
    _candidates_case("candidates_one_step", "an empty history", batch=2, num_nodes=4, topk=4, steps=1),
    _candidates_case("candidates_root_only", "no entry at all", batch=2, num_nodes=1, topk=2, steps=2),
    _candidates_case("candidates_64", "orphans of a random choice", "gate bench", topk=8, steps=6, **_64),
    _candidates_case(
        "candidates_strange", "ids outside the history", batch=5, num_nodes=9, topk=3, steps=4, closed=False
    ),
    _candidates_case("candidates_256", "a parent in another block", batch=1, num_nodes=256, topk=10, steps=8),
    _full_case("full_empty_batch", "offsets of nothing", batch=0, num_nodes=3, capacity=5),
    _full_case("full_odd", "rows off the block", "gate", batch=3, num_nodes=7, capacity=999),
    _full_case("full_cut", "stores past the capacity", batch=4, num_nodes=5, capacity=301),
    _full_case("full_long", "a prefix of several blocks", batch=2, num_nodes=3, longest=5000, capacity=31000),
    _full_case(
        "full_64", "the second half of a word", "bench large", batch=8, num_nodes=64, longest=8192,
        capacity=8 * 64 * 8256,
    ),
    _full_case("full_many", "sizes of a second block of requests", batch=1100, num_nodes=1, longest=3, capacity=3300),
    _mask_case("query_empty_batch", "launch on an empty grid", batch=0, num_nodes=3, form="query"),
    _mask_case("query_64", "the sign bit", "gate bench", form="query", **_64),
    _mask_case("query_130", "columns past the last word", batch=2, num_nodes=130, form="query"),
    _mask_case("packed_8", "bytes a row", batch=5, num_nodes=8, form="packed"),
    _mask_case("packed_13", "two bytes", batch=3, num_nodes=13, form="packed"),
    _mask_case("packed_32", "four bytes", batch=2, num_nodes=32, form="packed"),
    _mask_case("packed_64", "sign extension", "gate bench", form="packed", **_64),
    _mask_case("packed_noise", "bits beyond N", build=_noise_mask, batch=2, num_nodes=5, form="packed"),
    _bytes_case("flashinfer_odd", "a byte that spans rows", batch=3, num_nodes=5, capacity=99),
    _bytes_case("flashinfer_short", "several rows in a byte", batch=6, num_nodes=3, longest=2, capacity=20),
    _bytes_case("flashinfer_130", "words of a byte", "gate", batch=2, num_nodes=130, capacity=5000),
)  # fmt: skip

CASES = TREE_CASES


def _bytes_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _candidates_work(inputs: dict[str, Any]) -> tuple[int, int]:
    """(bytes, operations): ids read once, parents written once."""
    return _bytes_of(inputs["selected"], inputs["parent_list"]) + inputs["selected"].numel() * 4, 0


def _export_work(inputs: dict[str, Any]) -> tuple[int, int]:
    batch, nodes = inputs["mask"].shape[:2]
    return _bytes_of(inputs["mask"], inputs["lengths"]) + (inputs.get("capacity") or batch * nodes * nodes), 0


# The other functions handle a few KB: what counts there is the launch, and the benchmark counts every tensor once.
WORK = {"parents_from_candidates": _candidates_work, "export_mask": _export_work}
