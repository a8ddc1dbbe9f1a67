"""Ceilings of the device: bytes per second of a large copy, operations per second of a large matrix product.

No program reaches the rates of a data sheet, so a kernel is compared with rates that were measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from experiments.bench.timing import back_to_back_ms

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
    return Ceilings(2 * _COPY_BYTES / _copy_s(device), 2 * _MATMUL_SIZE**3 / _matmul_s(device))


def _copy_s(device: torch.device) -> float:
    source = torch.randn(_COPY_BYTES // 2, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return _median_s(lambda: target.copy_(source))


def _matmul_s(device: torch.device) -> float:
    sides = [torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2)]
    product = torch.empty_like(sides[0])
    return _median_s(lambda: torch.mm(*sides, out=product))


def _median_s(call: Callable[[], object]) -> float:
    return median(back_to_back_ms(call, _WARMUP, _REPEATS)) / 1e3
