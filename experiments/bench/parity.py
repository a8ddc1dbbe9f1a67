"""Whether a kernel does what its reference says, before it gets a time.

The reference of a shape that fills a GPU may need more memory than there is. Attention is then compared on
the first and last requests that fit, and arguments too large to be copied are not compared with what the
reference leaves in them; `scope` says so in the row. What cannot be compared at all gets no time.

A draw compares one uniform with a sum over the vocabulary, float32 in the kernel and float64 in the reference. At
150,000 tokens a few draws in a thousand fall between the two sums, so a few rows of drawn tokens may differ, and
`scope` says how many did. Which tokens they are is held to the law by the tests, on vocabularies where all can be.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from experiments.bench.timing import tensors_in

# Half types round once, at the end; float32 results sum thousands of rounded products in another order.
_FLOAT32_ROUNDINGS = 64
_HALF_ROUNDINGS = 4
_REFERENCE_LIMIT_BYTES = 12 << 30
_DRAWING = ("pick_tokens", "accept", "accept_targets")
_BORDER_SHARE = 0.03  # of the rows, and one row in any case
# Arguments of attention with one entry a request; the pool is shared by all of them.
_BY_REQUEST = ("q", "q_latent", "q_rope", "page_table", "lengths", "mask", "q_lens", "depths", "row_depths")


@dataclass(frozen=True)
class Parity:
    """`problem` None: kernel and reference agree on everything that `scope` names."""

    problem: str | None
    scope: str
    reference_fits: bool


def check(function: Callable[..., Any], inputs: dict[str, Any]) -> Parity:
    """Compare both implementations of `function` on `inputs`, which stay as they are."""
    requests = _requests_that_fit(inputs)
    if requests is not None:
        scope = f"requests {requests} of {inputs['lengths'].shape[0]}: the reference of all needs too much memory"
        return Parity(_on_requests(function, inputs, requests), scope, reference_fits=False)
    problem, scope = disagreement(function, inputs), "all results and changed arguments"
    if problem is not None and _draws(function, inputs):
        differing, rows = _rows_that_differ(function, inputs)
        if differing <= max(1, _BORDER_SHARE * rows):
            problem, scope = None, f"{scope}; {differing} of {rows} rows drew another token"
    return Parity(problem, scope, reference_fits=True)


def disagreement(function: Callable[..., Any], inputs: dict[str, Any]) -> str | None:
    """What differs between the kernel and its reference on `inputs`, results and changed arguments alike."""
    sides = []
    for impl in ("triton", "reference"):
        own = deepcopy(inputs)
        sides.append(list(tensors_in((function(**own, impl=impl), own))))
    return difference(*sides)


def _draws(function: Callable[..., Any], inputs: dict[str, Any]) -> bool:
    temperature = inputs.get("temperature")
    return function.__name__ in _DRAWING and temperature is not None and bool((temperature > 0).any())


def _rows_that_differ(function: Callable[..., Any], inputs: dict[str, Any]) -> tuple[int, int]:
    """(rows in which any result differs, rows): a row is an entry of the results' first dimension."""
    sides = [list(tensors_in(function(**inputs, impl=impl))) for impl in ("triton", "reference")]
    rows = sides[0][0].shape[0]
    wrong = [
        any(_gap(kernel[row], reference[row]) is not None for kernel, reference in zip(*sides, strict=True))
        for row in range(rows)
    ]
    return sum(wrong), rows


def difference(kernel_side: list[torch.Tensor], reference_side: list[torch.Tensor]) -> str | None:
    """What differs between two lists of tensors, None where nothing does."""
    for index, (kernel, reference) in enumerate(zip(kernel_side, reference_side, strict=True)):
        if kernel.shape != reference.shape or kernel.dtype != reference.dtype:
            return f"tensor {index}: {kernel.dtype} {list(kernel.shape)}, not {reference.dtype} {list(reference.shape)}"
        if gap := _gap(kernel, reference):
            return f"tensor {index} of shape {list(kernel.shape)}: {gap}"
    return None


def _gap(kernel: torch.Tensor, reference: torch.Tensor) -> str | None:
    """Integers equal; floats within a few roundings of the largest value, NaN and infinities in the same places."""
    if not kernel.is_floating_point():
        wrong = int((kernel != reference).sum())
        return f"{wrong} of {kernel.numel()} entries differ" if wrong else None
    rounding = torch.finfo(kernel.dtype).eps
    if kernel.element_size() == 1:
        kernel, reference = kernel.float(), reference.float()
    finite = reference.isfinite()
    if not torch.equal(kernel.isfinite(), finite):
        return "finite in other places than the reference"
    if not finite.any():
        return None
    gap = (kernel[finite].double() - reference[finite].double()).abs().max()
    roundings = _HALF_ROUNDINGS if rounding > torch.finfo(torch.float32).eps else _FLOAT32_ROUNDINGS
    bound = roundings * rounding * reference[finite].double().abs().max()
    return None if bool(gap <= bound) else f"differs by {float(gap):.3g}, over {float(bound):.3g}"


def _requests_that_fit(inputs: dict[str, Any]) -> list[int] | None:
    """Requests to compare where all are too many for the reference's scores and gathered keys, else None."""
    q = inputs.get("q", inputs.get("q_latent"))
    if q is None or q.ndim != 4 or "page_table" not in inputs:
        return None
    pool = inputs["kv"] if "kv" in inputs else inputs["cache"]
    batch, num_nodes, heads = q.shape[:3]
    keys = int(inputs["lengths"].max()) + num_nodes if batch else 0
    # Scores twice in float32; gathered keys and values in their own type and in float32.
    entry = pool[0, 0, 0].numel() if pool.ndim == 5 else pool[0, 0].numel()
    one = keys * (2 * 4 * num_nodes * heads + 2 * entry * (4 + pool.element_size()))
    if batch * one <= _REFERENCE_LIMIT_BYTES and pool.numel() * pool.element_size() <= _REFERENCE_LIMIT_BYTES:
        return None
    count = max(1, min(batch, 2, _REFERENCE_LIMIT_BYTES // one))
    return [0, batch - 1][:count] if batch > 1 else [0]


def _on_requests(function: Callable[..., Any], inputs: dict[str, Any], requests: list[int]) -> str | None:
    """Run the kernel on all requests and compare those named with a run of the reference on them alone."""
    kernel_side = [tensor[requests] for tensor in tensors_in(function(**inputs, impl="triton"))]
    chosen = {
        name: value[requests].contiguous() if name in _BY_REQUEST and isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
    chosen.pop("plan", None)
    return difference(kernel_side, list(tensors_in(function(**chosen, impl="reference"))))
