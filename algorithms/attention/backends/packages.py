"""Attention by other packages: their requirements on the machine and on a call, and what they do not compute.

A tree is computed in two parts: the prefix without a mask by the package, the draft slots with their bit mask by
`paged_attention`, merged by log-sum-exp. This is exact, and no mask is evaluated over the prefix. This module imports
no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Protocol

import specdec_kernels as kernels
from algorithms.attention.backends.protocol import Backend

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specdec_kernels import AttentionMetadata, AttentionShape


def missing(module: str, package: str) -> str | None:
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
    import torch

    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def no_device() -> str | None:
    """Why no NVIDIA GPU can be used, or None."""
    import torch

    if torch.version.hip:
        return "it needs an NVIDIA GPU, this is a ROCm build of torch"
    return None if torch.cuda.is_available() else "it needs an NVIDIA GPU, torch sees none"


def half_precision_only(shape: AttentionShape) -> str | None:
    """The refusal of kernels that take float16 and bfloat16 throughout."""
    import torch

    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, the queries are {shape.dtype}"
    if shape.kv_dtype != shape.dtype:
        return f"the cache must have the dtype of the queries, {shape.dtype}, it has {shape.kv_dtype}"
    return None


def tree_window(mode: str, window: int | None) -> str | None:
    """The refusal of kernels whose windows go by slots."""
    return "a window over a tree goes by depth, and it counts slots" if mode == "tree" and window is not None else None


def capturing() -> bool:
    """Whether the current stream is being captured."""
    import torch

    return torch.cuda.is_current_stream_capturing()


def draft_part(metadata: AttentionMetadata, shape: AttentionShape, impl: str) -> AttentionMetadata | None:
    """Of a tree, the draft slots as separate requests without a prefix, for `paged_attention` with the mask: pages of
    one token, so they may begin anywhere. The other part is the prefix, which needs no mask."""
    import torch

    if metadata.mode != "tree":
        return None
    width = metadata.tree_width or shape.num_nodes
    table, used = metadata.page_table.contiguous(), metadata.used_slots(shape.num_nodes).to(torch.int32)
    slots = kernels.token_slots(table, metadata.lengths, used, width, shape.page_size, impl=impl)
    pages, no_prefix = slots.clamp(min=0).to(torch.int32), torch.zeros_like(metadata.lengths)
    return metadata._replace(page_table=pages, lengths=no_prefix, max_length=None)


class PackagePlan(Protocol):
    """What `PackageBackend` needs of a plan."""

    @property
    def metadata(self) -> AttentionMetadata: ...

    @property
    def draft(self) -> AttentionMetadata | None:
        """See `draft_part`."""
        ...


class PackageBackend(Backend):
    """Attention by another package. `attend` is its part of a call: of a tree the prefix, of other calls all."""

    _impl: str
    attend: Any
    """(plan, q, kv, with_lse) -> out [B, N, H, D], lse [B, N, H] float32 in natural logarithm, None unless asked for.
    Rows that are not in use hold anything."""

    def run_with_lse(
        self, plan: PackagePlan, q: Tensor, kv: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`run`, and lse [B, N, H] float32, natural logarithm, sinks included; -inf for rows past `q_lens`."""
        from algorithms.attention.backends.states import add_sinks, merge_states

        metadata, unused = plan.metadata, _unused(plan.metadata, q)
        out, lse = self.attend(plan, q, kv, with_lse=True)
        if plan.draft is not None:
            # Rows without a prefix have seen nothing yet; a package may leave them unwritten.
            lse = lse.masked_fill((unused | (metadata.lengths == 0)[:, None])[..., None], float("-inf"))
            tokens = kv.view(2, -1, 1, *kv.shape[3:])
            draft = kernels.paged_attention_with_lse(q, tokens, plan.draft, impl=self._impl)
            out, lse = merge_states(out, lse, *draft)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        return out.masked_fill(unused[..., None, None], 0.0), lse.masked_fill(unused[..., None], float("-inf"))

    def run(
        self,
        plan: Any,
        q: Tensor,
        kv: Tensor,
        sinks: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if sinks is None and plan.draft is None:
            result: Tensor = self.attend(plan, q, kv, with_lse=False)[0]
            result = result.masked_fill(_unused(plan.metadata, q)[..., None, None], 0.0)
        else:
            result = self.run_with_lse(plan, q, kv, sinks)[0]
        return result if out is None else out.copy_(result)


def _unused(metadata: AttentionMetadata, q: Tensor) -> Tensor:
    """[B, N] bool: rows of q past `q_lens`."""
    import torch

    return torch.arange(q.shape[1], device=q.device) >= metadata.used_rows(q.shape[1])[:, None]
