"""Launching a kernel before the kernel ahead of it has ended (programmatic dependent launch).

On chips that can, a kernel's programs may start while the kernel ahead still runs, and wait on the device for
its results. This hides the time of the launch and of everything that a program does before it waits. A kernel
of such a chain waits before its first store and before its first load of anything that a kernel may have
written; only what no kernel writes, such as weights, may be read earlier. Every kernel waits, also one that
needs nothing from its predecessor: the end of a kernel then means that all kernels before it have ended.

A kernel that always follows a kernel of its own family may read earlier what no kernel of the family writes, if that
one waits before it lets the next kernel start: then all kernels before it have ended.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

OVERLAP_CHIPS = ("sm90", "sm100")


@triton.jit
def wait_for_kernel_ahead(OVERLAP: tl.constexpr):
    """Wait until the kernel ahead, and with it every kernel before it, has ended."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_kernel_start(OVERLAP: tl.constexpr):
    """Once all programs are here, programs of the next kernel may take the room that this kernel leaves."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


def overlapped(chip: str) -> dict[str, Any]:
    """Arguments of `launch` for a kernel that calls `wait_for_kernel_ahead`: its OVERLAP, and the launch option,
    which only the compilers of some chips know."""
    return dict(OVERLAP=True, launch_pdl=True) if chip in OVERLAP_CHIPS else dict(OVERLAP=False)
