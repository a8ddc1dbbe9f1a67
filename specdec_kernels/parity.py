"""Whether a kernel computes what its reference defines, at sizes that fill a GPU.

If the reference needs too much memory, only the first and last requests are compared, and changed arguments are not.
Sampling compares one uniform with a sum over the vocabulary, of float32 weights in the kernel and of float64 weights
in the reference, so a few rows may have another token; `scope` says how many. The tests compare the distributions.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.cases import Comparison

# Half types round once, at the end; float32 results sum thousands of rounded products in another order.
_FLOAT32_ROUNDINGS = 64
_HALF_ROUNDINGS = 4
_REFERENCE_LIMIT_BYTES = 12 << 30
_BORDER_SHARE = 0.03  # of the rows, and one row in any case


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors inside nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def bytes_in(value: Any) -> int:
    """Bytes that the tensors in `value` address."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


@dataclass(frozen=True)
class Parity:
    """`problem` None: kernel and reference agree on everything that `scope` names."""

    problem: str | None
    scope: str
    reference_fits: bool


def check(function: Callable[..., Any], inputs: dict[str, Any], comparison: Comparison) -> Parity:
    """Compare both implementations of `function` on `inputs`, which stay as they are."""
    requests = _requests_that_fit(inputs, comparison)
    if requests is not None:
        batch = len(inputs[comparison.by_request[0]])
        scope = f"requests {requests} of {batch}: the reference of all needs too much memory"
        return Parity(_on_requests(function, inputs, requests, comparison), scope, reference_fits=False)
    problem, scope = disagreement(function, inputs), "all results and changed arguments"
    temperature = getattr(inputs.get("sampling"), "temperature", None)
    samples = function.__name__ in comparison.draws and temperature is not None and bool((temperature > 0).any())
    if problem is not None and samples:
        differing, rows = _rows_that_differ(function, inputs)
        if differing <= max(1, _BORDER_SHARE * rows):
            problem, scope = None, f"{scope}; {differing} of {rows} rows drew another token"
    return Parity(problem, scope, reference_fits=True)


def disagreement(function: Callable[..., Any], inputs: dict[str, Any]) -> str | None:
    """Difference between the kernel and its reference on `inputs`, results and changed arguments alike."""
    sides = []
    for impl in ("triton", "reference"):
        own = deepcopy(inputs)
        sides.append(list(tensors_in((function(**own, impl=impl), own))))
    return difference(*sides)


def _rows_that_differ(function: Callable[..., Any], inputs: dict[str, Any]) -> tuple[int, int]:
    """(rows in which any result differs, rows); results are compared by their first dimension."""
    sides = [list(tensors_in(function(**inputs, impl=impl))) for impl in ("triton", "reference")]
    rows = sides[0][0].shape[0]
    wrong = [
        any(_gap(kernel[row], reference[row]) is not None for kernel, reference in zip(*sides, strict=True))
        for row in range(rows)
    ]
    return sum(wrong), rows


def difference(kernel_side: list[Tensor], reference_side: list[Tensor]) -> str | None:
    for index, (kernel, reference) in enumerate(zip(kernel_side, reference_side, strict=True)):
        if kernel.shape != reference.shape or kernel.dtype != reference.dtype:
            return f"tensor {index}: {kernel.dtype} {list(kernel.shape)}, not {reference.dtype} {list(reference.shape)}"
        if gap := _gap(kernel, reference):
            return f"tensor {index} of shape {list(kernel.shape)}: {gap}"
    return None


def _gap(kernel: Tensor, reference: Tensor) -> str | None:
    """Integers equal; floats within a few roundings of the largest value, NaN and infinities in the same places."""
    if not kernel.is_floating_point():
        wrong = int((kernel != reference).sum())
        return f"{wrong} of {kernel.numel()} entries differ" if wrong else None
    rounding = torch.finfo(kernel.dtype).eps
    if kernel.element_size() == 1:
        kernel, reference = kernel.float(), reference.float()
    if torch.equal(kernel, reference):  # picking the finite ones of a large pool takes many times its memory
        return None
    finite = reference.isfinite()
    if not torch.equal(kernel.isfinite(), finite):
        return "finite in other places than the reference"
    if not finite.any():
        return None
    gap = (kernel[finite].double() - reference[finite].double()).abs().max()
    roundings = _HALF_ROUNDINGS if rounding > torch.finfo(torch.float32).eps else _FLOAT32_ROUNDINGS
    bound = roundings * rounding * reference[finite].double().abs().max()
    return None if bool(gap <= bound) else f"differs by {float(gap):.3g}, over {float(bound):.3g}"


def _requests_that_fit(inputs: dict[str, Any], comparison: Comparison) -> list[int] | None:
    """Requests to compare where the reference of all of them, or a copy of the inputs, is too large; else None."""
    if comparison.reference_bytes is None or not all(name in inputs for name in comparison.by_request[:2]):
        return None
    batch, one = len(inputs[comparison.by_request[0]]), comparison.reference_bytes(inputs)
    if batch * one <= _REFERENCE_LIMIT_BYTES and bytes_in(inputs) <= _REFERENCE_LIMIT_BYTES:
        return None
    count = max(1, min(batch, 2, _REFERENCE_LIMIT_BYTES // one))
    return [0, batch - 1][:count] if batch > 1 else [0]


def _on_requests(
    function: Callable[..., Any], inputs: dict[str, Any], requests: list[int], comparison: Comparison
) -> str | None:
    kernel_side = [tensor[requests] for tensor in tensors_in(function(**inputs, impl="triton"))]
    chosen = {name: value for name, value in inputs.items() if name != "tile_schedule"}
    for name in chosen.keys() & set(comparison.by_request):
        value = chosen[name]
        chosen[name] = value[requests].contiguous() if isinstance(value, Tensor) else value.of_requests(requests)
    return difference(kernel_side, list(tensors_in(function(**chosen, impl="reference"))))
