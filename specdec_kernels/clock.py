"""The device's clock, read by a kernel, for the time per phase inside a replayed CUDA graph.

The times are summed on the device: `times [P + 1]` int64 holds the nanosecond of the last border in entry 0, and the
nanoseconds of phase p in entry p + 1. Every border costs one launch of one warp.
"""

# mypy: ignore-errors
import time

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, launch

_AMD_TICK_NS = 10  # AMD's real-time counter runs at 100 MHz


@triton.jit(do_not_specialize=["place"])
def _border_kernel(
    times_ptr,  # [P + 1] int64
    place,  # entry that the time since the last border is added to; 0: none
    AMD_TICK_NS: tl.constexpr,
):
    """One program. Its predecessors have ended, because it is launched without overlap."""
    if AMD_TICK_NS > 0:  # noqa: SIM108 (a compile-time branch)
        now = tl.extra.hip.memrealtime() * AMD_TICK_NS
    else:
        now = tl.extra.cuda.globaltimer()  # the clock that all multiprocessors share
    spent = now - tl.load(times_ptr)
    total = tl.load(times_ptr + place)
    tl.store(times_ptr + place, total + spent, mask=place > 0)
    tl.store(times_ptr, now)


def pass_border(times: Tensor, place: int) -> None:
    """Add the time since the last border to `times[place]` and restart the clock; place 0 only restarts it. `times` [P
    + 1] int64, contiguous; `place` 0 to P. On a GPU this is work of the current stream and can be captured; elsewhere
    it reads the host's clock at once. Raises ValueError if shape, dtype or place do not fit."""
    if times.dim() != 1 or times.dtype != torch.int64 or not times.is_contiguous():
        raise ValueError(f"times: expected a contiguous [P + 1] int64, got {list(times.shape)} {times.dtype}")
    if not 0 <= place < len(times):
        raise ValueError(f"place: expected 0 to {len(times) - 1}, got {place}")
    chip = current_chip(times)
    if chip == "interpreter":
        now = time.perf_counter_ns()
        if place > 0:
            times[place] += now - times[0]
        times[0] = now
        return
    launch(_border_kernel, (1,), times, place, num_warps=1, AMD_TICK_NS=_AMD_TICK_NS if chip == "gfx942" else 0)
