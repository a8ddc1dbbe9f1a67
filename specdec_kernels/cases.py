"""The contents of a family's `cases.py`.

CASES       named inputs of the public functions. Parity tests run every case, the compile gate compiles the cases
          marked `gate` (shipped shapes), and the unit benchmark times the cases marked `bench`. Cases tagged `large`
          need a GPU; those tagged `huge` are for the benchmark alone.
WORK        optional: per function, bytes and operations of a call, for GB/s and TFLOP/s. Functions bound by memory that
            read and write each of their tensors once need no entry.
COMPARISON  optional: how results are compared with the reference, where the defaults do not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Maker:
    """Makes the tensors of a case on one device, floats in one dtype, from one seeded CPU generator."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    @classmethod
    def seeded(cls, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Maker:
        return cls(torch.device(device), dtype, torch.Generator().manual_seed(seed))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, generator=self.generator) * scale
        return values.to(self.device, self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Uniform integers in [low, high)."""
        values = torch.randint(low, high, shape, generator=self.generator)
        return values.to(self.device, dtype)

    def tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def parents(
        self, batch: int, num_nodes: int, unused: bool = False, reach: int | None = None, roots: int = 1
    ) -> Tensor:
        """[batch, num_nodes] int32: each node under a uniformly chosen one of the nodes before it, of the last `reach`
        if given, or unused now and then. The first `roots` nodes are under none."""
        node = torch.arange(num_nodes)
        draws = torch.rand(batch, num_nodes, generator=self.generator)
        choices = node.clamp(max=num_nodes if reach is None else reach)
        parents = node - choices + (draws * choices).long()
        parents[:, :roots] = -1
        if unused:
            orphan = torch.rand(batch, num_nodes, generator=self.generator) < 0.3
            bad = torch.where(draws < 0.5, -1, num_nodes + 7)
            parents = torch.where(orphan, bad, parents)
        return parents.to(self.device, torch.int32)

    def page_table(self, batch: int, pages_per_row: int, num_pages: int) -> Tensor:
        """[batch, pages_per_row] int32: distinct pages in shuffled order."""
        order = torch.randperm(num_pages, generator=self.generator)[: batch * pages_per_row]
        return order.reshape(batch, pages_per_row).to(self.device, torch.int32)


def tree_masks(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Depths [B, N] int32 and ancestor masks [B, N, ceil(N / 64)] int64 of the trees with these parents [B, N], for the
    families that `tree`, which computes both, builds on."""
    batch, num_nodes = parents.shape
    sees = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    for node in range(1, num_nodes):
        linked = (parents[:, node] >= 0) & (parents[:, node] < node)
        above = sees[torch.arange(batch, device=parents.device), parents[:, node].long().clamp(0, node - 1)]
        sees[:, node] |= above & linked[:, None]
    weights = torch.ones((), dtype=torch.int64) << (torch.arange(num_nodes) % 64)
    words = (sees * weights.to(parents.device)).split(64, -1)
    return (sees.sum(-1) - 1).int(), torch.stack([word.sum(-1) for word in words], -1)


@dataclass(frozen=True)
class Case:
    """A named input: `build` makes the keyword arguments of `function`; `catches` says which bug it is there for."""

    name: str
    function: str
    build: Callable[[Maker], dict[str, Any]]
    catches: str = ""
    gate: bool = False
    bench: bool = False
    tags: tuple[str, ...] = field(default=())


WorkModel = Callable[[dict[str, Any]], tuple[int, int]]
"""(bytes moved, floating-point operations) that a call with these inputs cannot avoid."""


@dataclass(frozen=True)
class Comparison:
    """How the kernels of a family are compared with its reference.

    float64: the reference takes float64, and its results in float64 are the truth for kernel and reference alike.
    compiled_roundings, interpreted_roundings: of the largest value, by which a kernel may err beyond twice the error of
        the reference in its own precision, on a GPU and in the interpreter.
    draws: functions that compare one uniform with a sum over the vocabulary, so that at a real vocabulary a few rows
        may draw another token than the reference.
    by_request: arguments with one entry per request; the benchmark compares a few requests if the reference needs too
        much memory.
    reference_bytes: memory that the reference needs per request, from the inputs of a case; None: too little to count.
    unsettled: per function, from the inputs as they are and in float64, how far each entry of the result moves where a
        number on the way, within the error that it may have, is rounded to one code or to its neighbour; None: nowhere.
    """

    float64: bool = False
    compiled_roundings: int = 4
    interpreted_roundings: int = 4
    draws: tuple[str, ...] = ()
    by_request: tuple[str, ...] = ()
    reference_bytes: Callable[[dict[str, Any]], int] | None = None
    unsettled: dict[str, Callable[[dict[str, Any], dict[str, Any]], Tensor | None]] = field(default_factory=dict)


def bytes_of(inputs: dict[str, Any], *names: str) -> int:
    """Bytes of the named tensors of a case; None is skipped."""
    return sum(inputs[name].nbytes for name in names if inputs[name] is not None)


def comparison_of(family: str) -> Comparison:
    return getattr(import_module(f"specdec_kernels.{family}.cases"), "COMPARISON", Comparison())


def case_of(
    function: str,
    build: Callable[..., dict[str, Any]],
    name: str,
    catches: str,
    *sizes: Any,
    gate: bool = False,
    bench: bool = False,
    tags: tuple[str, ...] = (),
    **arguments: Any,
) -> Case:
    """A case whose inputs are `build(make, *sizes, **arguments)`; families fix `function` and `build`."""
    return Case(name, function, lambda make: build(make, *sizes, **arguments), catches, gate, bench, tags)
