"""What other packages require of the machine and of a call, and their results merged by log-sum-exp.

    lse = log(e^lse_a + e^lse_b)        (natural logarithms)
    out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b

An attention sink of logit z is a part without a value: lse' = log(e^lse + e^z), out' = e^(lse - lse') out.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from algorithms.attention.backends.protocol import Backend, LayerInputs, Reason
from algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_kernels import AttentionShape


def missing(module: str, package: str) -> Reason:
    """Why `module` cannot be imported, naming the `package` that brings it, or None."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        return f"the package {package} is not installed"
    try:
        importlib.import_module(module)
    except Exception as failure:  # an optional package may fail to load in any way
        return f"{package} does not import: {type(failure).__name__}: {str(failure).splitlines()[:1]}"
    return None


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA device, None for any other."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def no_device() -> Reason:
    if torch.version.hip:
        return "it needs an NVIDIA GPU, this is a ROCm build of torch"
    return None if torch.cuda.is_available() else "it needs an NVIDIA GPU, torch sees none"


def half_precision_only(shape: AttentionShape) -> Reason:
    """The refusal of kernels that take float16 and bfloat16 throughout."""
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, the queries are {shape.dtype}"
    if shape.kv_dtype != shape.dtype:
        return f"the cache must have the dtype of the queries, {shape.dtype}, it has {shape.kv_dtype}"
    return None


class PackageBackend(Backend):
    """Attention by the package of this name and module, over a `run_with_lse` that gives out and lse."""

    package: str
    module: str
    run_with_lse: Any

    @classmethod
    def unavailable(cls) -> Reason:
        """Why the package cannot be used on this machine."""
        return no_device() or missing(cls.module, cls.package)

    def run(self, plan: Any, layer: LayerInputs) -> Tensor:
        return self.run_with_lse(plan, layer.q, layer.kv, layer.sinks)[0]


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys: out [..., D] in out_a's dtype, lse [...] float32.

    A part without a visible key has lse -inf; its out is ignored, also where it is NaN.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    anchor = torch.where(lse == float("-inf"), 0.0, lse)
    parts = []
    for out, part in ((out_a, lse_a), (out_b, lse_b)):
        weighted = out.float() * torch.exp(part - anchor)[..., None]
        parts.append(weighted.masked_fill((part == float("-inf"))[..., None], 0.0))
    return (parts[0] + parts[1]).to(out_a.dtype), lse


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add to every row of out [..., H, D], lse [..., H] a sink of logit sinks[h] without a value."""
    grown = torch.logaddexp(lse, sinks.float())
    return (out.float() * torch.exp(lse - grown)[..., None]).to(out.dtype), grown
