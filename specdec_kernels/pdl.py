"""Programmatic dependent launch (PDL): a kernel starts before its predecessor on the stream has ended.

The programs of a dependent kernel may start once every program of its predecessor has called `launch_dependents` or
ended, and wait on the device for its results. The rules:

- Every kernel waits. A kernel that has passed its wait knows that all earlier kernels of the stream have ended.
- A kernel waits before its first store, and before its first load of anything that an earlier kernel may have written.
- Constants that no kernel writes, such as weights, may be loaded before the wait.
- Norms and merges call `launch_dependents` before they wait: they are small, and what follows them loads constants
alone before its own wait, weights as far as its buffers reach.
- A kernel that always follows a kernel of its own family may load, before its wait, what no kernel of that family
writes, if the predecessor waits before it calls `launch_dependents`: all kernels before the pair have then ended.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait until the predecessor, and with it every earlier kernel of the stream, has ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin(PDL: tl.constexpr):
    """Both, in the order of most kernels: wait, then make room for the next kernel."""
    wait_for_predecessor(PDL)
    launch_dependents(PDL)


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Once every program has called this, programs of the next kernel may take the resources that this one leaves."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
