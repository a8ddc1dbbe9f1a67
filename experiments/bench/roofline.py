"""Bounds of a kernel: the device's measured ceilings, and the bytes and operations that a call cannot avoid.

No program reaches the rates of a data sheet, so a kernel is compared with the rates of a large copy and of a large
matrix product that were measured in the same run. A family says in the `WORK` of its `cases.py` what its functions must
move and compute. Without an entry each tensor argument counts as read once and each result as written once, too much
for a function that touches only part of a pool; `work_counted` of a result says which of the two was counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple

import torch

from experiments.bench.timing import back_to_back_ms
from specdec_kernels.parity import bytes_in

_COPY_BYTES = 2 << 30
_MATMUL_SIZE = 8192
_WARMUP, _REPEATS = 3, 11


@dataclass(frozen=True)
class Ceilings:
    """Measured rates: `bytes_per_s` counts what a device copy reads plus what it writes; `flop_per_s` is of a
    bfloat16 matrix product."""

    bytes_per_s: float
    flop_per_s: float

    def floor_us(self, moved_bytes: int, flop: int) -> tuple[float, str]:
        """The least time for the work, in microseconds, and which ceiling sets it."""
        memory, compute = moved_bytes / self.bytes_per_s * 1e6, flop / self.flop_per_s * 1e6
        return (memory, "memory") if memory >= compute else (compute, "compute")


def measure_ceilings(device: torch.device) -> Ceilings | None:
    """Both ceilings of a GPU, None elsewhere."""
    if device.type != "cuda":
        return None

    def seconds(call: Callable[[], object]) -> float:
        return median(back_to_back_ms(call, _WARMUP, _REPEATS)) / 1e3

    source = torch.randn(_COPY_BYTES // 2, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source))
    sides = [torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2)]
    product = torch.empty_like(sides[0])
    matmul_s = seconds(lambda: torch.mm(*sides, out=product))
    return Ceilings(2 * _COPY_BYTES / copy_s, 2 * _MATMUL_SIZE**3 / matmul_s)


class Work(NamedTuple):
    """Bytes and operations of a call, and who counted them."""

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
