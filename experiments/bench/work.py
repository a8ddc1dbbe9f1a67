"""Bytes and operations that a call cannot avoid.

A family says in the `WORK` of its `cases.py` what its functions must move and compute. Without an entry each tensor
argument counts as read once and each result as written once, which is too much where a function touches only part of a
pool; `work_counted` in the row says which of the two was counted.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from experiments.bench.timing import bytes_in


class Work(NamedTuple):
    moved_bytes: int
    flop: int
    work_counted: str


def work_of(family: str, function: str, inputs: dict[str, Any], result: Any) -> Work:
    """Work of one call with `inputs` that gave `result`."""
    counting = getattr(import_module(f"specdec_kernels.{family}.cases"), "WORK", {}).get(function)
    if counting is None:
        return Work(bytes_in(inputs) + bytes_in(result), 0, "every tensor once")
    moved_bytes, flop = counting(inputs)
    return Work(moved_bytes, flop, "family")
